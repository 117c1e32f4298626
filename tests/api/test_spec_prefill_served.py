"""Skipped prompt tokens over HTTP: `outrider serve --spec-prefill-model self`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from server_process import ServerProcess, serving, write_tiny_model

PROMPT = [5 + i * i % 90 for i in range(300)]
BODY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
SKIPPING = {"spec_prefill": {"keep": 0.5}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    with serving(folder, "--spec-prefill-model", "self", "--spec-prefill-layers", "1") as process:
        yield process


def complete(server: ServerProcess, status: int = 200, **more: Any) -> Any:
    response = server.post("/v1/completions", {"model": server.model, **BODY, **more})
    assert response.status_code == status, response.text
    return response.json()


def test_usage_says_how_many_tokens_were_skipped(server: ServerProcess) -> None:
    exact, skipping = complete(server)["usage"], complete(server, **SKIPPING, n=2)["usage"]
    assert "skipped_tokens" not in exact["prompt_tokens_details"]
    assert skipping["prompt_tokens"] == exact["prompt_tokens"] == len(PROMPT)
    assert skipping["prompt_tokens_details"] == {"cached_tokens": 0, "skipped_tokens": 160}  # 5 of 10 chunks


def test_a_share_of_one_is_the_exact_answer(server: ServerProcess) -> None:
    whole = complete(server, spec_prefill={"keep": 1})
    assert whole["choices"] == complete(server)["choices"]


def test_what_would_break_a_promise_is_refused(server: ServerProcess) -> None:
    error = complete(server, status=400, **SKIPPING, echo=True, logprobs=1)["error"]
    assert "log-probabilities of the prompt" in error["message"]
