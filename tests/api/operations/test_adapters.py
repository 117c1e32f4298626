"""Adapters over HTTP: routes for operators, the names that requests may have, and which paths are allowed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from fake_backend import FACTS, USER, Client, FakeBackend, FakeTokenizer, settings

from outrider.api.app import create_server
from outrider.engine.adapters import AdapterConflict, AdapterRefused, UnknownAdapter
from outrider.plan import AdapterInfo


class FakeEngine:
    """An engine with adapters that are only names."""

    def __init__(self) -> None:
        self.adapters: dict[str, AdapterInfo] = {}
        self.busy: set[str] = set()

    def load_adapter(self, name: str, path: str | Path) -> AdapterInfo:
        if name in self.adapters:
            raise AdapterConflict(f"an adapter {name!r} is loaded already")
        if not os.path.exists(Path(path, "adapter_config.json")):
            raise AdapterRefused(f"{path}/adapter_config.json is missing")
        info = AdapterInfo(len(self.adapters) + 1, name, str(path), "lora", 8, 7, 1000, "abc")
        self.adapters[name] = info
        return info

    def unload_adapter(self, name: str) -> AdapterInfo:
        if name not in self.adapters:
            raise UnknownAdapter(f"there is no adapter {name!r}")
        if name in self.busy:
            raise AdapterConflict("1 requests use it")
        return self.adapters.pop(name)


class World:
    def __init__(self, folder: Path | None, **changes: Any) -> None:
        self.engine, self.backend = FakeEngine(), FakeBackend()
        self.server = create_server(
            self.backend,
            FACTS,
            FakeTokenizer(),
            settings(**changes),
            adapters=self.engine,
            adapters_folder=folder,
        )
        self.client = Client(self.server)

    def load(self, name: str, path: str) -> Any:
        return self.client.post("/v1/adapters", {"name": name, "path": path})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("inside/sql", "outside/sql"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "adapter_config.json").write_text("{}")
    return tmp_path.resolve()


@pytest.fixture
def world(folder: Path) -> World:
    return World(folder / "inside")


def test_an_adapter_is_loaded_listed_and_unloaded(world: World) -> None:
    loaded = world.load("sql", "sql")
    assert loaded.status_code == 200, loaded.text
    assert loaded.json()["kind"] == "lora"
    listed = world.client.get("/v1/adapters").json()["data"]
    assert [one["id"] for one in listed] == ["sql"]
    models = world.client.get("/v1/models").json()
    assert [one["id"] for one in models["data"]] == ["tiny", "other", "tiny:sql"]
    assert models["data"][2]["parent"] == "tiny"
    assert world.client.get("/v1/models/tiny:sql").json()["parent"] == "tiny"
    assert world.load("sql", "sql").status_code == 409
    world.engine.busy.add("sql")
    assert world.client.request("DELETE", "/v1/adapters/sql").status_code == 409
    world.engine.busy.clear()
    assert world.client.request("DELETE", "/v1/adapters/sql").json()["freed_bytes"] == 1000
    assert world.client.request("DELETE", "/v1/adapters/sql").status_code == 404
    assert world.client.get("/v1/models/tiny:sql").status_code == 404


def test_paths_outside_of_the_allowed_folder_are_refused(world: World, folder: Path) -> None:
    (folder / "inside" / "link").symlink_to(folder / "outside" / "sql")
    absolute = str(folder / "outside" / "sql")
    for path in ("../outside/sql", absolute, "link", "sql/../../outside/sql", "/", ".."):
        assert world.load("bad", path).status_code == 403, path
    assert world.load("good", str(folder / "inside" / "sql")).status_code == 200
    for path in ("nowhere", "sql\\0", "x" * 500):
        assert world.load("bad", path.replace("\\0", "\0")).status_code == 400, path
    assert list(world.engine.adapters) == ["good"]


def test_without_a_folder_nothing_is_loaded_over_http(folder: Path) -> None:
    refused = World(None).load("sql", str(folder / "inside" / "sql"))
    assert refused.status_code == 403
    assert "--adapters-dir" in refused.json()["error"]["message"]


@pytest.mark.parametrize("name", ["", "a:b", "../a", "a/b", "x" * 65, 7, None])
def test_bad_names_are_refused(world: World, name: Any) -> None:
    assert world.client.post("/v1/adapters", {"name": name, "path": "sql"}).status_code == 400


def test_only_operators_may_load_list_and_unload(folder: Path) -> None:
    world = World(folder / "inside", api_key="user", operator_key="operator")
    user, operator = (Client(world.server, authorization=f"Bearer {key}") for key in ("user", "operator"))
    body = {"name": "sql", "path": "sql"}
    assert world.client.post("/v1/adapters", body).status_code == 401
    assert user.post("/v1/adapters", body).status_code == 403
    assert user.get("/v1/adapters").status_code == 403
    assert user.request("DELETE", "/v1/adapters/sql").status_code == 403
    assert operator.post("/v1/adapters", body).status_code == 200
    assert operator.request("DELETE", "/v1/adapters/sql").status_code == 200


REQUESTS = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 9},
}


def asked(world: World, path: str, **fields: Any) -> tuple[str | None, Any]:
    """The adapter that the backend is asked for, and the model's name in the answer."""
    answer = world.client.post(path, REQUESTS[path] | fields)
    assert answer.status_code == 200, answer.text
    backend = world.backend
    params = backend.completions[-1][1] if path == "/v1/completions" else backend.requests[-1].params
    return params.adapter, answer.json()["model"]


@pytest.mark.parametrize("path", REQUESTS)
def test_requests_name_an_adapter_in_a_field_or_in_the_model(world: World, path: str) -> None:
    world.load("sql", "sql")
    assert asked(world, path) == (None, "tiny")
    assert asked(world, path, adapter="sql") == ("sql", "tiny")
    assert asked(world, path, model="other:sql") == ("sql", "other:sql")
    assert asked(world, path, model="tiny:sql", adapter="sql") == ("sql", "tiny:sql")
    contradiction = world.client.post(path, REQUESTS[path] | {"model": "tiny:sql", "adapter": "poem"})
    assert contradiction.status_code == 400
    assert world.client.post(path, REQUESTS[path] | {"model": "nobody:sql"}).status_code == 404


OLLAMA_REQUESTS = {
    "/api/chat": {"messages": USER, "stream": False},
    "/api/generate": {"prompt": "Hi", "stream": False},
}


@pytest.mark.parametrize("path", OLLAMA_REQUESTS)
def test_ollamas_requests_name_an_adapter_too(world: World, path: str) -> None:
    world.load("sql", "sql")
    assert "tiny:sql" in [one["name"] for one in world.client.get("/api/tags").json()["models"]]
    for fields, adapter in (
        ({"model": "tiny"}, None),
        ({"model": "tiny:latest"}, None),
        ({"model": "tiny:sql"}, "sql"),
        ({"model": "tiny", "adapter": "sql"}, "sql"),
    ):
        answer = world.client.post(path, OLLAMA_REQUESTS[path] | fields)
        assert answer.status_code == 200, answer.text
        assert world.backend.requests[-1].params.adapter == adapter
        assert answer.json()["model"] == fields["model"]


def test_the_model_of_an_adapter_is_not_unloaded_by_the_adapters_name(world: World) -> None:
    world.load("sql", "sql")
    assert world.client.post("/v1/models/tiny:sql/unload").status_code == 400
    assert world.client.request("DELETE", "/v1/adapters/sql?model=tiny:sql").status_code == 400
    assert world.client.request("DELETE", "/v1/adapters/sql?model=other").status_code == 200


def test_a_model_without_adapters_refuses_them() -> None:
    client = Client(create_server(FakeBackend(), FACTS, FakeTokenizer(), settings()))
    refused = client.post("/v1/completions", {"prompt": "Hi", "adapter": "sql"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "adapter_not_found")
    unknown = client.post("/v1/completions", {"prompt": "Hi", "model": "tiny:sql"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert client.get("/v1/adapters").json()["data"] == []


def test_a_served_name_with_a_colon_is_not_split(folder: Path) -> None:
    world = World(folder / "inside", served_model_names=("llama:8b",))
    assert asked(world, "/v1/completions", model="llama:8b") == (None, "llama:8b")
    assert asked(world, "/v1/completions", model="llama:8b:sql") == ("sql", "llama:8b:sql")


def test_any_model_name_takes_unknown_adapters_for_a_part_of_the_name(folder: Path) -> None:
    world = World(folder / "inside", any_model_name=True)
    world.load("sql", "sql")
    assert asked(world, "/v1/completions", model="gpt:latest") == (None, "gpt:latest")
    assert asked(world, "/v1/completions", model="gpt:sql") == ("sql", "gpt:sql")


def test_an_unknown_adapter_is_a_404(folder: Path) -> None:
    world = World(folder / "inside")
    world.backend.failure = UnknownAdapter("there is no adapter 'sql' on this server")
    answer = world.client.post("/v1/chat/completions", {"messages": USER, "adapter": "sql"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "adapter_not_found"
