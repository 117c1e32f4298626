"""Drafters that run on the device, within the pass whose tokens they follow: the interface, and who has it.

    PausableHead       an MTP head (step/mtp.py, step/deferred_head.py), fed hidden states of the trunk
    DraftModelDrafter  a smaller model (step/draft_model.py), fed tokens

Plans call both of them the head: `RowPlan.feeds_head`, `head_start`, `defers_head`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import mlx.core as mx

from outrider.cache.placement import Placement
from outrider.models.divided_output import DividedOutput
from outrider.models.draft_model import DraftModel
from outrider.models.heads import LoadedHead
from outrider.models.trunk import Buffers, Trunk
from outrider.step.deferred_head import FollowedRows, PausableHead
from outrider.step.draft_model import DraftModelDrafter
from outrider.step.head_rows import Drafts
from outrider.step.ranks import Ranks

LoadedDrafter = LoadedHead | DraftModel


class DeviceDrafter(Protocol):
    @property
    def may_run_on_all_rows(self) -> bool:
        """Whether it may run over rows that feed it nothing, and leave their cells alone."""
        ...

    def buffers(self) -> Iterator[Buffers]: ...

    def defer(self, hidden: mx.array, place: Placement) -> None:
        """Store what it needs to be fed these cells in a later pass.  hidden [rows, width, H]"""
        ...

    def draft(self, followed: FollowedRows, capacity: int) -> Drafts | None:
        """Read the rows' new tokens, and those that it has missed; return drafts, if any are wanted."""
        ...


def is_divided(loaded: LoadedDrafter | None) -> bool:
    """Whether it runs on all ranks."""
    return loaded is not None and not isinstance(loaded, DraftModel) and loaded.is_divided


def new_device_drafter(
    loaded: LoadedDrafter, trunk: Trunk, ranks: Ranks | None, divided_output: DividedOutput | None
) -> DeviceDrafter:
    """`ranks`: of the model. All of them make the drafter of a divided head at the same time."""
    if isinstance(loaded, DraftModel):
        return DraftModelDrafter(loaded.trunk, trunk.vocab_size)
    return PausableHead(loaded, trunk, ranks if loaded.is_divided else None, divided_output)
