"""How much of the prompts a step computes, so that prompts are fast and nobody is stalled. Pure Python.

    nobody decodes       chunks of the size that costs least for each token. Behind many cells they shrink: a
                         chunk takes `max_stall_s`, or what a first chunk takes: new requests wait for it
    rows decode          a step with a chunk takes at most `max_stall_s`, decode pass included; and then the
                         decoding rows go on alone until they have had their share of the time

With D decoding rows and P rows that prefill, the decoding rows' share is D / (D + P), but at most a half: one
chat beside one prompt keeps half of its pace, and so do seven chats. The times are those that the steps
really took; before a step they are predicted (speculate/prompt_costs.py, speculate/costs.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from outrider.speculate.prompt_costs import PromptCosts, PromptShape

MIN_CHUNK = (
    16  # tokens of a chunk that is cut short, at least; chosen by hand: one pass costs as much as for 1
)
MIN_STALL_SHARE = 0.25  # of the stall limit is for a chunk even if the decode pass takes all; chosen by hand
MAX_SURPRISE = 2.0  # times of the expected seconds of a pass that are paid back at most; chosen by hand
MAX_DECODE_SHARE = 0.5  # of the time, for decoding rows beside prompts


@dataclass(frozen=True)
class ChunkLimit:
    """What a step may compute of the prompts."""

    max_tokens: int
    max_s: float = math.inf
    max_bytes: float = math.inf
    min_tokens: int = MIN_CHUNK  # of the row whose turn it is, if it has as many


@dataclass(frozen=True)
class PromptWork:
    """The prompts' part of a step that was planned."""

    shape: PromptShape
    decode_s: float | None  # expected seconds of the step's decode pass; 0 without one; None: unknown
    decode_share: float  # of the time, which the decoding rows are to get; 0 if there are none
    is_typical: bool = True  # the step does nothing else that takes time


class PromptPacing:
    def __init__(
        self,
        costs: PromptCosts,
        max_tokens: int | None,
        default_tokens: int,
        max_stall_s: float,
        max_bytes: float = math.inf,
    ) -> None:
        """`max_tokens`: the operator's limit of a chunk; None: the best size by the costs.

        `default_tokens`: the size if the costs do not tell. `max_stall_s`: 0 for no limit, and no share.
        `max_bytes`: memory that a pass may compute with.
        """
        self._max_bytes = max_bytes
        self._costs = costs
        self._chunk = max_tokens or costs.best_size or default_tokens
        self._is_measured = max_tokens is None
        self._max_stall_s = max_stall_s
        self._owed_s = 0.0  # time that decoding rows get before the next chunk

    @property
    def max_tokens(self) -> int:
        """The most prompt tokens of a step."""
        return self._chunk

    @cached_property
    def max_scored_tokens(self) -> int:
        """The most tokens that the scorer of prompts reads at once. It has no more layers than the model."""
        for size in chunk_sizes(self._chunk, self._chunk):
            if self._costs.pass_bytes(PromptShape().plus(size, 0)) <= self._max_bytes:
                return size
        return min(self._chunk, MIN_CHUNK)

    def may_prefill(self, num_decoding: int, in_flight_s: float = 0.0) -> bool:
        """Whether the prompts' turn has come, once a decode step of `in_flight_s` is over."""
        return num_decoding == 0 or self._owed_s <= in_flight_s

    def limit(self, decode_s: float | None) -> ChunkLimit:
        """What a step may compute beside a decode pass of `decode_s`; 0: nobody decodes; None: unknown."""
        if self._max_stall_s == 0:
            return ChunkLimit(self._chunk, max_bytes=self._max_bytes)
        if decode_s == 0:
            # Not less than half of the best size: a busy machine makes passes slow rather than tokens.
            min_tokens = max(MIN_CHUNK, self._chunk // 2)
            return ChunkLimit(self._chunk, self._max_lone_s(), self._max_bytes, min_tokens)
        left_s = self._max_stall_s - (decode_s or 0.0)
        max_s = max(left_s, MIN_STALL_SHARE * self._max_stall_s)
        return ChunkLimit(self._chunk, max_s, self._max_bytes)

    def _max_lone_s(self) -> float:
        if not self._is_measured:
            return math.inf
        return max(self._max_stall_s, self._costs.pass_s(PromptShape().plus(self._chunk, 0)))

    def decode_share(self, num_decoding: int, num_prefilling: int) -> float:
        if num_decoding == 0 or self._max_stall_s == 0:
            return 0.0
        return min(MAX_DECODE_SHARE, num_decoding / (num_decoding + num_prefilling))

    def stepped(self, work: PromptWork | None, seconds: float) -> None:
        """A step took `seconds`. Its chunks are paid back with time for the decoding rows."""
        if work is None:
            self._owed_s = max(0.0, self._owed_s - seconds)
            return
        prompt_s = max(0.0, seconds - (work.decode_s or 0.0))
        # A pass that took far longer than expected, perhaps to load its kernels, is not paid back in full.
        counted_s = min(prompt_s, max(self._max_stall_s, MAX_SURPRISE * self._costs.pass_s(work.shape)))
        if work.is_typical and work.decode_s is not None and prompt_s > 0:
            self._costs.observe(work.shape, prompt_s)
        owed_s = counted_s * work.decode_share / (1 - work.decode_share)
        self._owed_s = max(0.0, owed_s - (seconds - prompt_s))


def chunk_sizes(rest: int, max_tokens: int) -> list[int]:
    """The sizes that a chunk of a prompt with `rest` tokens may have, the largest first.

    Few sizes serve all chunks, since the first pass of a size is slow where kernels are chosen by shape.
    """
    most = min(rest, max_tokens)
    sizes = {most}
    size = MIN_CHUNK
    while size < most:
        sizes |= {size, min(most, size + size // 2)}
        size *= 2
    return sorted(sizes, reverse=True)
