"""The runner on plans written by hand: the corners that a scheduler seldom or never asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

import sampling_oracle as oracle
from outrider.models.heads import HeadSpec, LoadedHead
from outrider.plan import Move, RowPlan, RowResult, StepPlan
from outrider.request import SamplingParams
from outrider.sampling.sampler import Sampler
from outrider.step import batch
from outrider.step.batch import InvalidLogits
from outrider.step.mtp import MTPDrafter
from outrider.step.ranks import RanksOutOfStep
from outrider.step.runner import Runner
from plan_rows import plan_row
from step.histories import World, random_head, world
from step.reference import fresh_cells, mlx_lm_row, solo_answer

GREEDY = SamplingParams(temperature=0, max_tokens=12)
CAPACITY = 96


@pytest.fixture(scope="module")
def tiny() -> World:
    return world("llama")


@pytest.fixture
def runner(tiny: World) -> Runner:
    tiny.runners["whole"].reset()
    return tiny.runners["whole"]


def run(
    runner: Runner, *batches: Sequence[RowPlan], num_slots: int = 4, moves: Sequence[Move] = ()
) -> dict[int, RowResult]:
    plan = StepPlan(num_slots, CAPACITY, tuple(moves), tuple(tuple(batch) for batch in batches))
    return {row.sequence_id: row for row in runner.run(plan).rows}


def prompt_of(tiny: World, seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, tiny.vocab_size, length).tolist()


def plain_answer(tiny: World, prompt: Sequence[int], params: SamplingParams = GREEDY) -> list[int]:
    return list(solo_answer(mlx_lm_row(tiny.model), prompt, params).token_ids)


# -- shapes of a batch -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_prompt_and_a_verify_window_of_the_same_width_share_a_batch(
    tiny: World, runner: Runner, seed: int
) -> None:
    """Four prompt tokens beside one committed token and three drafts: each picks at its own columns."""
    one, other = prompt_of(tiny, seed, 4), prompt_of(tiny, seed + 10, 9)
    answer = plain_answer(tiny, other)
    run(runner, [plan_row(other, params=GREEDY, slot=1, start=0)])
    drafts = [answer[1], answer[2], (answer[3] + 1) % tiny.vocab_size]
    found = run(
        runner,
        [
            plan_row(one, params=GREEDY, slot=0, start=0),
            plan_row(other, answer[:1], drafts, params=GREEDY, slot=1),
        ],
    )
    assert list(found[0].token_ids) == plain_answer(tiny, one)[:1]
    assert list(found[1].token_ids) == answer[1:4]


def test_committed_tokens_and_drafts_may_be_fed_together(tiny: World, runner: Runner) -> None:
    """A row that resumes feeds its whole text and, with it, drafts."""
    prompt = prompt_of(tiny, 3, 6)
    answer = plain_answer(tiny, prompt)
    row = plan_row(
        prompt, answer[:3], answer[3:6], params=GREEDY, start=0, feeds_head=True, num_drafts_next=2
    )
    found = run(runner, [row], num_slots=1)
    assert list(found[0].token_ids) == answer[3:7]
    assert_cells(tiny, runner, 0, [*prompt, *answer[:7]])


def test_a_chunk_in_the_middle_of_a_prompt_picks_nothing(tiny: World, runner: Runner) -> None:
    prompt = prompt_of(tiny, 4, 10)
    middle = plan_row(prompt[:6], params=GREEDY, start=0, next_id=prompt[6], feeds_head=True)
    found = run(runner, [middle])
    assert found[0] == RowResult(0, ())
    found = run(runner, [plan_row(prompt, params=GREEDY, start=6, feeds_head=True)])
    assert list(found[0].token_ids) == plain_answer(tiny, prompt)[:1]
    assert_cells(tiny, runner, 0, [*prompt, *found[0].token_ids])


@pytest.mark.parametrize("right", range(9))
def test_a_window_commits_the_right_drafts_and_one_more_token(
    tiny: World, runner: Runner, right: int
) -> None:
    prompt = prompt_of(tiny, 5, 7)
    answer = plain_answer(tiny, prompt)
    run(runner, [plan_row(prompt, params=GREEDY, start=0)])
    drafts = answer[1:9]
    if right < 8:
        drafts[right] = (drafts[right] + 1) % tiny.vocab_size
    found = run(runner, [plan_row(prompt, answer[:1], drafts, params=GREEDY)])[0]
    assert list(found.token_ids) == answer[1 : right + 2]
    assert found.num_accepted == right


def test_rows_in_scattered_slots_and_any_order(tiny: World, runner: Runner) -> None:
    prompts = [prompt_of(tiny, 10 + i, 3 + 5 * i) for i in range(3)]
    rows = [
        plan_row(p, params=GREEDY, slot=slot, start=0) for p, slot in zip(prompts, (3, 0, 2), strict=True)
    ]
    found = run(runner, rows)
    for prompt, slot in zip(prompts, (3, 0, 2), strict=True):
        assert list(found[slot].token_ids) == plain_answer(tiny, prompt)[:1]


def test_a_move_takes_trunk_and_head_along(tiny: World, runner: Runner) -> None:
    prompts = [prompt_of(tiny, 20 + i, 6 + i) for i in range(2)]
    answers = [plain_answer(tiny, prompt) for prompt in prompts]
    run(runner, [plan_row(p, params=GREEDY, slot=i, start=0, feeds_head=True) for i, p in enumerate(prompts)])
    swapped = [
        plan_row(p, a[:1], params=GREEDY, slot=1 - i, feeds_head=True)
        for i, (p, a) in enumerate(zip(prompts, answers, strict=True))
    ]
    found = run(runner, swapped, moves=[Move(0, 1, one_way=False)])
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert list(found[1 - i].token_ids) == answer[1:2]
        assert_cells(tiny, runner, 1 - i, [*prompt, *answer[:2]])


def test_a_slot_keeps_nothing_of_the_row_that_left_it(tiny: World, runner: Runner) -> None:
    """Cancelled in the middle of a deep window; the next row in its slot is shorter than what lies there."""
    long, short = prompt_of(tiny, 30, 40), prompt_of(tiny, 31, 2)
    run(runner, [plan_row(long, params=GREEDY, start=0, feeds_head=True, num_drafts_next=8)])
    run(
        runner,
        [plan_row(long, [5], [1, 2, 3, 4, 5, 6, 7, 8], params=GREEDY, feeds_head=True, num_drafts_next=8)],
    )
    found = run(runner, [plan_row(short, params=GREEDY, start=0, feeds_head=True)])
    assert list(found[0].token_ids) == plain_answer(tiny, short)[:1]
    assert_cells(tiny, runner, 0, [*short, *found[0].token_ids])


def assert_cells(tiny: World, runner: Runner, slot: int, tokens: Sequence[int]) -> None:
    expected = fresh_cells(tiny.model, tiny.head, tokens)
    *caches, _ = runner._buffers()  # the last holds what a resting head has missed
    for kv, (keys, values) in zip(caches, expected, strict=True):
        np.testing.assert_allclose(np.array(kv.keys[slot, :, : len(tokens) - 1]), keys, atol=1e-4)
        np.testing.assert_allclose(np.array(kv.values[slot, :, : len(tokens) - 1]), values, atol=1e-4)


# -- what rows ask for -----------------------------------------------------------------------------------


def test_a_first_token_with_a_presence_penalty_beside_a_biased_row(tiny: World, runner: Runner) -> None:
    """Nothing to penalise yet: the tables of the two rows' processors have no length in common."""
    prompts = [prompt_of(tiny, 40 + i, 5) for i in range(2)]
    params = [
        replace(GREEDY, presence_penalty=1.0),
        replace(GREEDY, logit_bias={1: 3.0, 2: -3.0}),
    ]
    rows = [
        plan_row(p, params=q, slot=i, start=0) for i, (p, q) in enumerate(zip(prompts, params, strict=True))
    ]
    found = run(runner, rows)
    for i in range(2):
        assert list(found[i].token_ids) == plain_answer(tiny, prompts[i], params[i])[:1]


@pytest.mark.parametrize("has_neighbour", [False, True])
def test_logprobs_are_the_models_own_whoever_edits(tiny: World, runner: Runner, has_neighbour: bool) -> None:
    prompt = prompt_of(tiny, 50, 5)
    asking = replace(GREEDY, logprobs=5, logit_bias={7: 40.0}, frequency_penalty=1.0)
    rows = [plan_row(prompt, params=asking, start=0)]
    if has_neighbour:
        rows.append(plan_row(prompt, params=replace(GREEDY, logprobs=5), slot=1, start=0))
    found = run(runner, rows)
    logits = np.array(tiny.model(mx.array([prompt]))[0, -1])
    expected = oracle.log_softmax(logits)
    assert found[0].token_ids == (7,)
    for row in found.values():
        (entry,) = row.logprobs
        assert entry.logprob == pytest.approx(expected[entry.token_id], abs=1e-4)
        assert [token_id for token_id, _ in entry.top] == np.argsort(-expected)[:5].tolist()


def test_rejected_positions_have_no_logprobs(tiny: World, runner: Runner) -> None:
    prompt = prompt_of(tiny, 51, 5)
    asking = replace(GREEDY, logprobs=1)
    answer = plain_answer(tiny, prompt)
    run(runner, [plan_row(prompt, params=asking, start=0)])
    wrong = (answer[2] + 1) % tiny.vocab_size
    found = run(runner, [plan_row(prompt, answer[:1], [answer[1], wrong, answer[3]], params=asking)])[0]
    assert [entry.token_id for entry in found.logprobs] == list(found.token_ids) == answer[1:3]


def test_a_stop_token_is_banned_at_the_right_columns_of_a_window(tiny: World, runner: Runner) -> None:
    """The plain answer's own tokens become stop tokens: early they are banned, later they end it."""
    prompt = prompt_of(tiny, 52, 5)
    stops = tuple(set(plain_answer(tiny, prompt)))
    params = replace(GREEDY, min_tokens=4, stop_token_ids=stops)
    answer = plain_answer(tiny, prompt, params)
    run(runner, [plan_row(prompt, params=params, start=0, banned_ids=stops)])
    found = run(runner, [plan_row(prompt, answer[:1], answer[1:5], params=params, banned_ids=stops)])[0]
    assert list(found.token_ids)[: len(answer) - 1] == answer[1:6]
    assert not set(answer[:4]) & set(stops)


# -- the head --------------------------------------------------------------------------------------------


def expected_drafts(
    tiny: World, head: LoadedHead, tokens: Sequence[int], params: SamplingParams, depth: int
) -> list[int]:
    """Drafts of a head primed pair by pair over all the text, then recursing, on mlx-lm's own cache."""
    inner, cache = tiny.model.model, KVCache()
    hidden = inner(mx.array([tokens[:-1]]))
    for t in range(len(tokens) - 1):
        embedded = inner.embed_tokens(mx.array([[tokens[t + 1]]]))
        out, fed_back = head.layers[0](hidden[:, t : t + 1], embedded, cache)
    drafts: list[int] = []
    for depth_now in range(depth):
        logits = tiny.trunk.logits(out)
        if head.draft_ids is not None:
            logits = logits[..., head.draft_ids]
        position = mx.array([[len(tokens) + depth_now]])
        drafts.append(Sampler.of([params]).sample_drafts(logits, position, head.draft_ids).item())
        out, fed_back = head.layers[0](fed_back, inner.embed_tokens(mx.array([drafts[-1:]])), cache)
    return drafts


@pytest.mark.parametrize("is_reduced", [False, True], ids=["whole vocabulary", "reduced vocabulary"])
@pytest.mark.parametrize("recurse_after_norm", [True, False])
def test_drafts_are_those_of_a_head_primed_over_the_whole_text(
    tiny: World, is_reduced: bool, recurse_after_norm: bool
) -> None:
    """Three rows of different lengths, acceptance and depth over several steps, one of them plain."""
    module = random_head(tiny.trunk, HeadSpec(recurse_after_norm=recurse_after_norm))
    draft_ids = mx.array(sorted(range(0, tiny.vocab_size, 3))) if is_reduced else None
    head = LoadedHead((module,), "random", draft_ids)
    runner = Runner(tiny.trunk, head)
    params = [
        replace(GREEDY, max_tokens=30),
        SamplingParams(temperature=1.0, seed=4, max_tokens=30),
        SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=5, max_tokens=30),
        replace(GREEDY, max_tokens=30),
    ]
    prompts = [prompt_of(tiny, 60 + i, length) for i, length in enumerate((1, 9, 17, 5))]
    answers = [plain_answer(tiny, p, q) for p, q in zip(prompts, params, strict=True)]
    depths = (3, 1, 8, 0)
    texts = [list(prompt) for prompt in prompts]
    drafts: list[list[int]] = [[], [], [], []]
    for right in range(5):
        rows = []
        for i, text in enumerate(texts):
            start = 0 if right == 0 else len(text) - 1
            row = plan_row(
                prompts[i],
                text[len(prompts[i]) :],
                drafts[i],
                params=params[i],
                slot=i,
                start=start,
                feeds_head=i < 3,
                num_drafts_next=depths[i],
            )
            rows.append(row)
        found = run(runner, rows)
        for i, text in enumerate(texts):
            text += found[i].token_ids
            assert text == [*prompts[i], *answers[i]][: len(text)]
            expected = expected_drafts(tiny, head, text, params[i], depths[i])
            assert list(found[i].drafts) == expected
            right_ones = answers[i][len(text) - len(prompts[i]) :][: min(right, 3)]
            drafts[i] = (
                [*right_ones, *expected[len(right_ones) :]] if i != 1 else expected
            )  # some stand, some fall


def test_a_deep_neighbour_at_the_end_of_the_buffers(tiny: World, runner: Runner) -> None:
    """A row near the last cell wants no drafts, but recurses as deep as its neighbour: past the end."""
    full, short = prompt_of(tiny, 70, CAPACITY - 3), prompt_of(tiny, 71, 4)
    rows = [
        plan_row(full, params=GREEDY, slot=0, start=0, feeds_head=True),
        plan_row(short, params=GREEDY, slot=1, start=0, feeds_head=True, num_drafts_next=8),
    ]
    found = run(runner, rows)
    assert len(found[1].drafts) == 8
    assert found[0].drafts == ()
    texts = [[*full, *found[0].token_ids], [*short, *found[1].token_ids]]
    for slot, text in enumerate(texts):
        assert_cells(tiny, runner, slot, text)
    again = [
        plan_row(full, found[0].token_ids, params=GREEDY, slot=0, feeds_head=True),
        plan_row(
            short,
            found[1].token_ids,
            found[1].drafts,
            params=GREEDY,
            slot=1,
            feeds_head=True,
            num_drafts_next=8,
        ),
    ]
    later = run(runner, again)
    for slot, text in enumerate(texts):
        assert_cells(tiny, runner, slot, [*text, *later[slot].token_ids])


# -- failures --------------------------------------------------------------------------------------------


def test_a_row_that_does_not_fit_is_an_error_not_a_wrong_answer(tiny: World, runner: Runner) -> None:
    with pytest.raises(ValueError, match="cells"):
        run(runner, [plan_row(prompt_of(tiny, 80, CAPACITY + 1), params=GREEDY, start=0)])


def test_reset_gives_everything_back_even_when_the_buffers_were_half_made(
    tiny: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(tiny.trunk)
    buffers = list(runner._buffers())

    def no_memory(num_slots: int, capacity: int) -> None:
        raise MemoryError("no room for the last layer")

    with monkeypatch.context() as patch:
        patch.setattr(buffers[-1], "resize", no_memory)
        with pytest.raises(MemoryError):
            run(runner, [plan_row([1, 2], params=GREEDY, start=0)])
    runner.reset()
    assert runner.num_bytes == 0
    found = run(runner, [plan_row([1, 2], params=GREEDY, start=0)])
    assert list(found[0].token_ids) == plain_answer(tiny, [1, 2])[:1]


def test_a_step_that_failed_half_way_leaves_nothing_behind(
    tiny: World, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trunk has written its cells, the head raises; after the reset the row is computed anew."""
    prompt = prompt_of(tiny, 81, 9)
    row = plan_row(prompt, params=GREEDY, start=0, feeds_head=True, num_drafts_next=3)
    expected = run(runner, [row])[0]
    with monkeypatch.context() as patch:
        patch.setattr(MTPDrafter, "_logits", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(runner, [row])
    runner.reset()
    assert runner.num_bytes == 0
    assert run(runner, [row])[0] == expected


def test_on_several_ranks_a_step_that_failed_half_way_is_not_computed_again(
    tiny: World, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks are in the middle of it: their sums would be added to those of another step."""
    row = plan_row(prompt_of(tiny, 81, 9), params=GREEDY, start=0, feeds_head=True, num_drafts_next=3)
    other_ranks = SimpleNamespace(rank=0, send=lambda numbers, waits=True: None, rest=lambda: None)
    monkeypatch.setattr(runner, "_ranks", other_ranks)
    with monkeypatch.context() as patch:
        patch.setattr(MTPDrafter, "_logits", lambda *_: 1 / 0)
        with pytest.raises(RanksOutOfStep, match="on rank 0 only: division by zero"):
            run(runner, [row])
    assert not issubclass(RanksOutOfStep, Exception)  # which the engine would recover from
    runner.reset()
    with monkeypatch.context() as patch:
        patch.setattr(batch, "_usable", raises_invalid_logits)
        with pytest.raises(InvalidLogits):  # all ranks have computed the step to its end
            run(runner, [row])
    runner.reset()


def raises_invalid_logits(*_: object) -> tuple[int, None]:
    raise InvalidLogits("the model gave NaN or infinite logits")


def test_bytes_held_are_the_bytes_that_the_geometry_gives(tiny: World, runner: Runner) -> None:
    run(runner, [plan_row([1, 2], params=GREEDY, start=0)], num_slots=3)
    assert runner.num_bytes == runner.geometry(16).num_bytes(3, CAPACITY)
