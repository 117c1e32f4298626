"""Training data on the device: conversations with the trunk's hidden states, in batches.

This module decides which positions are trained and which conversations form a batch. Must not know about
losses. There are a few widths. All batches of one width have the same shapes, so that a step can be a CUDA
graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from conversations import Conversations
from torch import Tensor
from trunk import Trunk

WIDTHS = (*range(128, 769, 64), 1024, 1280, 1536, 1792, 2048)
MAX_TOKENS_PER_PASS = 131_072  # in one pass of the trunk; chosen by hand


@dataclass(frozen=True)
class Group:
    """The conversations of a batch. The host decides them."""

    width: int
    rows: Tensor  # [rows] conversations


@dataclass(frozen=True)
class Batch:
    token_ids: Tensor  # [rows, width], the last token repeated as padding
    hidden: Tensor  # [rows, width, H] of the trunk, after its final norm
    targets: Tensor  # [N] places of drafted tokens in the flattened [rows * width]
    is_valid: Tensor  # [N] float; 0 for padding when there are fewer than N targets

    def follows(self) -> Tensor:
        """1 if the previous target is the previous token, 0 at the first target of an answer.  [N] float"""
        return (self.targets - self.targets.roll(1) == 1).float()  # 0 for the first, since targets ascend

    def teacher(self) -> Tensor:
        """The hidden states from which the trunk predicts the targets.  [N, H]"""
        return self.hidden.flatten(0, 1)[self.targets - 1]

    def drafts(self, outs: list[Tensor]) -> list[Tensor]:
        """For each depth d, the outputs [N, H] that draft the targets: they start d + 1 tokens before."""
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
        # The first token of an answer comes from the prefill. Drafts begin with the second token.
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
        """By width: the conversations, and how many of them make a batch with about the wanted targets."""
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
        """Batches in random order. Conversations that do not fill a whole batch are left out."""
        generator = torch.Generator().manual_seed(seed)
        groups = []
        for width, (inside, rows) in self._members.items():
            order = inside[torch.randperm(len(inside), generator=generator)]
            groups += [Group(width, part) for part in order.split(rows) if len(part) == rows]
        for index in torch.randperm(len(groups), generator=generator).tolist():
            yield groups[index]

    def batch(self, width: int, rows: Tensor) -> Batch:
        """The batch of the conversations `rows` (on the device). Its shapes do not depend on the data."""
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
    """The trunk's hidden states of all conversations.  [N, H]"""
    size = trunk.shape.hidden_size
    hidden = torch.empty(len(conversations.token_ids), size, dtype=trunk.dtype, device=trunk.device)
    order = conversations.lengths.argsort(descending=True)
    lengths, starts = conversations.lengths[order].cpu(), conversations.starts[order]
    first = 0
    while first < len(order):
        width = int(lengths[first])
        last = min(len(order), first + max(1, MAX_TOKENS_PER_PASS // width))
        columns = torch.arange(width, device=trunk.device)
        inside = columns < lengths[first:last, None].to(trunk.device)
        at = (starts[first:last, None] + columns).where(inside, starts[first:last, None])
        hidden[at[inside]] = trunk.hidden(conversations.token_ids[at])[inside]
        first = last
    return hidden
