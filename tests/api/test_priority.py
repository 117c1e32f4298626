"""`priority` and the API key's name reach the engine's queue, from every route that answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_backend import USER, Client, FakeBackend, server

from outrider.api.keys import new_key
from outrider.request import SamplingParams

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 5},
}


def params_of(backend: FakeBackend) -> SamplingParams:
    (params,) = [request.params for request in backend.requests] + [
        params for _, params in backend.completions
    ]
    return params


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("given", "value"), [({"priority": -7}, -7), ({"priority": 3.0}, 3), ({}, 0)])
def test_priority_reaches_the_engine(path: str, given: dict[str, Any], value: int) -> None:
    backend = FakeBackend()
    assert Client(server(backend)).post(path, BODIES[path] | given).status_code == 200
    assert params_of(backend).priority == value


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("priority", [1001, -1001, 1.5, "urgent", True, 10**30])
def test_a_priority_that_means_nothing_is_refused(path: str, priority: Any) -> None:
    response = Client(server(FakeBackend())).post(path, BODIES[path] | {"priority": priority})
    assert response.status_code == 400
    assert "priority" in response.text


def test_the_name_of_the_key_is_the_tenant(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.touch(mode=0o600)
    for name in ("alice", "bob"):
        key, table = new_key(name)
        file.write_text(file.read_text() + table)
        backend = FakeBackend()
        client = Client(server(backend, api_keys_file=str(file)), authorization=f"Bearer {key}")
        assert client.post("/v1/chat/completions", BODIES["/v1/chat/completions"]).status_code == 200
        assert params_of(backend).tenant == name


def test_a_client_cannot_name_its_tenant() -> None:
    backend = FakeBackend()
    body = BODIES["/v1/chat/completions"] | {"tenant": "alice"}
    assert Client(server(backend)).post("/v1/chat/completions", body).status_code == 200
    assert params_of(backend).tenant == ""
