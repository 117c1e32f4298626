"""How the rows of a pass come from logits to tokens: all that their requests ask of it.

What differs from request to request, and from step to step, is in arrays that the host has made, so that a
traced pass serves them all: `key` is the rest.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from outrider.sampling.logits_processors import LogitsProcessors
from outrider.sampling.logprobs import AskedLogprobs
from outrider.sampling.masks import Masks
from outrider.sampling.sampler import Sampler
from outrider.step.input_batch import Batch


def picking_rows(batch: Batch) -> list[int]:
    return [i for i, row in enumerate(batch) if row.picks]


def most_picks(batch: Batch) -> int:
    """Tokens that a row of the batch picks, at most: after its last committed token and at its drafts."""
    return 1 + max((row.num_drafts for row in batch if row.picks), default=0)


@dataclass(frozen=True)
class SamplingBatch:
    targets: Sampler  # of the rows that pick, as are the three below
    processors: LogitsProcessors | None
    masks: Masks | None
    logprobs: AskedLogprobs | None
    drafts: Sampler  # of the rows that the head follows

    @classmethod
    def of(
        cls, batch: Batch, drafting: Sequence[int], num_picks: int, vocab: int, merged: bool = False
    ) -> SamplingBatch:
        """`num_picks` for each picking row. `merged`: fewer keys rather than less work."""
        picking = picking_rows(batch)
        rows = [batch[i] for i in picking]
        targets = drafts = Sampler.of([row.params for row in rows], merged)
        if list(drafting) != picking:
            drafts = Sampler.of([batch[i].params for i in drafting], merged)
        return cls(
            targets,
            LogitsProcessors.of(rows, num_picks, vocab, merged),
            Masks.of(rows, num_picks, merged),
            AskedLogprobs.of(rows, vocab, merged),
            drafts,
        )

    @property
    def key(self) -> Hashable:
        parts = (self.targets, self.processors, self.masks, self.logprobs, self.drafts)
        return tuple(None if part is None else part.key for part in parts)

    @property
    def arrays(self) -> list[list[list[mx.array]]]:
        processors = [] if self.processors is None else [self.processors.arrays]
        masks = [] if self.masks is None else [[self.masks.words]]
        return [self.targets.arrays, processors, masks, self.drafts.arrays]

    def with_arrays(self, arrays: Sequence[list[list[mx.array]]]) -> SamplingBatch:
        targets, processors, masks, drafts = arrays
        return SamplingBatch(
            self.targets.with_arrays(targets),
            LogitsProcessors(*processors[0]) if processors else None,
            replace(self.masks, words=masks[0][0]) if self.masks is not None else None,
            self.logprobs,
            self.drafts.with_arrays(drafts),
        )

    def without_arrays(self) -> SamplingBatch:
        """To be given others later, and to hold none until then."""
        none = mx.array(0)
        return self.with_arrays([[[none] * len(part) for part in parts] for parts in self.arrays])
