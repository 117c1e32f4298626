"""Workloads: enough questions, all written for this project."""

from __future__ import annotations

import json
import re
import runpy
from importlib import resources
from pathlib import Path

import pytest

from outrider.bench.settings import PRESETS, BenchSettings
from outrider.bench.workloads import WORKLOADS
from outrider.config import InvalidConfig


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_has_at_least_sixteen_different_tasks(name: str) -> None:
    workload = WORKLOADS[name]
    assert workload.name == name
    assert len({json.dumps(task.messages) for task in workload.tasks}) == len(workload.tasks) >= 16


def test_no_prompt_is_among_those_that_the_head_is_tested_on() -> None:
    data = (
        resources.files("outrider.models.files") / "data" / "smollm2-135m-instruct" / "held_out_prompts.json"
    )
    held_out = data.read_text()
    for workload in WORKLOADS.values():
        assert not [task.prompt for task in workload.tasks if json.dumps(task.prompt)[1:-1] in held_out]


def test_no_prompt_is_among_those_that_the_head_is_trained_on() -> None:
    """Whatever a template of the training prompts may be filled with."""
    file = Path(__file__).parents[2] / "recipes" / "default_head" / "everyday.py"
    everyday = runpy.run_path(str(file))

    def pattern(template: str) -> str:
        pieces = everyday["SLOT"].split(template)
        slots = ("|".join(map(re.escape, everyday["SLOTS"][name])) for name in pieces[1::2])
        fixed = map(re.escape, pieces[::2])
        return next(fixed) + "".join(f"(?:{slot}){rest}" for slot, rest in zip(slots, fixed, strict=True))

    trained = [re.compile(pattern(template), re.IGNORECASE) for template in everyday["TEMPLATES"]]
    assert any(one.fullmatch("What is the difference between weather and climate?") for one in trained)
    for workload in WORKLOADS.values():
        prompts = [task.prompt for task in workload.tasks]
        assert not [prompt for prompt in prompts if any(one.fullmatch(prompt) for one in trained)]


def test_tasks_go_round() -> None:
    chat = WORKLOADS["chat"]
    taken = chat.take(14, 4)
    assert taken[:2] == list(chat.tasks[14:])
    assert [task.prompt for task in taken[2:]] == [f"Question 2. {task.prompt}" for task in chat.tasks[:2]]


@pytest.mark.parametrize("name", WORKLOADS)
def test_nothing_is_asked_twice_in_a_round_or_in_the_next_ones(name: str) -> None:
    """Else a prefix cache would answer for the model, and rounds would be copies of each other."""
    workload = WORKLOADS[name]
    asked = [task for index in range(4) for task in workload.take(32 * index, 32, index)]
    assert len({(task.prompt, task.kind) for task in asked}) == len(asked) == 128


def test_a_fresh_workload_never_begins_twice_alike() -> None:
    long = WORKLOADS["long"]
    starts = {task.prompt[:16] for run in range(4) for task in long.take(run * 16, 16, run)}
    assert len(starts) == 64
    assert len({len(start) for start in starts}) == 1
    assert long.take(3, 5, 2) == long.take(3, 5, 2)


@pytest.mark.parametrize("prompt_tokens", [100, 700, 1500, 6000])
def test_prompts_have_the_length_that_is_asked_for(prompt_tokens: int) -> None:
    """4.17 characters a token, and 31 in the chat template: measured with the default model's tokenizer."""
    settings = BenchSettings(workloads=("long", "chat"), prompt_tokens=prompt_tokens)
    tasks = settings.workload("long").take(0, 40, 1)
    lengths = [31 + len(task.prompt) / 4.17 for task in tasks]
    assert all(abs(length - prompt_tokens) < 50 + prompt_tokens * 0.03 for length in lengths)
    assert len({task.prompt.partition("1. ")[0] for task in tasks}) == 40  # no two begin alike
    assert settings.workload("chat") is WORKLOADS["chat"]


def test_the_usual_long_prompts_are_those_of_700_tokens() -> None:
    asked_for = BenchSettings(workloads=("long",), prompt_tokens=700).workload("long")
    assert asked_for == BenchSettings(workloads=("long",)).workload("long") == WORKLOADS["long"]


def test_a_third_of_the_mixed_rows_is_of_each_kind() -> None:
    kinds = [task.kind for task in WORKLOADS["mixed"].take(0, 6)]
    assert kinds == ["plain", "free", "constrained"] * 2
    assert all((task.schema is not None) == (task.kind == "constrained") for task in WORKLOADS["mixed"].tasks)


@pytest.mark.parametrize("prompt_tokens", [6000, 30_000])
def test_one_row_in_eight_of_the_uneven_ones_is_long(prompt_tokens: int) -> None:
    """Its long part is always the same, so that a prefix cache has it after the first round."""
    settings = BenchSettings(workloads=("uneven",), prompt_tokens=prompt_tokens)
    tasks = settings.workload("uneven").take(0, 32)
    long = {task.system for task in tasks[::8]}
    assert len(long) == 1
    assert abs(len(long.pop() or "") / 4.17 - prompt_tokens) < 0.05 * prompt_tokens
    assert all(task.system is None for i, task in enumerate(tasks) if i % 8)
    assert (settings.workload("uneven") == WORKLOADS["uneven"]) == (prompt_tokens == 6000)


def test_every_fourth_request_of_arrivals_has_a_long_prompt_of_its_own() -> None:
    settings = BenchSettings(workloads=("arrivals",), prompt_tokens=1000)
    asked = settings.workload("arrivals").take(0, 32, 1)
    assert [task.kind for task in asked] == (["free"] * 3 + ["long"]) * 8
    long = [task.prompt for task in asked if task.kind == "long"]
    assert all(3500 < len(prompt) < 4800 for prompt in long)
    assert len({prompt[:16] for prompt in long}) == 8
    assert asked == settings.workload("arrivals").take(0, 32, 2), "the variants' answers can be compared"


def test_the_shared_prefix_is_long_and_the_same() -> None:
    tasks = WORKLOADS["shared"].tasks
    assert len({task.system for task in tasks}) == 1
    assert len(tasks[0].system or "") > 2000
    assert [message["role"] for message in tasks[0].messages] == ["system", "user"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workloads": ("chat", "poetry")}, "there is no 'poetry'. Workloads: chat, code"),
        ({"workloads": ()}, "--workloads needs at least one"),
        ({"streams": (1, 1)}, "--streams has the same value twice"),
        ({"streams": (0,)}, "--streams: 0 is not from 1"),
        ({"temperatures": (-1.0,)}, "--temperatures: -1 is not"),
        ({"temperatures": (float("nan"),)}, "--temperatures: nan is not"),
        ({"rounds": 0}, "--rounds"),
        ({"requests": 0}, "--requests"),
        ({"max_tokens": 1}, "--max-tokens"),
        ({"prompt_tokens": 1500}, "--prompt-tokens is for the workloads long, arrivals, uneven: add"),
        ({"workloads": ("long",), "prompt_tokens": 99}, "--prompt-tokens: 99 is not from 100"),
        ({"depths": (0,)}, "depth 0 is always measured"),
        ({"depths": (9,)}, "--depths: 9"),
        ({"timeout_s": 0}, "--timeout"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        BenchSettings(**changes)  # type: ignore[arg-type]


def test_presets_are_settings() -> None:
    assert BenchSettings(**PRESETS["full"]).streams == (1, 2, 4, 8, 16)
    assert set(BenchSettings(**PRESETS["full"]).workloads) == set(WORKLOADS)
    assert BenchSettings(**PRESETS["quick"]).requests_per_round(4) == 4
