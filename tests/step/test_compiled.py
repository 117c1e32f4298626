"""Compiled passes: the same tokens as built ones, from a trace that was made for other rows."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from outrider.models.heads import LoadedHead
from outrider.plan import RowPlan, RowResult, StepPlan
from outrider.request import SamplingParams
from outrider.sampling import sampler
from outrider.speculate.shapes import CELL_PARTS, CELL_STEP, rounded_up
from outrider.step import forward
from outrider.step.compiled import NEUTRAL_PARAMS, is_traceable
from outrider.step.runner import LaunchedPasses, Runner
from patience import IN_SOAK, in_test_or_soak
from plan_rows import plan_row
from step.histories import History, Tally, World, play, random_history, world
from step.reference import mlx_lm_row, solo_answer

GREEDY = SamplingParams(temperature=0, max_tokens=12)
CAPACITY = 96


@pytest.fixture
def not_compiled() -> None:
    """What would be traced is run as it is, from the very closures that a trace has."""
    mx.disable_compile()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("family", "num"),
    [
        ("llama", in_test_or_soak(8, 24)),
        ("qwen3_5", in_test_or_soak(3, 8)),
        ("gpt_oss", in_test_or_soak(3, 8)),
        ("llama drafted by llama", in_test_or_soak(2, 12)),
        ("llama drafted by qwen3_5", in_test_or_soak(2, 12)),
    ],
    ids=["llama", "qwen3_5", "gpt_oss", "draft model", "hybrid draft model"],
)
@pytest.mark.usefixtures("not_compiled")
def test_histories_are_the_same_from_traces(family: str, num: int) -> None:
    tiny = world(family)
    runners = {
        (name, block_size): Runner(tiny.trunk, tiny.drafters[name], compiles=True, block_size=block_size)
        for name in ("none", "whole")
        for block_size in (None, 8)
    }
    tally = Tally()
    for seed in range(700, 700 + num):
        history = random_history(seed, tiny.vocab_size)
        runner = runners["none" if history.head == "none" else "whole", None if seed % 2 else 8]
        tally.add(play(tiny, _simple(history), runner=runner))
        tally.add(play(tiny, history, runner=runner))
    traces = [runner._compiled.num_traces for runner in runners.values() if runner._compiled is not None]
    num_traces = sum(traces)
    print(tally.summary(), num_traces, "traces")
    assert tally.ahead > 0
    assert num_traces > num
    assert tally.excused * 10_000 <= tally.tokens


def _simple(history: History) -> History:
    """With rows that leave most of their decoding to the device, so that steps can be launched ahead."""
    asks = []
    for i, ask in enumerate(history.asks):
        params = SamplingParams(
            temperature=ask.params.temperature,
            top_k=ask.params.top_k,
            seed=ask.params.seed,
            max_tokens=ask.params.max_tokens,
            min_tokens=min(ask.params.min_tokens, 5),
            stop_token_ids=ask.params.stop_token_ids,
            draft_depth=ask.params.draft_depth,
            logprobs=0 if i % 5 == 4 else None,
        )
        kind = "plain" if ask.kind == "plain" or history.head == "none" else "head"
        asks.append(replace(ask, params=params, kind=kind))
    return replace(history, asks=tuple(asks))


@pytest.mark.parametrize("block_size", [None, 8])
@pytest.mark.usefixtures("not_compiled")
def test_prompts_of_many_lengths_have_few_shapes(
    monkeypatch: pytest.MonkeyPatch, block_size: int | None
) -> None:
    """Attention reads a rounded number of cells, in passes that are not traced too; the tokens stay."""
    tiny = world("llama")
    attended: list[int] = []
    real = forward.Placement

    def noted(*args: Any, **more: Any) -> Any:
        place = real(*args, **more)
        attended.append(place.num_attended)
        return place

    monkeypatch.setattr(forward, "Placement", noted)

    def first_tokens(compiles: bool) -> list[list[int]]:
        runner = Runner(tiny.trunk, compiles=compiles, block_size=block_size)
        found = []
        for length in (5, 20, 77):
            row = plan_row(range(1, length + 1), params=GREEDY, start=0)
            capacity, num_blocks = 512, 0
            if block_size is not None:
                capacity, num_blocks = 0, 13
                row = replace(row, blocks=tuple(range(2, num_blocks)))
            plan = StepPlan(1, capacity, (), ((row,),), num_blocks=num_blocks)
            found.append([list(one.token_ids) for one in runner.run(plan).rows])
            runner.reset()
        return found

    built = first_tokens(compiles=False)
    assert len(set(attended)) == 3
    attended.clear()
    assert first_tokens(compiles=True) == built
    assert len(set(attended)) == 3, "only on CUDA"
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    attended.clear()
    assert first_tokens(compiles=True) == built
    assert set(attended) == {256}


@pytest.fixture
def compiled() -> Iterator[None]:
    mx.enable_compile()
    yield
    mx.disable_compile()  # as it is on CPUs


really_compiled = pytest.mark.skipif(
    not IN_SOAK or shutil.which("g++") is None,
    reason="MLX compiles for CPUs with a C++ compiler, slowly: runs under `make soak` only",
)


@pytest.mark.soak
@really_compiled
@pytest.mark.usefixtures("compiled")
def test_a_compiled_pass_gives_what_a_built_one_gives() -> None:
    """Really compiled, and launched one step ahead all the time: two rows at different paces."""
    tiny = world("llama")
    head = LoadedHead((tiny.head,), "random")
    built, compiled = Runner(tiny.trunk, head), Runner(tiny.trunk, head, compiles=True)
    assert answers(tiny, compiled) == answers(tiny, built)
    assert compiled._compiled is not None
    assert compiled._compiled.num_traces == 1


def answers(tiny: World, runner: Runner, num_steps: int = 12) -> list[list[int]]:
    """Two rows with two drafts a step, of which no step is read before the next is launched."""
    params = [GREEDY, SamplingParams(temperature=0.9, seed=5, max_tokens=12)]
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    tokens: list[list[int]] = [[], []]

    def take(launched: LaunchedPasses) -> None:
        for row in runner.finish(launched).rows:
            tokens[row.sequence_id] += row.token_ids

    def rows(**facts: object) -> tuple[RowPlan, ...]:
        return tuple(
            plan_row(prompt, params=p, slot=i, feeds_head=True, num_drafts_next=2, **facts)  # type: ignore[arg-type]
            for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))
        )

    last = runner.launch(StepPlan(2, CAPACITY, (), (rows(start=0),)))
    for step in range(num_steps):
        follows = tuple(
            RowPlan(i, i, 6 + 3 * (step + 1), (-1, -1, -1), 2, None, True, 2, p, (), 0)
            for i, p in enumerate(params)
        )
        following = runner.launch(StepPlan(2, CAPACITY, (), (follows,), is_overlapped=True), last)
        take(last)
        last = following
    take(last)
    runner.reset()
    return tokens


HOT = SamplingParams(temperature=0.7, seed=3)
WAYS = {  # what two rows ask for, and whether grammars hold them
    "masks, a penalty": (replace(GREEDY, presence_penalty=1.5), HOT, True),
    "masks, log-probabilities": (replace(HOT, logprobs=2), GREEDY, True),
    "a bias, log-probabilities": (replace(HOT, logprobs=2), replace(GREEDY, logit_bias={5: 9.0}), False),
    "log-probabilities of the picked alone": (replace(HOT, logprobs=0), GREEDY, False),
    "a wide filter, greedy": (replace(HOT, top_p=0.9), GREEDY, False),
    "masks, a wide filter": (HOT, replace(HOT, top_p=0.8, seed=9), True),
    "a wide filter, a narrow one": (replace(HOT, top_k=3), replace(HOT, top_p=0.8, seed=9), False),
}


def assert_one_trace_serves(sampling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows change places, with other masks: their trace gives what built passes give."""
    monkeypatch.setattr(sampler, "NUM_CANDIDATES", 8)  # few, even of a tiny vocabulary
    tiny = world("llama")
    *pair, is_masked = WAYS[sampling]

    def results(runner: Runner) -> list[RowResult]:
        found: list[RowResult] = []
        for turn, params in enumerate((pair, pair[::-1])):
            reads = [plan_row([3, 1, 4], params=p, slot=i, start=0, next_id=1) for i, p in enumerate(params)]
            rows = [plan_row([3, 1, 4], [1], [5], params=p, slot=i) for i, p in enumerate(params)]
            if is_masked:
                masks = np.full((2, -(-tiny.vocab_size // 32)), 0xFFFFFFFF, np.uint32)
                masks[turn] = 1 << (3 + turn)  # after the committed token, or after the draft
                rows[turn] = replace(rows[turn], masks=masks)
            runner.run(StepPlan(2, CAPACITY, (), (tuple(reads),)))
            found += runner.run(StepPlan(2, CAPACITY, (), (tuple(rows),))).rows
            runner.reset()
        return found

    traced, expected = Runner(tiny.trunk, compiles=True), results(Runner(tiny.trunk))
    found = results(traced)
    assert [row.token_ids for row in found] == [row.token_ids for row in expected]
    assert top_ids(found) == top_ids(expected)
    assert all(len(row.logprobs) in (0, len(row.token_ids)) for row in found)
    assert traced._compiled is not None
    assert traced._compiled.num_traces == 1


def top_ids(rows: Sequence[RowResult]) -> list[list[list[int]]]:
    return [[[token_id for token_id, _ in token.top] for token in row.logprobs] for row in rows]


@pytest.mark.parametrize("sampling", WAYS)
@pytest.mark.usefixtures("not_compiled")
def test_what_rows_ask_of_a_traced_pass_is_in_arrays(sampling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_one_trace_serves(sampling, monkeypatch)


@pytest.mark.soak
@really_compiled
@pytest.mark.parametrize("sampling", WAYS)
@pytest.mark.usefixtures("compiled")
def test_what_rows_ask_of_a_compiled_pass_is_in_arrays(
    sampling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_one_trace_serves(sampling, monkeypatch)


@pytest.mark.usefixtures("not_compiled")
def test_a_trace_bans_nothing_for_rows_that_are_long_enough() -> None:
    """min_tokens was reached before the trace was made: stop tokens may be picked, by this row and others."""
    tiny = world("llama")
    built, traced = Runner(tiny.trunk), Runner(tiny.trunk, compiles=True)

    def next_token(runner: Runner, banned_ids: tuple[int, ...]) -> int:
        params = replace(GREEDY, min_tokens=1)
        reads = plan_row([3, 1, 4], params=params, start=0, next_id=1)
        picks = plan_row([3, 1, 4], [1], params=params, banned_ids=banned_ids)
        runner.run(StepPlan(1, CAPACITY, (), ((reads,),)))
        result = runner.run(StepPlan(1, CAPACITY, (), ((picks,),)))
        runner.reset()
        return result.rows[0].token_ids[0]

    wanted = next_token(built, ())
    assert next_token(built, (wanted,)) == wanted
    assert next_token(traced, (wanted,)) == wanted
    assert traced._compiled is not None
    assert traced._compiled.num_traces == 1


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.usefixtures("not_compiled")
def test_a_trace_that_fails_leaves_nothing_behind(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-way the caches hold what only a trace knows: a reset has to get rid of it."""
    runner = Runner(world(family).trunk, compiles=True)
    whole = StepPlan(1, CAPACITY, (), ((plan_row([3, 1, 4], params=GREEDY, start=0),),))
    expected = runner.run(whole)

    def fails(*_: object) -> None:
        raise RuntimeError("no reason")

    with monkeypatch.context() as patch:
        patch.setattr(forward, "num_committed_tokens", fails)
        mx.enable_compile()  # to trace needs no compiler
        with pytest.raises(RuntimeError, match="no reason"):
            runner.launch(StepPlan(1, CAPACITY, (), ((plan_row([3, 1, 4], [1], params=GREEDY),),)))
        mx.disable_compile()
    assert runner._compiled is not None
    assert runner._compiled.num_traces == 0
    runner.reset()
    assert runner.num_bytes == 0
    assert runner.run(whole) == expected
    runner.reset()


@pytest.mark.usefixtures("not_compiled")
def test_a_step_says_whether_it_was_traced_just_now() -> None:
    runner = Runner(world("llama").trunk, compiles=True)

    def is_traced(num_rows: int, committed: Sequence[int], start: int | None = None) -> bool:
        rows = [plan_row([3, 1, 4], committed, params=GREEDY, slot=i, start=start) for i in range(num_rows)]
        launched = runner.launch(StepPlan(2, CAPACITY, (), (tuple(rows),)))
        runner.finish(launched)
        return launched.is_first_trace

    reads = is_traced(2, (), start=0)
    assert [reads, *(is_traced(num, [1]) for num in (2, 2, 1, 2, 1))] == [
        False, True, False, True, False, False,
    ]  # fmt: skip
    runner.reset()


def test_only_rows_that_read_or_stand_elsewhere_are_not_traced() -> None:
    def row(**facts: object) -> RowPlan:
        return plan_row([1, 2, 3], [4], params=SamplingParams(**facts))  # type: ignore[arg-type]

    assert is_traceable([row(temperature=0)])
    assert is_traceable([row(temperature=1, top_k=20, top_p=0.9, seed=1)])
    assert is_traceable([row(temperature=0), replace(row(temperature=1, seed=1), slot=1)])
    assert is_traceable([row(temperature=0, logprobs=1, presence_penalty=0.5)])
    assert is_traceable([row(temperature=0), replace(row(temperature=1, top_p=0.9, seed=1), slot=1)])
    assert not is_traceable([replace(row(temperature=0), slot=1)])
    assert not is_traceable([plan_row([1, 2, 3], params=GREEDY, start=0)])


@pytest.mark.usefixtures("not_compiled")
def test_a_trace_keeps_nothing_of_the_requests_that_it_was_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It outlives them, and must not read what only they asked for."""
    runner, images = Runner(world("llama").trunk, compiles=True), []
    run = forward.Forward.run

    def watched(self: forward.Forward, batch: Sequence[RowPlan], *facts: Any, **arrays: Any) -> Any:
        images.append(batch)
        return run(self, batch, *facts, **arrays)

    asked = SamplingParams(temperature=0.5, seed=1, logit_bias={3: 1.0}, logprobs=2, stop="x")
    runner.run(StepPlan(1, CAPACITY, (), ((plan_row([3, 1, 4], params=asked, start=0, next_id=1),),)))
    monkeypatch.setattr(forward.Forward, "run", watched)
    row = plan_row([3, 1, 4], [1], params=asked)
    runner.run(StepPlan(1, CAPACITY, (), ((row,),)))
    runner.reset()
    ((traced,),) = images
    assert traced.params == NEUTRAL_PARAMS
    assert (traced.history, traced.banned_ids, traced.masks) == ((), (), None)


@pytest.mark.usefixtures("not_compiled")
def test_one_trace_serves_rows_that_draft_rest_and_do_neither() -> None:
    """Which rows the head follows is in arrays: a batch in which others do needs no new trace."""
    tiny = world("llama")
    runner = Runner(tiny.trunk, LoadedHead((tiny.head,), "random"), compiles=True)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8]]
    tokens = [list(prompt) for prompt in prompts]

    def step(heads: Sequence[bool], start: int | None = None) -> None:
        rows = []
        for i, (text, prompt) in enumerate(zip(tokens, prompts, strict=True)):
            row = plan_row(
                prompt, text[len(prompt) :], params=GREEDY, slot=i, start=start,
                feeds_head=heads[i], num_drafts_next=2 if heads[i] else 0,
            )  # fmt: skip
            rows.append(replace(row, defers_head=not heads[i]))
        for result in runner.run(StepPlan(3, CAPACITY, (), (tuple(rows),))).rows:
            assert len(result.drafts) == (2 if heads[result.sequence_id] else 0)
            tokens[result.sequence_id] += result.token_ids

    step([True] * 3, start=0)
    for heads in ([True, False, True], [False, True, False], [True, True, False]):
        step(heads)
    runner.reset()
    assert runner._compiled is not None
    assert runner._compiled.num_traces == 1
    for prompt, text in zip(prompts, tokens, strict=True):
        assert text[len(prompt) :] == list(solo_answer(mlx_lm_row(tiny.model), prompt, GREEDY).token_ids)[:4]


def test_what_is_attended_grows_in_few_steps_and_never_by_much() -> None:
    sizes = {num: rounded_up(num, CELL_STEP, CELL_PARTS) for num in range(1, 40_000)}
    assert all(num <= size for num, size in sizes.items())
    assert all(size - num < max(256, num / 8) for num, size in sizes.items())
    assert len(set(sizes.values())) < 60
