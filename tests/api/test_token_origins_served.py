"""`return_token_origins` on a real server: every token of the answer, and the same answer as without."""

from __future__ import annotations

import json
from typing import Any

from fake_backend import USER

from server_process import ServerProcess

CHAT = "/v1/chat/completions"
ONLY = "the only answer"


def choice_of(live: ServerProcess, **options: Any) -> dict[str, Any]:
    response = live.post(CHAT, {"messages": USER, "seed": 7, "max_tokens": 40} | options)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def test_origins_are_told_of_every_token_and_change_nothing(live: ServerProcess) -> None:
    options = {"logprobs": True, "draft_depth": 3, "ignore_eos": True}
    without = choice_of(live, **options)
    choice = choice_of(live, return_token_origins=True, **options)
    origins = choice.pop("token_origins")
    assert choice == without
    for origin, token in zip(origins, choice["logprobs"]["content"], strict=True):
        assert (origin["token"], origin["logprob"]) == (token["token"], token["logprob"])
    assert len(origins) == 40
    assert origins[0]["origin"] == "plain"  # the first token comes from the prompt's last step


def test_tokens_that_a_grammar_forces_are_named(live: ServerProcess) -> None:
    choice = choice_of(live, return_token_origins=True, guided_choice=[ONLY])
    assert choice["message"]["content"] == ONLY
    forced = [one for one in choice["token_origins"] if one["origin"] == "forced"]
    assert forced[0]["place"] == 1
    assert all(one["token"] in ONLY for one in forced if not one["token"].startswith("<"))


def test_streamed_origins_are_those_of_the_whole_answer(live: ServerProcess) -> None:
    body = {"messages": USER, "seed": 7, "max_tokens": 30, "return_token_origins": True, "draft_depth": 2}
    streamed = []
    for line in live.post(CHAT, body | {"stream": True}).text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                streamed += choice.get("token_origins", [])
    whole = choice_of(live, **body)["token_origins"]
    assert [one["token"] for one in streamed] == [one["token"] for one in whole]
