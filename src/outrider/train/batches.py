"""The exchanges of each training step, their split into parts that fit in memory, and their arrays.

The order is a pure function of the exchanges, the seed and the step: a resumed run goes on where it stopped.
Must not know the model.

An exchange has tokens x0..x(n-1); its answer begins at x_P. The target at position s is the trunk's
distribution after x_s, that is for x_(s+1):

    targets      s = P ... n-2
    guesses      of the chains that start at t = s - d, one for each depth d, if t >= P-1
                 (the engine drafts for the first time after the pair P-1)
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from outrider.train.exchanges import Exchange

# Chosen by hand.
WIDTH_STEP = 16  # tokens; widths are rounded up to a multiple, so that shapes repeat
LENGTH_JITTER = 24  # tokens; random addend to lengths before sorting: each epoch has other batches
MAX_TOKENS_PER_PASS = 4096  # padding included; larger batches are computed in parts
MAX_TOKENS_PER_TARGET = 4  # limits a batch's tokens when prompts are long and answers are short


@dataclass(frozen=True)
class Batch:
    token_ids: mx.array  # [rows, width], padded on the right
    target_cells: mx.array  # [targets] row * width + s
    num_chains: mx.array  # [targets] depths 1..num_chains have a chain that guesses this target
    next_ids: mx.array  # [targets] the text's token x_(s+1)

    @property
    def num_targets(self) -> int:
        return self.target_cells.size

    def guesses(self, outputs: Sequence[mx.array]) -> list[mx.array]:
        """For each depth: the outputs that guess the targets.  [rows, width, H] -> [targets, H]"""
        return [
            out.reshape(-1, out.shape[-1])[mx.maximum(self.target_cells - depth, 0)]
            for depth, out in enumerate(outputs, 1)
        ]

    def at_targets(self, hidden: mx.array) -> mx.array:
        """The hidden states from which the trunk predicts the targets.  [rows, width, H] -> [targets, H]"""
        return hidden.reshape(-1, hidden.shape[-1])[self.target_cells]


def make_batch(exchanges: Sequence[Exchange], depths: int) -> Batch:
    """Every exchange must have at least one target."""
    longest = max(len(one.token_ids) for one in exchanges)
    width = -(-longest // WIDTH_STEP) * WIDTH_STEP
    token_ids = np.zeros((len(exchanges), width), np.int32)
    cells, chains = [], []
    for row, one in enumerate(exchanges):
        ids = one.token_ids
        token_ids[row, : len(ids)] = ids
        first = len(one.prompt_ids)
        s = np.arange(first, len(ids) - 1)
        cells.append(row * width + s)
        chains.append(np.minimum(s - first + 1, depths))
    target_cells = np.concatenate(cells).astype(np.int32)
    return Batch(
        mx.array(token_ids),
        mx.array(target_cells),
        mx.array(np.concatenate(chains).astype(np.int32)),
        mx.array(token_ids.reshape(-1)[target_cells + 1]),
    )


def split(exchanges: Sequence[Exchange]) -> list[list[Exchange]]:
    """Parts of at most MAX_TOKENS_PER_PASS tokens; exchanges of similar length are in one part."""
    parts: list[list[Exchange]] = []
    for one in sorted(exchanges, key=lambda one: len(one.token_ids)):
        width = len(one.token_ids)  # sorted by length: the longest of its part so far
        if not parts or (len(parts[-1]) + 1) * width > MAX_TOKENS_PER_PASS:
            parts.append([])
        parts[-1].append(one)
    return parts


def batches_from(
    step: int, exchanges: Sequence[Exchange], batch_tokens: int, seed: int
) -> Iterator[list[Exchange]]:
    """The exchanges of each step from `step` on, without end."""
    epoch = 0
    while True:
        planned = epoch_batches(exchanges, batch_tokens, random.Random(f"{seed}/{epoch}"))
        yield from planned[step:]
        step = max(0, step - len(planned))
        epoch += 1


def epoch_batches(
    exchanges: Sequence[Exchange], batch_tokens: int, rng: random.Random
) -> list[list[Exchange]]:
    """All exchanges once, in shuffled batches of similar lengths with about `batch_tokens` targets each."""
    by_length = sorted(exchanges, key=lambda one: len(one.token_ids) + rng.uniform(0, LENGTH_JITTER))
    batches: list[list[Exchange]] = []
    room_targets = room_tokens = 0
    for one in by_length:
        if room_targets < one.num_targets or room_tokens < len(one.token_ids):
            batches.append([])
            room_targets, room_tokens = batch_tokens, MAX_TOKENS_PER_TARGET * batch_tokens
        batches[-1].append(one)
        room_targets -= one.num_targets
        room_tokens -= len(one.token_ids)
    rng.shuffle(batches)
    return batches
