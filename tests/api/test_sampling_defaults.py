"""Sampling values that a request leaves out are the server's defaults, on every route."""

from __future__ import annotations

from typing import Any

import pytest
from fake_backend import USER, Client, FakeBackend, server

from outrider.request import SamplingDefaults, SamplingParams

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
DEFAULTS = SamplingDefaults(temperature=0.25, top_p=0.9, top_k=40, min_p=0.05, repetition_penalty=1.1)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 9},
}


def sampled(defaults: SamplingDefaults, path: str, **fields: Any) -> dict[str, float]:
    """The sampling values that the engine gets for a request with these fields."""
    backend = FakeBackend()
    response = Client(server(backend, sampling=defaults)).post(path, BODIES[path] | fields)
    assert response.status_code == 200, response.text
    params = backend.completions[0][1] if backend.completions else backend.requests[0].params
    return {name: getattr(params, name) for name in NAMES}


@pytest.mark.parametrize("path", BODIES)
def test_defaults_apply_where_the_request_is_silent(path: str) -> None:
    assert sampled(DEFAULTS, path) == DEFAULTS.given
    assert sampled(DEFAULTS, path, temperature=None, top_k=None) == DEFAULTS.given
    assert sampled(DEFAULTS, path, temperature=1.0) == DEFAULTS.given | {"temperature": 1.0}


@pytest.mark.parametrize("path", BODIES)
def test_the_request_overrides_every_default_also_with_neutral_values(path: str) -> None:
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert sampled(DEFAULTS, path, **neutral) == neutral
    assert sampled(DEFAULTS, path, top_k=-1)["top_k"] == 0


@pytest.mark.parametrize("path", BODIES)
def test_without_defaults_the_values_are_those_of_the_api(path: str) -> None:
    params = SamplingParams()
    assert sampled(SamplingDefaults(), path) == {name: getattr(params, name) for name in NAMES}


def test_the_response_object_names_the_values_that_were_used() -> None:
    client = Client(server(FakeBackend(), sampling=DEFAULTS))
    response = client.post("/v1/responses", {"input": "Hi", "top_p": 0.5}).json()
    assert (response["temperature"], response["top_p"]) == (0.25, 0.5)


def test_models_show_the_defaults() -> None:
    client = Client(server(FakeBackend(), sampling=SamplingDefaults(temperature=0.25)))
    shown = client.get("/v1/models/tiny").json()["default_sampling_params"]
    assert shown == {
        "temperature": 0.25,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    assert client.get("/v1/models").json()["data"][0]["default_sampling_params"] == shown
