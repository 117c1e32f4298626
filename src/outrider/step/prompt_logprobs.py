"""Log-probabilities of a prompt's own tokens, for rows that request them: computed while the row prefills.

row feeds       start ............ start + num_fed - 1
gives those of          start + 1 ............ start + num_fed      as far as these are tokens of the prompt
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from outrider.models.trunk import Trunk
from outrider.plan import RowPlan, TokenLogprobs
from outrider.sampling.logprobs import LogprobArrays, LogprobRequest, best_first, compute_logprobs

TOKENS_AT_ONCE = 64  # whose logits are in memory; chosen by hand: 40 MB with a vocabulary of 150,000


@dataclass(frozen=True)
class PromptLogprobs:
    """Of one row: arrays that the device will fill, for a part of its tokens each."""

    row: RowPlan
    parts: tuple[LogprobArrays, ...]

    def arrays(self) -> Iterator[mx.array]:
        for part in self.parts:
            yield from part.arrays.values()

    def read(self) -> tuple[TokenLogprobs, ...]:
        token_ids, num_top = iter(_targets(self.row)), self.row.params.prompt_logprobs
        found = []
        for part in self.parts:
            of_targets, top_ids, top = (np.array(array)[0] for array in part.arrays.values())
            for logprob, ids, values in zip(of_targets, top_ids, top, strict=True):
                best = best_first(ids, values, num_top)
                found.append(TokenLogprobs(next(token_ids), float(logprob), best))
        return tuple(found)


def prompt_logprobs(trunk: Trunk, hidden: mx.array, batch: Sequence[RowPlan]) -> dict[int, PromptLogprobs]:
    """By row of the batch.  hidden [rows, width, H]"""
    wanted = {i: targets for i, row in enumerate(batch) if (targets := _targets(row))}
    return {
        i: PromptLogprobs(batch[i], _parts(trunk, hidden[i : i + 1], batch[i], targets))
        for i, targets in wanted.items()
    }


def _parts(trunk: Trunk, hidden: mx.array, row: RowPlan, targets: list[int]) -> tuple[LogprobArrays, ...]:
    request = LogprobRequest(None, min(row.params.prompt_logprobs or 0, trunk.vocab_size))
    found = []
    for first in range(0, len(targets), TOKENS_AT_ONCE):
        own = mx.array([targets[first : first + TOKENS_AT_ONCE]])
        logits = trunk.logits(hidden[:, first : first + own.shape[1]])
        found.append(compute_logprobs(logits, own, request))
    return tuple(found)


def _targets(row: RowPlan) -> list[int]:
    """The tokens of the prompt that follow the fed tokens; none if the row does not request them."""
    if row.params.prompt_logprobs is None:
        return []
    followers = [*row.token_ids[1:], *([] if row.next_id is None else [row.next_id])]
    return followers[: max(0, row.num_prompt - row.start - 1)]
