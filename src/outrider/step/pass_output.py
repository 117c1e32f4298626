"""A pass under way: arrays that the device will fill, and how they are read back into plain Python."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from outrider.plan import RowResult, TokenLogprobs
from outrider.sampling.logprobs import read_logprobs
from outrider.step.input_batch import Batch, NextInputs
from outrider.step.verify import Picks


class UnsoundLogits(RuntimeError):
    """The model gave NaN or infinity for a token that was to be committed."""


@dataclass(frozen=True)
class PassOutput:
    batch: Batch
    picks: Picks | None
    drafting: list[int]  # rows that the head follows, indices into batch
    drafts: mx.array | None  # [drafting, depth]
    next_inputs: NextInputs | None  # for the same rows' next pass, where all of them pick
    report: mx.array  # all that is to be read, but for log-probabilities, in one array
    is_traced: bool = False  # its pass was traced for the first time

    @classmethod
    def of(
        cls,
        batch: Batch,
        picks: Picks | None,
        drafting: list[int],
        drafts: mx.array | None,
        hidden: mx.array,
        ends: mx.array,
    ) -> PassOutput:
        parts = [hidden[:1, :1, 0] != 0]  # where nothing is picked there is still something to wait for
        if picks is not None:
            parts = [picks.targets, picks.is_sound, picks.num_accepted]
        if drafts is not None:
            parts.append(drafts)
        report = mx.concatenate([x.astype(mx.int32).flatten() for x in parts])
        next_inputs = None
        if picks is not None and len(picks.rows) == len(batch):
            next_inputs = NextInputs(picks.last_ids(), ends, _spread(drafts, drafting, len(batch)))
        return cls(batch, picks, drafting, drafts, next_inputs, report)

    @property
    def num_rows(self) -> int:
        """Those of the pass, padding rows included."""
        return len(self.batch) if self.next_inputs is None else self.next_inputs.ends.shape[0]

    def arrays(self) -> Iterator[mx.array]:
        """What has to be computed."""
        yield self.report
        if self.picks is not None and self.picks.logprobs is not None:
            yield from self.picks.logprobs.arrays

    def read(self) -> Iterator[RowResult]:
        tokens: dict[int, tuple[int, ...]] = {}
        logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        numbers = _Numbers(self.report)
        if self.picks is not None:
            tokens = _committed(self.picks, numbers, len(self.batch))
            rows = [self.batch[i] for i in tokens]
            found = read_logprobs(self.picks.logprobs, rows, list(tokens.values()))
            logprobs = {self.picks.rows[j]: values for j, values in found.items()}
        drafts: dict[int, list[int]] = {}
        if self.drafts is not None:
            drafts = dict(zip(self.drafting, numbers.take(self.drafts.shape).tolist(), strict=True))
        for i, row in enumerate(self.batch):
            next_drafts = tuple(drafts.get(i, ())[: row.num_drafts_next])
            yield RowResult(row.sequence_id, tokens.get(i, ()), next_drafts, logprobs.get(i, ()))


class _Numbers:
    """A report, taken apart in the order in which it was put together."""

    def __init__(self, report: mx.array) -> None:
        self._left = np.array(report)

    def take(self, shape: tuple[int, ...]) -> np.ndarray:
        size = int(np.prod(shape))
        taken, self._left = self._left[:size], self._left[size:]
        return taken.reshape(shape)


def _committed(picks: Picks, numbers: _Numbers, num_rows: int) -> dict[int, tuple[int, ...]]:
    """The accepted drafts and bonus of each picking row. Padding rows are left out."""
    targets, is_sound, accepted = (
        numbers.take(x.shape) for x in (picks.targets, picks.is_sound, picks.num_accepted)
    )
    own = [(j, i) for j, i in enumerate(picks.rows) if i < num_rows]
    for j, _ in own:
        if not is_sound[j, : accepted[j] + 1].all():
            raise UnsoundLogits("the model gave NaN or infinite logits")
    return {i: tuple(targets[j, : accepted[j] + 1].tolist()) for j, i in own}


def _spread(drafts: mx.array | None, drafting: list[int], num_rows: int) -> mx.array | None:
    """Drafts for all rows, 0 for those that the head does not follow."""
    if drafts is None or len(drafting) == num_rows:
        return drafts
    wide = mx.zeros((num_rows, drafts.shape[1]), drafts.dtype)
    wide[mx.array(drafting)] = drafts
    return wide
