"""Rounds: variants alternate and ask the same questions, and a failed one does not disturb the others."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from made_up import FakeTarget

from outrider.bench.answer import Answer, RoundResult
from outrider.bench.errors import BenchFailed
from outrider.bench.rounds import Benchmark, Case, faster, order_of_round
from outrider.bench.settings import BenchSettings
from outrider.bench.target import Variant, variants_of
from outrider.progress import Progress

SMALL: dict[str, Any] = {"workloads": ("chat",), "streams": (2,), "rounds": 3, "requests": 2}


def run(benchmark: Benchmark) -> Benchmark:
    asyncio.run(benchmark.run())
    return benchmark


def test_variants_of_one_target_are_off_and_each_depth() -> None:
    variants = variants_of([FakeTarget()], ("auto", 3))
    assert [(variant.name, variant.depth) for variant in variants] == [
        ("off", 0),
        ("auto", "auto"),
        ("depth 3", 3),
    ]


def test_variants_of_servers_have_their_names_and_a_foreign_server_is_one_variant() -> None:
    variants = variants_of([FakeTarget("ours"), FakeTarget("theirs", can_draft=False)], ("auto",))
    assert [(variant.name, variant.depth) for variant in variants] == [
        ("ours off", 0),
        ("ours auto", "auto"),
        ("theirs", None),
    ]


def test_the_order_of_turns_changes_every_round() -> None:
    variants = variants_of([FakeTarget()], ("auto",))
    assert [[variant.name for variant in order_of_round(variants, i)] for i in range(3)] == [
        ["off", "auto"],
        ["auto", "off"],
        ["off", "auto"],
    ]


def test_rounds_alternate_and_keep_their_place() -> None:
    benchmark = run(Benchmark(variants_of([FakeTarget()], ("auto",)), BenchSettings(**SMALL)))
    assert [(one.index, one.place, one.variant) for one in benchmark.results[0].rounds] == [
        (0, 0, "off"),
        (0, 1, "auto"),
        (1, 0, "auto"),
        (1, 1, "off"),
        (2, 0, "off"),
        (2, 1, "auto"),
    ]


def test_of_the_repeats_of_a_round_the_fastest_of_each_variant_counts() -> None:
    target = FakeTarget()
    settings = BenchSettings(**(SMALL | {"rounds": 2, "repeats": 3, "streams": (1,), "requests": 1}))
    benchmark = Benchmark(variants_of([target], ("auto",)), settings)
    seconds: dict[tuple[int, str], list[float]] = {}
    timed = benchmark._round

    async def noted(case: Case, variant: Variant, index: int, place: int, repeat: int) -> RoundResult:
        target.pause_s = 0.002 * random.Random(100 * index + repeat).random()
        found = await timed(case, variant, index, place, repeat)
        seconds.setdefault((index, variant.name), []).append(found.seconds)
        return found

    benchmark._round = noted  # type: ignore[method-assign]
    run(benchmark)
    rounds = benchmark.results[0].rounds
    assert sorted(seconds) == sorted((one.index, one.variant) for one in rounds)
    for one in rounds:
        assert len(seconds[one.index, one.variant]) == 3
        assert one.seconds == min(seconds[one.index, one.variant])
    asked = [(task.prompt, options) for task, options in target.asked if options.max_tokens > 4]
    assert len({options.cache_salt for _, options in asked}) == len(asked) == 12
    assert len({(prompt, options.seed) for prompt, options in asked}) == 2


def test_a_run_with_failed_answers_is_never_the_fastest() -> None:
    whole, broken = (
        RoundResult("a", 0, 0, seconds, answers)
        for seconds, answers in (
            (2.0, (Answer("free", 0.0, 2.0),)),
            (1.0, (Answer("free", 0.0, 1.0, error="no"),)),
        )
    )
    assert faster(broken, whole) is faster(whole, broken) is whole
    assert faster(None, broken) is broken


def test_variants_ask_the_same_with_the_same_seeds_and_rounds_ask_something_else() -> None:
    target = FakeTarget()
    settings = BenchSettings(**(SMALL | {"temperatures": (0.8,)}))
    run(Benchmark(variants_of([target], ("auto",)), settings))
    timed = [(task, options) for task, options in target.asked if options.max_tokens == settings.max_tokens]
    off = [(task.prompt, options.seed) for task, options in timed if options.depth == 0]
    auto = [(task.prompt, options.seed) for task, options in timed if options.depth == "auto"]
    assert sorted(off) == sorted(auto)
    assert len(set(off)) == len(off) == 12
    assert {options.temperature for _, options in timed} == {0.8}


def test_streams_run_at_once_and_no_more_than_asked_for() -> None:
    target = FakeTarget(pause_s=0.002)
    run(
        Benchmark(
            variants_of([target], ("auto",)), BenchSettings(**(SMALL | {"streams": (3,), "requests": 2}))
        )
    )
    assert target.most_live == 3


def test_plain_rows_never_draft_and_foreign_servers_are_not_told_a_depth() -> None:
    ours, theirs = FakeTarget("ours"), FakeTarget("theirs", can_draft=False)
    settings = BenchSettings(**(SMALL | {"workloads": ("mixed",), "rounds": 1, "requests": 3}))
    run(Benchmark(variants_of([ours, theirs], ("auto",)), settings))
    assert {options.depth for task, options in ours.asked if task.kind == "plain"} == {0}
    assert {options.depth for task, options in ours.asked if task.kind == "constrained"} == {0, "auto"}
    assert {options.depth for _, options in theirs.asked} == {None}


def test_every_variant_is_warmed_up_before_it_is_timed_grammars_too() -> None:
    target = FakeTarget()
    settings = BenchSettings(**(SMALL | {"workloads": ("json",), "rounds": 1}))
    run(Benchmark(variants_of([target], ("auto",)), settings))
    first_timed = next(i for i, (_, a) in enumerate(target.asked) if a.max_tokens == settings.max_tokens)
    warm = target.asked[1:first_timed]
    assert {options.depth for _, options in warm} == {0, "auto"}
    timed_schemas = {str(task.schema) for task, _ in target.asked[first_timed:]}
    assert timed_schemas <= {str(task.schema) for task, _ in warm}
    assert not {task.prompt for task, _ in warm} & {task.prompt for task, _ in target.asked[first_timed:]}


def test_drafts_and_memory_are_those_of_the_round() -> None:
    benchmark = run(Benchmark(variants_of([FakeTarget()], ("auto",)), BenchSettings(**SMALL)))
    for one in benchmark.results[0].rounds:
        assert one.drafts is not None
        assert (one.drafts.num_steps, one.drafts.num_tokens) == (4, 8)
        assert one.drafts.acceptance == [1.0, 0.0]
        assert one.peak_bytes == 5_000_000


def test_a_target_that_answers_nothing_is_said_before_anything_is_timed() -> None:
    target = FakeTarget("theirs", fails=lambda task: "the server answered 404: no such model")
    with pytest.raises(BenchFailed, match="theirs gave no answer: the server answered 404: no such model"):
        run(Benchmark(variants_of([target], ("auto",)), BenchSettings(**SMALL)))


def test_one_failed_answer_costs_only_itself() -> None:
    first = "What causes thunder, and why do we see lightning first?"
    target = FakeTarget(fails=lambda task: "no" if task.prompt == first else None)
    benchmark = run(Benchmark(variants_of([target], ("auto",)), BenchSettings(**SMALL)))
    rounds = benchmark.results[0].rounds
    assert len(rounds) == 6
    assert [answer.error for answer in rounds[0].answers] == ["no", None, None, None]
    assert rounds[0].num_tokens == 3


def test_a_variant_without_any_answer_gets_no_further_turn_at_the_case() -> None:
    good = FakeTarget("good", can_draft=False)
    bad = FakeTarget("bad", can_draft=False, fails=lambda task: "no" if task.schema else None)
    settings = BenchSettings(**(SMALL | {"workloads": ("json", "chat")}))
    benchmark = run(Benchmark(variants_of([good, bad], ("auto",)), settings))
    json_rounds, chat_rounds = (one.rounds for one in benchmark.results)
    assert [one.variant for one in json_rounds].count("bad") == 1
    assert [one.variant for one in json_rounds].count("good") == 3
    assert [one.variant for one in chat_rounds].count("bad") == 3


def test_what_a_target_raises_is_one_failed_answer() -> None:
    class Broken(FakeTarget):
        async def ask(self, task: Any, options: Any) -> Any:
            if options.max_tokens > 4:
                raise ZeroDivisionError("oh")
            return await super().ask(task, options)

    benchmark = run(Benchmark([Variant("a", Broken(), None)], BenchSettings(**SMALL)))
    assert benchmark.results[0].rounds[0].answers[0].error == "ZeroDivisionError: oh"


def test_progress_counts_to_its_total_even_past_a_variant_that_is_given_up() -> None:
    seen: list[Progress] = []
    bad = FakeTarget("bad", can_draft=False, fails=lambda task: "no" if "Count" not in task.prompt else None)
    bad.fails = lambda task: None if task.prompt.startswith(("Count", "Hello")) else "no"
    benchmark = run(
        Benchmark(variants_of([bad, FakeTarget("good")], ("auto",)), BenchSettings(**SMALL), seen.append)
    )
    assert seen[-1].done == seen[-1].total == benchmark.num_answers == 36


def test_an_interrupted_run_keeps_its_rounds() -> None:
    benchmark = Benchmark(
        variants_of([FakeTarget(pause_s=0.01)], ("auto",)), BenchSettings(**(SMALL | {"rounds": 50}))
    )

    async def interrupted() -> None:
        task = asyncio.create_task(benchmark.run())
        while not benchmark.results or len(benchmark.results[0].rounds) < 2:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(interrupted())
    assert 2 <= len(benchmark.results[0].rounds) < 100
