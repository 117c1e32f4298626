"""Drafter invariance: what a request gives depends on nothing but its prompt, its parameters and its seed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import pytest

from outrider.cache import ragged_kv
from outrider.step import runner, verify
from step.histories import Divergence, Tally, play, random_history, world

FIRST_SEED = {
    "llama": 0,
    "qwen3": 1000,
    "gemma3_text": 2000,
    "deepseek_v3": 3000,
    "gpt_oss": 4000,
    "glm4_moe": 5000,
}
NUM_HISTORIES = {
    "llama": 190,
    "qwen3": 40,
    "gemma3_text": 30,
    "deepseek_v3": 25,
    "gpt_oss": 25,
    "glm4_moe": 10,
}


def play_seed(family: str, seed: int) -> Tally:
    try:
        return play(world(family), random_history(seed, world(family).vocab_size))
    except Exception as error:
        error.add_note(f"To play it again: OUTRIDER_HISTORY={family}:{seed} pytest -s tests/step -k again")
        raise


def play_many(family: str) -> Tally:
    tally = Tally()
    for seed in range(FIRST_SEED[family], FIRST_SEED[family] + NUM_HISTORIES[family]):
        tally.add(play_seed(family, seed))
    return tally


@pytest.mark.parametrize("family", NUM_HISTORIES)
def test_every_request_gives_what_it_gives_alone_without_drafts(family: str) -> None:
    tally = play_many(family)
    print(tally.summary())
    assert tally.excused * 10_000 <= tally.tokens
    assert tally.cells > 0
    if family == "llama":
        assert_everything_occurred(tally)


def assert_everything_occurred(tally: Tally) -> None:
    """Nothing above counts unless the histories were rich enough."""
    every_length = {(drafted, accepted) for drafted in range(1, 9) for accepted in range(drafted + 1)}
    assert tally.accepted_lengths("scripted", "scripted with head") >= every_length
    assert max(accepted for _, accepted in tally.accepted_lengths("head")) >= 3
    assert max(accepted for _, accepted in tally.accepted_lengths("ngram")) >= 3
    assert tally.finished.keys() == {"length", "stop", "cancelled", "error"}
    assert tally.preemptions > 5
    assert tally.failed_steps > 20
    assert tally.tokens > 5000


@pytest.mark.skipif(
    "OUTRIDER_HISTORY" not in os.environ, reason="plays one history again: OUTRIDER_HISTORY=llama:17"
)
def test_play_one_history_again() -> None:
    family, seed = os.environ["OUTRIDER_HISTORY"].split(":")
    print(random_history(int(seed), world(family).vocab_size))
    print(play_seed(family, int(seed)).summary())


# -- controls: what the test above must notice -----------------------------------------------------------


def accepts_one_too_many(patch: pytest.MonkeyPatch) -> None:
    count = verify._count_accepted

    def wrong(targets: mx.array, rows: verify.Batch) -> mx.array:
        return mx.minimum(count(targets, rows) + 1, mx.array([row.num_drafts for row in rows]))

    patch.setattr(verify, "_count_accepted", wrong)


def accepts_past_an_error(patch: pytest.MonkeyPatch) -> None:
    def wrong(targets: mx.array, rows: verify.Batch) -> mx.array:
        most = targets.shape[1] - 1
        drafts = [[*row.token_ids[row.first_pick + 1 :], *([-1] * (most - row.num_drafts))] for row in rows]
        return (targets[:, :-1] == mx.array(drafts).reshape(len(rows), most)).astype(mx.int32).sum(axis=1)

    patch.setattr(verify, "_count_accepted", wrong)


def noise_is_one_position_late(patch: pytest.MonkeyPatch) -> None:
    pick = verify.pick
    patch.setattr(verify, "pick", lambda logits, positions, params: pick(logits, positions + 1, params))


def noise_stands_still_in_a_window(patch: pytest.MonkeyPatch) -> None:
    pick = verify.pick

    def wrong(logits: mx.array, positions: mx.array, params: list) -> mx.array:
        return pick(logits, mx.broadcast_to(positions[:, :1], positions.shape), params)

    patch.setattr(verify, "pick", wrong)


def the_first_sampler_serves_all(patch: pytest.MonkeyPatch) -> None:
    pick = verify.pick
    patch.setattr(
        verify, "pick", lambda logits, positions, params: pick(logits, positions, params[:1] * len(params))
    )


def penalties_do_not_see_drafts(patch: pytest.MonkeyPatch) -> None:
    apply_edits = verify.apply_edits

    def wrong(logits: mx.array, rows: verify.Batch) -> mx.array:
        rows = [replace(row, num_drafts=0, token_ids=row.token_ids[: row.first_pick + 1]) for row in rows]
        return apply_edits(logits, rows)

    patch.setattr(verify, "apply_edits", wrong)


def penalties_lag_by_a_token(patch: pytest.MonkeyPatch) -> None:
    apply_edits = verify.apply_edits

    def wrong(logits: mx.array, rows: verify.Batch) -> mx.array:
        return apply_edits(logits, [replace(row, history=row.history[:-1]) for row in rows])

    patch.setattr(verify, "apply_edits", wrong)


def logprobs_are_of_edited_logits(patch: pytest.MonkeyPatch) -> None:
    compute = verify.compute_logprobs
    patch.setattr(
        verify,
        "compute_logprobs",
        lambda logits, targets, rows: compute(verify.apply_edits(logits, rows), targets, rows),
    )


def the_next_cell_is_seen(patch: pytest.MonkeyPatch) -> None:
    mask = ragged_kv.Placement.mask

    def wrong(self: ragged_kv.Placement, window: int | None) -> mx.array:
        seen = mask(self, window)
        return seen | mx.roll(seen, 1, axis=-1)

    patch.setattr(ragged_kv.Placement, "mask", wrong)


def moves_are_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ragged_kv.RaggedKV, "exchange", lambda *_: None)


def the_head_is_fed_rejected_drafts(patch: pytest.MonkeyPatch) -> None:
    next_tokens = runner.next_tokens

    def wrong(batch: verify.Batch, picks: verify.Picks | None, width: int) -> tuple[mx.array, mx.array]:
        _, kept = next_tokens(batch, picks, width)
        known = [[*row.token_ids[1:], row.next_id or 0] for row in batch]
        return mx.array([[*ids, *([0] * (width - len(ids)))] for ids in known]), kept

    patch.setattr(runner, "next_tokens", wrong)


@pytest.mark.parametrize(
    "fault",
    [
        accepts_one_too_many,
        accepts_past_an_error,
        noise_is_one_position_late,
        noise_stands_still_in_a_window,
        the_first_sampler_serves_all,
        penalties_do_not_see_drafts,
        penalties_lag_by_a_token,
        logprobs_are_of_edited_logits,
        the_next_cell_is_seen,
        moves_are_lost,
        the_head_is_fed_rejected_drafts,
    ],
)
def test_control_a_fault_is_noticed(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(Divergence):
        play_many("llama")
