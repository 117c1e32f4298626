"""Conversations as data: one flat stream of tokens, split into conversations. Some tokens are targets.

This module owns the file format, the cutting of endless loops and the search for held-out prompts. Must not
know how the tokens were made.

    token_ids   c0 c0 c0 c0 c0 c1 c1 c1 ...        starts: 0 5 8 ...      [conversations + 1]
    is_target    .  .  x  x  x  .  x  x            written by the assistant
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

# Chosen by hand.
MAX_PERIOD = 96  # tokens
MIN_REPEATED = 24  # tokens; shorter repetitions are not called a loop
TOKENS_LEFT_OF_LOOP = 96  # tokens that stay after a loop is recognised: a head should learn to draft loops


@dataclass(frozen=True)
class Conversations:
    token_ids: Tensor  # [N] int32
    is_target: Tensor  # [N] bool
    starts: Tensor  # [C + 1] int64
    is_greedy: Tensor  # [C] bool: the assistant's tokens are greedy

    def __len__(self) -> int:
        return len(self.is_greedy)

    @property
    def lengths(self) -> Tensor:
        return self.starts.diff()

    def num_targets(self) -> Tensor:
        """Targets of every conversation.  [C]"""
        running = torch.cat([self.starts.new_zeros(1), self.is_target.long().cumsum(0)])
        return running[self.starts].diff()

    def places(self) -> Tensor:
        """Every token's place in its conversation.  [N]"""
        stream = torch.arange(len(self.token_ids), device=self.starts.device)
        return stream - self.starts[:-1].repeat_interleave(self.lengths)

    def select(self, chosen: Tensor) -> Conversations:
        """The conversations with a True in chosen [C]."""
        return self._keep(chosen.repeat_interleave(self.lengths), chosen)

    def shortened(self, lengths: Tensor) -> Conversations:
        """Every conversation, cut to at most lengths [C] tokens."""
        kept = self.places() < lengths.repeat_interleave(self.lengths)
        return self._keep(kept, torch.ones_like(self.is_greedy))

    def _keep(self, kept: Tensor, chosen: Tensor) -> Conversations:
        running = torch.cat([self.starts.new_zeros(1), kept.long().cumsum(0)])
        lengths = running[self.starts].diff()[chosen]
        starts = torch.cat([self.starts.new_zeros(1), lengths.cumsum(0)])
        return Conversations(self.token_ids[kept], self.is_target[kept], starts, self.is_greedy[chosen])

    def to(self, device: torch.device | str) -> Conversations:
        return Conversations(
            *(x.to(device) for x in (self.token_ids, self.is_target, self.starts, self.is_greedy))
        )

    def save(self, file: Path) -> None:
        arrays = {name: getattr(self, name).cpu().contiguous() for name in self.__dataclass_fields__}
        save_file(arrays, file)

    @classmethod
    def load(cls, file: Path, device: torch.device | str = "cpu") -> Conversations:
        return cls(**load_file(file, device=str(device)))


def joined(parts: Sequence[Conversations]) -> Conversations:
    lengths = torch.cat([part.lengths for part in parts])
    starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    tokens, targets, greedy = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("token_ids", "is_target", "is_greedy")
    )
    return Conversations(tokens, targets, starts, greedy)


def loop_starts(token_ids: Tensor, places: Tensor) -> Tensor:
    """True where a token completes a loop.  [N] -> [N] bool

    The last 2p tokens (at least MIN_REPEATED) equal the tokens p places before, for some period p.
    """
    found = torch.zeros_like(token_ids, dtype=torch.bool)
    for period in range(1, min(MAX_PERIOD, len(token_ids) - 1) + 1):
        run = max(2 * period, MIN_REPEATED)
        repeats = torch.zeros_like(token_ids)
        repeats[period:] = token_ids[period:] == token_ids[:-period]
        running = repeats.cumsum(0, dtype=torch.int32)
        in_window = running.clone()
        in_window[run:] -= running[:-run]
        found |= (in_window == run) & (places >= period + run)
    return found


def without_loops(
    conversations: Conversations, kept: int = TOKENS_LEFT_OF_LOOP
) -> tuple[Conversations, Tensor]:
    """The conversations, cut after a loop begins; and a mask [C] of those that loop."""
    places = conversations.places()
    looping = loop_starts(conversations.token_ids, places).nonzero()[:, 0]
    never = torch.full_like(looping[:1], len(places)) if len(looping) else looping.new_full((1,), len(places))
    looping = torch.cat([looping, never])
    first = looping[torch.searchsorted(looping, conversations.starts[:-1])]
    loops = first < conversations.starts[1:]
    cut = first - conversations.starts[:-1] + kept
    return conversations.shortened(torch.where(loops, cut, conversations.lengths)), loops


def containing(conversations: Conversations, phrases: Sequence[Sequence[int]]) -> Tensor:
    """True for each conversation that contains one of these token sequences.  [C]"""
    stream = conversations.token_ids.cpu().numpy().astype("<i4")
    raw = stream.tobytes()
    found = torch.zeros(len(conversations), dtype=torch.bool)
    starts = conversations.starts.cpu()
    for phrase in phrases:
        pattern = torch.tensor(phrase, dtype=torch.int32).numpy().astype("<i4").tobytes()
        at = raw.find(pattern)
        while at >= 0:
            if at % 4 == 0:
                found[torch.searchsorted(starts, at // 4, right=True) - 1] = True
            at = raw.find(pattern, at + 1)
    return found.to(conversations.starts.device)
