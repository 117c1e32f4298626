"""What an MTP head or a draft model is fed in one pass, and the drafts that it makes. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from outrider.cache.embedding_cache import ImageInputs
from outrider.cache.placement import Placement, Positions, num_cells_of
from outrider.sampling.sampler import Sampler


@dataclass(frozen=True)
class HeadRows:
    """The rows that the head follows in one pass: their cells, and how many drafts they get."""

    slots: Sequence[int]
    starts: mx.array  # [rows]
    num_fed: mx.array  # [rows] cells that the head is fed, drafts included: as many as the trunk, or 0
    num_committed: mx.array  # [rows] cells of committed tokens and accepted drafts
    end: int  # all fed cells are below it
    sampler: Sampler | None  # None: rank 0 samples, and this is another rank
    depth: int  # drafts to make: the most of any row
    # Of the fed cells, from the first one that the head has missed; None: the cell numbers.
    positions: Positions | None = None
    position_deltas: mx.array | None = None  # [rows] position minus cell number, after the prompt
    images: ImageInputs | None = None  # image embeddings among the next tokens
    has_images: bool = False  # there are some; on another rank than 0 without `images`
    with_margins: bool = False  # compute the drafts' margins too
    tables: mx.array | None = None  # of the rows' blocks; with their size and each row's end: see Placement
    block_size: int = 0
    ends: Sequence[int] | None = None

    def after(self, cells: mx.array) -> Positions | None:
        """Positions of cells past the prompt.  [rows]"""
        return None if self.position_deltas is None else cells + self.position_deltas

    def sample(
        self,
        logits: mx.array,
        positions: mx.array,
        draft_ids: mx.array | None,
        drafts: list[mx.array],
        margins: list[mx.array],
    ) -> None:
        """Append the drafts [rows, 1] of `logits` [rows, 1, V], and their margins if they are wanted."""
        if self.sampler is None:
            found = mx.zeros(positions.shape, mx.int32)
        elif self.with_margins:
            found, margin = self.sampler.sample_drafts_with_margins(logits, positions, draft_ids)
            margins.append(margin)
        else:
            found = self.sampler.sample_drafts(logits, positions, draft_ids)
        drafts.append(found)

    def place(
        self,
        starts: mx.array,
        num_fed: mx.array,
        width: int,
        capacity: int,
        positions: Positions | None = None,
        further: int = 0,
        commits_all: bool = False,
        any_new: bool = False,
    ) -> Placement:
        """The places of a pass whose cells are at most so many `further` than the fed ones.

        `commits_all`, `any_new`: for recurrent layers, see Placement.
        """
        if self.tables is not None:
            capacity = num_cells_of(self.tables, self.block_size)
        return Placement(
            self.slots,
            starts,
            num_fed,
            width,
            min(self.end + further, capacity),
            capacity,
            any_new=any_new,
            positions=positions,
            commits_all=commits_all,
            tables=self.tables,
            block_size=self.block_size,
            ends=None if self.ends is None else [min(end + further, capacity) for end in self.ends],
        )


@dataclass(frozen=True)
class Drafts:
    token_ids: mx.array  # [rows, depth]
    margins: mx.array | None = None  # [rows, depth] see Sampler.sample_drafts_with_margins
