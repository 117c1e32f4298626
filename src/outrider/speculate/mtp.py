"""Drafting with an MTP head, on the device: feed it the committed pairs, then let it recurse.

The head's cells run parallel to the trunk's: cell t holds the pair (h_t, x_(t+1)), so a row's start is the
same number in both. Deeper drafts write tentative cells past that, which the next pass overwrites.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from outrider.cache.ragged_kv import LayerView, Placement, RaggedKV
from outrider.models.heads import LoadedHead
from outrider.models.trunk import Trunk
from outrider.request import SamplingParams
from outrider.sampling.picking import pick_drafts


@dataclass(frozen=True)
class HeadRows:
    """The rows that a head follows in one pass: where they stand and what they ask for."""

    slots: Sequence[int]
    starts: mx.array  # [rows]
    num_fed: mx.array  # [rows] cells the trunk was fed, drafts included
    num_kept: mx.array  # [rows] cells that stand: what was not rejected
    end: int  # no row's last fed cell is beyond this
    params: Sequence[SamplingParams]
    depth: int  # drafts wanted, the most of any row


class MTPDrafter:
    """A loaded head with its cache, drafting for all rows of a pass at once."""

    def __init__(self, head: LoadedHead, trunk: Trunk) -> None:
        self._module = head.module
        self._trunk = trunk
        self._draft_ids = head.draft_ids
        self.kv = RaggedKV(head.kv_spec)
        self._reduced_weight = None if head.draft_ids is None else _projection_rows(trunk, head.draft_ids)

    def draft(self, hidden: mx.array, next_ids: mx.array, rows: HeadRows, capacity: int) -> mx.array | None:
        """Feed the pairs (hidden [rows, width, H], next_ids [rows, width]); return drafts [rows, depth].

        Pairs past a row's num_kept are written too, as tentative cells: no later pass sees them.
        """
        width = hidden.shape[1]
        place = Placement(rows.slots, rows.starts, rows.num_fed, width, rows.end, capacity)
        out, fed_back = self._pass(hidden, next_ids, place)
        if rows.depth == 0:
            return None
        last = (rows.num_kept - 1)[:, None, None]
        out, fed_back = (mx.take_along_axis(x, last, axis=1) for x in (out, fed_back))  # [rows, 1, H]
        ends = rows.starts + rows.num_kept  # [rows] cells after the step
        one = mx.ones_like(ends)
        drafts = [self._pick(out, ends + 1, rows.params)]
        for depth in range(1, rows.depth):
            place = Placement(
                rows.slots, ends + (depth - 1), one, 1, min(rows.end + depth, capacity), capacity
            )
            out, fed_back = self._pass(fed_back, drafts[-1], place)
            drafts.append(self._pick(out, ends + depth + 1, rows.params))
        return mx.concatenate(drafts, axis=1)

    def _pass(self, hidden: mx.array, token_ids: mx.array, place: Placement) -> tuple[mx.array, mx.array]:
        return self._module(hidden, self._trunk.embed(token_ids), LayerView(self.kv, place))

    def _pick(self, out: mx.array, positions: mx.array, params: Sequence[SamplingParams]) -> mx.array:
        """[rows, 1, H] -> [rows, 1]"""
        if self._reduced_weight is None:
            logits = self._trunk.logits(out)
        else:
            logits = (out @ self._reduced_weight.T).astype(mx.float32)
        return pick_drafts(logits, positions[:, None], params, self._draft_ids)


def _projection_rows(trunk: Trunk, token_ids: mx.array) -> mx.array:
    """The rows of the output projection for these tokens.  [ids, hidden]"""
    output = getattr(trunk.model, "lm_head", None) or trunk.embedding
    if hasattr(output, "bits"):
        weight = mx.dequantize(
            output.weight[token_ids],
            output.scales[token_ids],
            None if output.get("biases") is None else output.biases[token_ids],
            output.group_size,
            output.bits,
            output.mode,
        )
    else:
        weight = output.weight[token_ids]
    mx.eval(weight)
    return weight
