"""Drafter invariance: what a request gives depends on nothing but its prompt, its parameters and its seed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from outrider.cache import ragged_kv
from outrider.cpu.extension import extension
from outrider.cpu.quantized import quantized_layers
from outrider.engine.block_pool import BlockPool
from outrider.grammar.matcher import RowGrammar
from outrider.plan import RowPlan
from outrider.sampling import custom_processors, logits_processors
from outrider.sampling.logits_processors import LogitsProcessors
from outrider.sampling.logprobs import LogprobArrays, LogprobRequest
from outrider.sampling.masks import Masks
from outrider.sampling.sampler import Sampler
from outrider.step import batch as batch_module
from outrider.step import draft_model, forward, verify
from outrider.step.batch import Batch, InputBatch
from patience import IN_SOAK, in_test_or_soak
from step.histories import Divergence, Tally, play, random_history, world

FIRST_SEED = {  # the first few histories contain one that compares all cells
    "llama": 0,
    "qwen3": 1000,
    "gemma3_text": 2005,
    "deepseek_v3": 3000,
    "gpt_oss": 4000,
    "glm4_moe": 5000,
    "qwen3_5": 6005,
    "qwen3_5_moe": 7013,
    "qwen3_next": 8006,
    "llama-4bit": 24,
    "qwen3-mixed": 1021,
    "qwen3_moe-6bit": 2020,
    "gpt_oss-5bit": 4000,
    "gpt_oss-mxfp4": 4000,
    "qwen3_moe-nvfp4": 2020,
    "qwen3-mxfp8": 1021,
    "deepseek_v3-4bit": 3002,
    "glm4_moe_lite-mxfp4": 3002,
    "qwen3_5-4bit": 6021,
    "qwen3_next-8bit": 8008,
    "llama-5bit_128g": 24,
    "qwen3_moe-4bit_128g": 1021,
    "qwen3_5-4bit_128g": 1021,
    "llama-4bit kv16": 24,
    "llama-4bit kv8": 24,
    "llama-4bit kv4": 94,
    "qwen3_5-4bit kv16": 6021,
    "qwen3_5-4bit kv8": 6021,
    "gpt_oss-mxfp4 kv4": 4000,
    "deepseek_v3-4bit kv8": 3002,
    "gemma3_text kv4": 2027,
    "llama kv8": 22,
    "llama drafted by llama": 694,
    "qwen3_5 drafted by llama": 697,
    "llama drafted by qwen3_5": 697,
    "llama-4bit drafted by llama-4bit": 697,
    "llama-4bit kv8 drafted by llama-4bit": 697,
}
MOST_MORE_HISTORIES = 30
NOTICED_BY = {  # histories of "llama" that notice a fault, where none of the first few does
    "the_first_sampler_serves_all": 4,
    "penalties_do_not_see_drafts": 5,
    "functions_of_users_see_other_drafts": 7,
    "bad_words_do_not_see_drafts": 28,
    "blocks_are_taken_for_each_other": 5,
    "the_head_is_fed_rejected_drafts": 48,
}
NUM_HISTORIES = {  # in `make test`, in `make soak`
    "llama": in_test_or_soak(46, 220),
    "qwen3": in_test_or_soak(5, 40),
    "gemma3_text": in_test_or_soak(4, 30),
    "deepseek_v3": in_test_or_soak(4, 25),
    "gpt_oss": in_test_or_soak(4, 25),
    "glm4_moe": in_test_or_soak(2, 10),
    "qwen3_5": in_test_or_soak(5, 40),
    "qwen3_5_moe": in_test_or_soak(2, 15),
    "qwen3_next": in_test_or_soak(2, 15),
    "llama-4bit": in_test_or_soak(4, 30),
    "qwen3-mixed": in_test_or_soak(2, 20),
    "qwen3_moe-6bit": in_test_or_soak(2, 20),
    "gpt_oss-5bit": in_test_or_soak(2, 20),
    "gpt_oss-mxfp4": in_test_or_soak(2, 20),
    "qwen3_moe-nvfp4": in_test_or_soak(2, 20),
    "qwen3-mxfp8": in_test_or_soak(2, 20),
    "deepseek_v3-4bit": in_test_or_soak(2, 20),
    "glm4_moe_lite-mxfp4": in_test_or_soak(2, 20),
    "qwen3_5-4bit": in_test_or_soak(1, 20),
    "qwen3_next-8bit": in_test_or_soak(2, 15),
    "llama-5bit_128g": in_test_or_soak(5, 20),  # groups of 128
    "qwen3_moe-4bit_128g": in_test_or_soak(2, 20),
    "qwen3_5-4bit_128g": in_test_or_soak(1, 20),
    "llama-4bit kv16": in_test_or_soak(4, 60),  # as it is served: native attention reads bfloat16 cells
    "llama-4bit kv8": in_test_or_soak(4, 60),  # quantised cells
    "llama-4bit kv4": in_test_or_soak(3, 60),
    "qwen3_5-4bit kv16": in_test_or_soak(1, 20),  # a hybrid
    "qwen3_5-4bit kv8": in_test_or_soak(1, 20),
    "gpt_oss-mxfp4 kv4": in_test_or_soak(2, 20),  # sinks and windows, MLX's operations
    "deepseek_v3-4bit kv8": in_test_or_soak(2, 20),  # latent attention
    "gemma3_text kv4": in_test_or_soak(2, 20),  # sliding windows
    "llama kv8": in_test_or_soak(3, 40),  # float32
    "llama drafted by llama": in_test_or_soak(8, 80),  # a draft model
    "qwen3_5 drafted by llama": in_test_or_soak(2, 20),
    "llama drafted by qwen3_5": in_test_or_soak(3, 40),  # a draft model with recurrent layers
    "llama-4bit drafted by llama-4bit": in_test_or_soak(2, 30),
    "llama-4bit kv8 drafted by llama-4bit": in_test_or_soak(2, 15),
}


def play_seed(family: str, seed: int) -> Tally:
    try:
        return play(world(family), random_history(seed, world(family).vocab_size))
    except Exception as error:
        error.add_note(f"To play it again: OUTRIDER_HISTORY={family}:{seed} pytest -s tests/step -k again")
        raise


def play_many(family: str) -> Tally:
    """As many histories as the table says, and some more until one of them has compared all cells."""
    tally = Tally()
    first, num = FIRST_SEED[family], NUM_HISTORIES[family]
    for seed in range(first, first + num + MOST_MORE_HISTORIES):
        if seed >= first + num and tally.cells > 0:
            break
        tally.add(play_seed(family, seed))
    return tally


def play_until_noticed(family: str, fault: Callable[[pytest.MonkeyPatch], None]) -> None:
    """The histories of `play_many`, after the one that is known to notice the fault."""
    if fault.__name__ in NOTICED_BY:
        play_seed(family, NOTICED_BY[fault.__name__])
    play_many(family)


@pytest.mark.soak
@pytest.mark.parametrize("family", NUM_HISTORIES)
def test_every_request_gives_what_it_gives_alone_without_drafts(family: str) -> None:
    tally = play_many(family)
    print(tally.summary())
    assert tally.excused <= world(family).tolerance.excused * tally.tokens
    assert tally.cells > 0
    if family.startswith("llama") and "drafted" not in family:
        assert tally.held.total() > 0
    if family == "llama drafted by llama":
        assert tally.caught_up > 0
        assert any(accepted for _, accepted in tally.accepted_lengths("head"))
    if family == "llama":
        assert_all_kinds_occurred(tally)
        if IN_SOAK:
            assert_everything_occurred(tally)


@pytest.mark.skipif(extension() is None, reason="needs the native extension")
@pytest.mark.parametrize("name", [name for name in NUM_HISTORIES if name.endswith("128g")])
def test_the_quantised_layers_of_these_models_have_groups_of_128(name: str) -> None:
    """The control of the test above: a layer that such a group does not divide would stay as it is."""
    layers = {type(layer) for _, layer in world(name).model.named_modules() if "weight" in layer}
    assert nn.Linear not in layers
    assert {layer.group_size for _, layer in quantized_layers(world(name).model)} == {128}


def assert_all_kinds_occurred(tally: Tally) -> None:
    """Nothing above counts unless the histories were rich enough."""
    none_or_all = {(drafted, accepted) for drafted in range(1, 9) for accepted in (0, drafted)}
    assert tally.accepted_lengths("scripted", "scripted with head") >= none_or_all
    assert max(accepted for _, accepted in tally.accepted_lengths("head")) >= 3
    assert max(accepted for _, accepted in tally.accepted_lengths("ngram")) >= 3
    assert max(accepted for _, accepted in tally.accepted_lengths("prediction")) > 5
    assert tally.finished.keys() == {"length", "stop", "cancelled", "error"}
    assert tally.preemptions > 2
    assert tally.failed_steps > 10
    assert tally.tokens > 2000
    assert tally.held.keys() >= {(drafted, accepted) for drafted in (1, 3) for accepted in (0, drafted)}
    assert tally.held_finished.keys() == {"length", "stop", "cancelled", "error"}
    assert tally.caught_up > 10
    assert tally.ahead > 50


def assert_everything_occurred(tally: Tally) -> None:
    """What only the many histories of `make soak` contain."""
    every_length = {(drafted, accepted) for drafted in range(1, 9) for accepted in range(drafted + 1)}
    assert tally.accepted_lengths("scripted", "scripted with head") >= every_length
    assert max(accepted for _, accepted in tally.accepted_lengths("prediction")) == 8
    assert tally.preemptions > 5
    assert tally.failed_steps > 20
    assert tally.tokens > 5000
    assert tally.held_preemptions > 0
    assert tally.caught_up > 50
    assert tally.ahead > 100


@pytest.mark.skipif(
    "OUTRIDER_HISTORY" not in os.environ, reason="plays one history again: OUTRIDER_HISTORY=llama:17"
)
def test_play_one_history_again() -> None:
    family, seed = os.environ["OUTRIDER_HISTORY"].split(":")
    print(random_history(int(seed), world(family).vocab_size))
    print(play_seed(family, int(seed)).summary())


# -- controls: what the test above must notice -----------------------------------------------------------


def accepts_one_too_many(patch: pytest.MonkeyPatch) -> None:
    count = verify.count_accepted

    def wrong(targets: mx.array, drafts: mx.array, num_drafts: mx.array, positions: mx.array) -> mx.array:
        return mx.minimum(count(targets, drafts, num_drafts, positions) + 1, num_drafts)

    patch.setattr(verify, "count_accepted", wrong)


def accepts_past_an_error(patch: pytest.MonkeyPatch) -> None:
    def wrong(targets: mx.array, drafts: mx.array, num_drafts: mx.array, positions: mx.array) -> mx.array:
        is_draft = mx.arange(drafts.shape[1]) < num_drafts[:, None]
        return ((targets[:, :-1] == drafts) & is_draft).astype(mx.int32).sum(axis=1)

    patch.setattr(verify, "count_accepted", wrong)


def noise_is_one_position_late(patch: pytest.MonkeyPatch) -> None:
    sample = Sampler.sample
    patch.setattr(Sampler, "sample", lambda self, logits, positions: sample(self, logits, positions + 1))


def noise_stands_still_in_a_window(patch: pytest.MonkeyPatch) -> None:
    sample = Sampler.sample

    def wrong(self: Sampler, logits: mx.array, positions: mx.array) -> mx.array:
        return sample(self, logits, mx.broadcast_to(positions[:, :1], positions.shape))

    patch.setattr(Sampler, "sample", wrong)


def the_first_sampler_serves_all(patch: pytest.MonkeyPatch) -> None:
    of = Sampler.of
    patch.setattr(
        Sampler, "of", lambda params, for_trace=False: of(list(params[:1]) * len(params), for_trace)
    )


def _processors_of_other_rows(patch: pytest.MonkeyPatch, other: Callable[[RowPlan], RowPlan]) -> None:
    of = LogitsProcessors.of
    patch.setattr(LogitsProcessors, "of", lambda rows, *facts: of([other(row) for row in rows], *facts))


def penalties_do_not_see_drafts(patch: pytest.MonkeyPatch) -> None:
    def undrafted(row: RowPlan) -> RowPlan:
        return replace(row, num_drafts=0, token_ids=row.token_ids[: row.first_target + 1])

    _processors_of_other_rows(patch, undrafted)


def penalties_lag_by_a_token(patch: pytest.MonkeyPatch) -> None:
    _processors_of_other_rows(patch, lambda row: replace(row, history=row.history[:-1]))


def functions_of_users_see_other_drafts(patch: pytest.MonkeyPatch) -> None:
    def other(row: RowPlan) -> RowPlan:
        committed = row.token_ids[: row.first_target + 1]
        return replace(row, token_ids=[*committed, *[0] * row.num_drafts])

    of = custom_processors.CustomProcessors.of
    patch.setattr(custom_processors.CustomProcessors, "of", lambda rows: of([other(row) for row in rows]))


def bad_words_do_not_see_drafts(patch: pytest.MonkeyPatch) -> None:
    ends = logits_processors._ends_of_bad_words
    patch.setattr(
        logits_processors,
        "_ends_of_bad_words",
        lambda row, drafts: ends(row, ())[:1] * (1 + len(drafts)),
    )


def logprobs_are_of_edited_logits(patch: pytest.MonkeyPatch) -> None:
    apply, compute, edited = LogitsProcessors.apply, verify.compute_logprobs, []

    def applied(self: LogitsProcessors, logits: mx.array) -> mx.array:
        edited.append((logits, apply(self, logits)))
        return edited[-1][1]

    def wrong(logits: mx.array, targets: mx.array, asked: LogprobRequest) -> LogprobArrays:
        other = next((new for old, new in edited if old is logits), logits)
        edited.clear()
        return compute(other, targets, asked)

    patch.setattr(LogitsProcessors, "apply", applied)
    patch.setattr(verify, "compute_logprobs", wrong)


def the_next_cell_is_seen(patch: pytest.MonkeyPatch) -> None:
    mask = ragged_kv.Placement.mask

    def wrong(self: ragged_kv.Placement, window: int | None) -> mx.array:
        attended = mask(self, window)
        return attended | mx.roll(attended, 1, axis=-1)

    patch.setattr(ragged_kv.Placement, "mask", wrong)


def moves_are_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ragged_kv.RaggedKV, "exchange", lambda *_: None)


def blocks_are_taken_for_each_other(patch: pytest.MonkeyPatch) -> None:
    tables = batch_module.block_tables

    def wrong(rows: Sequence[Sequence[int]], num_columns: int) -> mx.array:
        return tables([[*row[1:2], *row[:1], *row[2:]] for row in rows], num_columns)

    patch.setattr(batch_module, "block_tables", wrong)


def a_block_is_given_back_too_early(patch: pytest.MonkeyPatch) -> None:
    """The next row takes it while the first still reads it."""
    take = BlockPool.take

    def wrong(self: BlockPool) -> int:
        return next(iter(self._num_holders)) if len(self._num_holders) == 7 else take(self)

    patch.setattr(BlockPool, "take", wrong)
    patch.setattr(BlockPool, "give_back", lambda self, block: self._num_holders.pop(block, None))
    patch.setattr(BlockPool, "check_integrity", lambda *_: None)


def the_head_is_fed_rejected_drafts(patch: pytest.MonkeyPatch) -> None:
    next_tokens = forward.next_tokens

    def wrong(batch: Batch, inputs: InputBatch, verified: verify.VerifyOutput | None) -> mx.array:
        right = next_tokens(batch, inputs, verified)
        shifted = mx.concatenate([inputs.token_ids[:, 1:], right[:, -1:]], axis=1)
        fed = mx.arange(1, right.shape[1] + 1) < inputs.num_fed[:, None]
        return mx.where(fed, shifted, right)

    patch.setattr(forward, "next_tokens", wrong)


def what_the_draft_model_missed_is_lost(patch: pytest.MonkeyPatch) -> None:
    def wrong(rows: Batch, newest: mx.array, wide: int, offset: int) -> mx.array:
        missed = mx.zeros((newest.shape[0], wide - newest.shape[1]), newest.dtype)
        return mx.concatenate([missed, newest], axis=1)

    patch.setattr(draft_model, "with_missed_tokens", wrong)


def the_draft_model_begins_a_cell_late(patch: pytest.MonkeyPatch) -> None:
    unread = draft_model._unread_tokens

    def wrong(followed: draft_model.FollowedRows, has_x_end: bool) -> tuple[mx.array, draft_model.HeadRows]:
        token_ids, rows = unread(followed, has_x_end)
        return token_ids, replace(rows, starts=rows.starts + 1)

    patch.setattr(draft_model, "_unread_tokens", wrong)


def masks_lag_by_a_position(patch: pytest.MonkeyPatch) -> None:
    of = Masks.of

    def late(row: RowPlan) -> RowPlan:
        if row.masks is None:
            return row
        return replace(row, masks=np.concatenate([row.masks[:1], row.masks[:-1]]))

    patch.setattr(Masks, "of", lambda rows, *facts: of([late(row) for row in rows], *facts))


def masks_are_not_rolled_back(patch: pytest.MonkeyPatch) -> None:
    class Forward:
        """A matcher that does not step back."""

        def __init__(self, matcher: Any) -> None:
            self._matcher = matcher

        def __getattr__(self, name: str) -> Any:
            return getattr(self._matcher, name)

        def rollback(self, num: int) -> None:
            pass

    reset = RowGrammar._reset

    def wrong(self: RowGrammar) -> None:
        reset(self)
        self._matcher = Forward(self._matcher)

    patch.setattr(RowGrammar, "_reset", wrong)


def waiting_grammar_lets_drafts_past_the_marker(patch: pytest.MonkeyPatch) -> None:
    num_allowed = RowGrammar.num_allowed

    def wrong(self: RowGrammar, drafts: list[int]) -> int:
        return len(drafts) if self._is_waiting else num_allowed(self, drafts)

    patch.setattr(RowGrammar, "num_allowed", wrong)
    patch.setattr(RowGrammar, "is_restricting", False)  # else Sequence.commit drops such tokens


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
        functions_of_users_see_other_drafts,
        bad_words_do_not_see_drafts,
        logprobs_are_of_edited_logits,
        the_next_cell_is_seen,
        moves_are_lost,
        blocks_are_taken_for_each_other,
        a_block_is_given_back_too_early,
        the_head_is_fed_rejected_drafts,
        masks_lag_by_a_position,
        masks_are_not_rolled_back,
        waiting_grammar_lets_drafts_past_the_marker,
    ],
)
def test_control_a_fault_is_noticed(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(Divergence):
        play_until_noticed("llama", fault)


@pytest.mark.parametrize(
    "fault",
    [what_the_draft_model_missed_is_lost, the_draft_model_begins_a_cell_late],
)
def test_control_a_fault_of_a_draft_model_is_noticed(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such faults change no token: they leave cells that are not the text's."""
    fault(monkeypatch)
    with pytest.raises(Divergence):
        play_many("llama drafted by llama")
