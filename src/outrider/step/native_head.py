"""An MTP head that drafts in one native operation on CPUs: see cpu/draft_head.py.

It takes the passes in which all rows take the best token, or all sample, and none has images or positions
in a grid. `MTPDrafter` computes the others operation by operation, with the same cells. Both give the same
drafts and margins, to the bit: this is checked with made-up tokens before the native operation is used.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, Protocol

import mlx.core as mx

from outrider.cache.placement import GridPositions
from outrider.cache.ragged_kv import RaggedKV
from outrider.cpu import extension
from outrider.cpu.draft_head import native_draft_head
from outrider.cpu.native_parts import NotFused
from outrider.models.heads import LoadedHead
from outrider.models.trunk import Trunk
from outrider.request import SamplingParams
from outrider.sampling.sampler import Sampler
from outrider.step.head_rows import Drafts, HeadRows

log = logging.getLogger(__name__)


class PlainDrafter(Protocol):
    """The drafter that computes operation by operation."""

    def draft(self, hidden: mx.array, next_ids: mx.array, rows: HeadRows, capacity: int) -> Drafts | None: ...


class NativeHead:
    def __init__(self, native: Any, kv: RaggedKV) -> None:
        """`kv`: the cells of the head's layer."""
        self._native = native
        self._kv = kv

    def can_draft(self, hidden: mx.array, rows: HeadRows) -> bool:
        """Whether the operation takes this pass."""
        return (
            hidden.dtype == mx.float32
            and rows.images is None
            and not rows.has_images
            and not isinstance(rows.positions, GridPositions)
            and rows.sampler is not None
            and rows.sampler.native_numbers() is not None
        )

    def draft(self, hidden: mx.array, next_ids: mx.array, rows: HeadRows) -> Drafts | None:
        assert rows.sampler is not None
        has_blocks = rows.tables is not None
        # No name for the old buffers: whoever holds them makes the operation copy them.
        found = self._native(
            hidden,
            next_ids,
            self._kv.arrays(),
            rows.starts,
            rows.starts if rows.position_deltas is None else rows.starts + rows.position_deltas,
            rows.num_committed,
            rows.tables if has_blocks else mx.array([*rows.slots])[:, None],
            has_blocks,
            self._kv.spec.window or 0,
            rows.depth,
            rows.sampler.native_numbers(),
        )
        num_drafted = 2 if rows.depth else 0
        self._kv.put(found[num_drafted:])
        if rows.depth == 0:
            return None
        return Drafts(found[0], found[1] if rows.with_margins else None)


def native_head_of(
    plain: PlainDrafter, head: LoadedHead, trunk: Trunk, projection: Any, kv: RaggedKV
) -> NativeHead | None:
    """None if the head is not of the kind that the operation computes.

    `plain`: drafts with the same head. `projection`: onto the draft vocabulary. `kv`: the cells of both.
    """
    if extension.if_loaded() is None:
        return None
    try:
        operation = native_draft_head(head.layers[0], trunk.embedding, projection, head.draft_ids)
    except NotFused as reason:
        log.debug("the MTP head drafts operation by operation: %s", reason)
        return None
    native = NativeHead(operation, kv)
    if _agree(native, plain, trunk, kv):
        return native
    log.warning("the MTP head drafts operation by operation: the native operation gives other drafts")
    return None


def _agree(native: NativeHead, plain: PlainDrafter, trunk: Trunk, kv: RaggedKV) -> bool:
    """Compare drafts and margins of two rows, the second one with a rejected draft."""
    width, capacity = 3, 16
    rows = HeadRows(
        slots=(1, 0),
        starts=mx.array([5, 0]),
        num_fed=mx.array([width, width]),
        num_committed=mx.array([width, width - 1]),
        end=5 + width,
        sampler=Sampler.of([SamplingParams(temperature=0)] * 2),
        depth=3,
        with_margins=True,
    )
    hidden = mx.random.normal((2, width, trunk.hidden_size), key=mx.random.key(0)).astype(trunk.dtype)
    next_ids = (mx.arange(2 * width) % trunk.vocab_size).reshape(2, width)
    if not native.can_draft(hidden, rows):
        return False
    found: list[list[mx.array]] = []
    for draft in (partial(plain.draft, capacity=capacity), native.draft):
        kv.resize(2, capacity)
        try:
            drafts = draft(hidden, next_ids, rows)
            assert drafts is not None and drafts.margins is not None
            found.append([drafts.token_ids, drafts.margins])
            mx.eval(found[-1])
        finally:
            kv.resize(0, 0)
    return all(mx.array_equal(*pair).item() for pair in zip(*found, strict=True))
