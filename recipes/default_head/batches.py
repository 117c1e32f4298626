"""Training data on the device: conversations with the trunk's hidden states, handed out in batches.

Owns which positions are trained and how conversations are put together. Must not know about losses. There
are a few widths, and every batch of one width has the same shapes, so that a step can be a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from conversations import Conversations
from torch import Tensor
from trunk import Trunk

WIDTHS = (*range(128, 769, 64), 1024, 1280, 1536, 1792, 2048)
TOKENS_AT_ONCE = 131_072  # of one pass of the trunk


@dataclass(frozen=True)
class Group:
    """Which conversations make up a batch, decided on the host."""

    width: int
    rows: Tensor  # [rows] conversations


@dataclass(frozen=True)
class Batch:
    token_ids: Tensor  # [rows, width], the last token repeated as padding
    hidden: Tensor  # [rows, width, H] the trunk's, after its final norm
    targets: Tensor  # [N] places of drafted tokens in the flattened [rows * width]
    is_valid: Tensor  # [N] float; 0 where there were fewer targets than N

    def follows(self) -> Tensor:
        """1 where the target before is the token before, 0 at the first target of an answer.  [N] float"""
        return (self.targets - self.targets.roll(1) == 1).float()  # targets ascend: never so for the first

    def teacher(self) -> Tensor:
        """The hidden states from which the trunk itself picks the targets.  [N, H]"""
        return self.hidden.flatten(0, 1)[self.targets - 1]

    def drafts(self, outs: list[Tensor]) -> list[Tensor]:
        """What each depth makes of the same targets: depth d starts d + 1 tokens before.  [N, H] each"""
        return [
            out.flatten(0, 1).index_select(0, self.targets - depth - 1)
            for depth, out in enumerate(outs, start=1)
        ]


class TrainingData:
    def __init__(self, conversations: Conversations, trunk: Trunk, targets_per_batch: int) -> None:
        conversations = conversations.to(trunk.device)
        self._num = targets_per_batch
        self._tokens = conversations.token_ids
        self._starts = conversations.starts
        self._lengths = conversations.lengths
        self._hidden = hidden_states(conversations, trunk)
        # A request's first token comes from its prefill: drafts begin with the token after it.
        drafted = conversations.is_target.clone()
        drafted[1:] &= conversations.is_target[:-1]
        self._targets = drafted.nonzero()[:, 0]
        running = torch.cat([self._starts.new_zeros(1), drafted.long().cumsum(0)])[self._starts]
        self._first_target, self._num_targets = running[:-1], running.diff()
        self._members = self._by_width()

    @property
    def num_targets(self) -> int:
        return len(self._targets)

    def _by_width(self) -> dict[int, tuple[Tensor, int]]:
        """For every width its conversations, and how many make a batch with about the wanted targets."""
        lengths, targets = self._lengths.cpu(), self._num_targets.cpu()
        which = torch.bucketize(lengths, torch.tensor(WIDTHS))
        members = {}
        for index, width in enumerate(WIDTHS):
            inside = (which == index).nonzero()[:, 0]
            if len(inside):
                rows = round(self._num / max(1.0, float(targets[inside].float().mean())))
                members[width] = (inside, max(1, min(rows, len(inside))))
        return members

    def epoch(self, seed: int) -> Iterator[Group]:
        """Conversations in random order, each at most once: a remainder that fills no batch is left out."""
        generator = torch.Generator().manual_seed(seed)
        groups = []
        for width, (inside, rows) in self._members.items():
            order = inside[torch.randperm(len(inside), generator=generator)]
            groups += [Group(width, part) for part in order.split(rows) if len(part) == rows]
        for index in torch.randperm(len(groups), generator=generator).tolist():
            yield groups[index]

    def batch(self, width: int, rows: Tensor) -> Batch:
        """The batch of these conversations [rows] (on the device); its shapes depend on no data."""
        columns = torch.arange(width, device=rows.device)
        at = self._starts[rows][:, None] + torch.minimum(columns, self._lengths[rows][:, None] - 1)
        counts = self._num_targets[rows]
        ends = counts.cumsum(0)
        slot = torch.arange(self._num, device=rows.device)
        is_valid = slot < ends[-1]
        slot = torch.minimum(slot, ends[-1] - 1)
        row = torch.searchsorted(ends, slot, right=True)
        target = self._targets[self._first_target[rows][row] + slot - (ends - counts)[row]]
        places = target - self._starts[rows][row] + row * width
        return Batch(self._tokens[at], self._hidden[at], places, is_valid.float())


def endless(data: TrainingData, seed: int) -> Iterator[Group]:
    epoch = 0
    while True:
        yield from data.epoch(seed * 100_003 + epoch)
        epoch += 1


def hidden_states(conversations: Conversations, trunk: Trunk) -> Tensor:
    """The trunk over every conversation.  [N, H]"""
    size = trunk.shape.hidden_size
    hidden = torch.empty(len(conversations.token_ids), size, dtype=trunk.dtype, device=trunk.device)
    order = conversations.lengths.argsort(descending=True)
    lengths, starts = conversations.lengths[order].cpu(), conversations.starts[order]
    first = 0
    while first < len(order):
        width = int(lengths[first])
        last = min(len(order), first + max(1, TOKENS_AT_ONCE // width))
        columns = torch.arange(width, device=trunk.device)
        inside = columns < lengths[first:last, None].to(trunk.device)
        at = (starts[first:last, None] + columns).where(inside, starts[first:last, None])
        hidden[at[inside]] = trunk.hidden(conversations.token_ids[at])[inside]
        first = last
    return hidden
