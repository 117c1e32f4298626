"""How turns are taken: arms alternate, ask the same, and none spoils another's round."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from made_up import FakeTarget

from outrider.bench.errors import BenchFailed
from outrider.bench.rounds import Benchmark, Turn, turns
from outrider.bench.settings import Settings
from outrider.bench.target import Arm, arms_of

SMALL: dict[str, Any] = {"workloads": ("chat",), "streams": (2,), "rounds": 3, "requests": 2}


def run(benchmark: Benchmark) -> Benchmark:
    asyncio.run(benchmark.run())
    return benchmark


def test_arms_of_one_target_are_off_and_each_depth() -> None:
    arms = arms_of([FakeTarget()], ("auto", 3))
    assert [(arm.name, arm.depth) for arm in arms] == [("off", 0), ("auto", "auto"), ("depth 3", 3)]


def test_arms_of_servers_carry_their_names_and_a_foreign_server_is_one_arm() -> None:
    arms = arms_of([FakeTarget("ours"), FakeTarget("theirs", can_draft=False)], ("auto",))
    assert [(arm.name, arm.depth) for arm in arms] == [
        ("ours off", 0),
        ("ours auto", "auto"),
        ("theirs", None),
    ]


def test_the_order_of_turns_changes_every_round() -> None:
    arms = arms_of([FakeTarget()], ("auto",))
    assert [[arm.name for arm in turns(arms, i)] for i in range(3)] == [
        ["off", "auto"],
        ["auto", "off"],
        ["off", "auto"],
    ]


def test_rounds_alternate_and_keep_their_place() -> None:
    benchmark = run(Benchmark(arms_of([FakeTarget()], ("auto",)), Settings(**SMALL)))
    assert [(one.index, one.place, one.arm) for one in benchmark.measured[0].rounds] == [
        (0, 0, "off"),
        (0, 1, "auto"),
        (1, 0, "auto"),
        (1, 1, "off"),
        (2, 0, "off"),
        (2, 1, "auto"),
    ]


def test_arms_ask_the_same_with_the_same_seeds_and_rounds_ask_something_else() -> None:
    target = FakeTarget()
    settings = Settings(**(SMALL | {"temperatures": (0.8,)}))
    run(Benchmark(arms_of([target], ("auto",)), settings))
    timed = [(task, asking) for task, asking in target.asked if asking.max_tokens == settings.max_tokens]
    off = [(task.prompt, asking.seed) for task, asking in timed if asking.depth == 0]
    auto = [(task.prompt, asking.seed) for task, asking in timed if asking.depth == "auto"]
    assert sorted(off) == sorted(auto)
    assert len(set(off)) == len(off) == 12
    assert {asking.temperature for _, asking in timed} == {0.8}


def test_streams_run_at_once_and_no_more_than_asked_for() -> None:
    target = FakeTarget(pause_s=0.002)
    run(Benchmark(arms_of([target], ("auto",)), Settings(**(SMALL | {"streams": (3,), "requests": 2}))))
    assert target.most_live == 3


def test_plain_rows_never_draft_and_foreign_servers_are_not_told_a_depth() -> None:
    ours, theirs = FakeTarget("ours"), FakeTarget("theirs", can_draft=False)
    settings = Settings(**(SMALL | {"workloads": ("mixed",), "rounds": 1, "requests": 3}))
    run(Benchmark(arms_of([ours, theirs], ("auto",)), settings))
    assert {asking.depth for task, asking in ours.asked if task.kind == "plain"} == {0}
    assert {asking.depth for task, asking in ours.asked if task.kind == "constrained"} == {0, "auto"}
    assert {asking.depth for _, asking in theirs.asked} == {None}


def test_every_arm_is_warmed_up_before_it_is_timed_grammars_too() -> None:
    target = FakeTarget()
    settings = Settings(**(SMALL | {"workloads": ("json",), "rounds": 1}))
    run(Benchmark(arms_of([target], ("auto",)), settings))
    first_timed = next(i for i, (_, a) in enumerate(target.asked) if a.max_tokens == settings.max_tokens)
    warm = target.asked[1:first_timed]
    assert {asking.depth for _, asking in warm} == {0, "auto"}
    timed_schemas = {str(task.schema) for task, _ in target.asked[first_timed:]}
    assert timed_schemas <= {str(task.schema) for task, _ in warm}
    assert not {task.prompt for task, _ in warm} & {task.prompt for task, _ in target.asked[first_timed:]}


def test_drafts_and_memory_are_those_of_the_round() -> None:
    benchmark = run(Benchmark(arms_of([FakeTarget()], ("auto",)), Settings(**SMALL)))
    for one in benchmark.measured[0].rounds:
        assert one.drafts is not None
        assert (one.drafts.num_steps, one.drafts.num_tokens) == (4, 8)
        assert one.drafts.acceptance == [1.0, 0.0]
        assert one.peak_bytes == 5_000_000


def test_a_target_that_answers_nothing_is_said_before_anything_is_timed() -> None:
    target = FakeTarget("theirs", fails=lambda task: "the server says 404: no such model")
    with pytest.raises(BenchFailed, match="theirs gave no answer: the server says 404: no such model"):
        run(Benchmark(arms_of([target], ("auto",)), Settings(**SMALL)))


def test_one_failed_answer_costs_only_itself() -> None:
    first = "What causes thunder, and why do we see lightning first?"
    target = FakeTarget(fails=lambda task: "no" if task.prompt == first else None)
    benchmark = run(Benchmark(arms_of([target], ("auto",)), Settings(**SMALL)))
    rounds = benchmark.measured[0].rounds
    assert len(rounds) == 6
    assert [answer.error for answer in rounds[0].answers] == ["no", None, None, None]
    assert rounds[0].num_tokens == 3


def test_an_arm_without_any_answer_gets_no_further_turn_at_the_case() -> None:
    good = FakeTarget("good", can_draft=False)
    bad = FakeTarget("bad", can_draft=False, fails=lambda task: "no" if task.schema else None)
    settings = Settings(**(SMALL | {"workloads": ("json", "chat")}))
    benchmark = run(Benchmark(arms_of([good, bad], ("auto",)), settings))
    json_rounds, chat_rounds = (one.rounds for one in benchmark.measured)
    assert [one.arm for one in json_rounds].count("bad") == 1
    assert [one.arm for one in json_rounds].count("good") == 3
    assert [one.arm for one in chat_rounds].count("bad") == 3


def test_what_a_target_raises_is_one_failed_answer() -> None:
    class Broken(FakeTarget):
        async def ask(self, task: Any, asking: Any) -> Any:
            if asking.max_tokens > 4:
                raise ZeroDivisionError("oh")
            return await super().ask(task, asking)

    benchmark = run(Benchmark([Arm("a", Broken(), None)], Settings(**SMALL)))
    assert benchmark.measured[0].rounds[0].answers[0].error == "ZeroDivisionError: oh"


def test_progress_counts_to_its_total_even_past_an_arm_that_is_given_up() -> None:
    seen: list[Turn] = []
    bad = FakeTarget("bad", can_draft=False, fails=lambda task: "no" if "Count" not in task.prompt else None)
    bad.fails = lambda task: None if task.prompt.startswith(("Count", "Hello")) else "no"
    benchmark = run(Benchmark(arms_of([bad, FakeTarget("good")], ("auto",)), Settings(**SMALL), seen.append))
    assert seen[-1].num_done == seen[-1].num_total == benchmark.num_answers == 36


def test_an_interrupted_run_keeps_its_rounds() -> None:
    benchmark = Benchmark(
        arms_of([FakeTarget(pause_s=0.01)], ("auto",)), Settings(**(SMALL | {"rounds": 50}))
    )

    async def interrupted() -> None:
        task = asyncio.create_task(benchmark.run())
        while not benchmark.measured or len(benchmark.measured[0].rounds) < 2:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(interrupted())
    assert 2 <= len(benchmark.measured[0].rounds) < 100
