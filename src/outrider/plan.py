"""The contract of a step: the scheduler's plan, the runner's interface, and the result.

Pure data and protocols. A row with `start` cells that feeds c committed tokens and k drafts:

    cells    0 ........ start-1 | start ..... start+c-1 | start+c .... start+c+k-1
    hold     committed, cached  | committed, fed now    | tentative, fed now
    targets                                   x           x             x

A target token is sampled at each x. After the step `c + accepted` of the cells that it fed are committed.

An overlapped step is planned before the host has read the step before it. Each row feeds the token that the
unread step samples, then that step's new drafts. The plan has UNREAD in the place of these tokens, and
`start` is the most cells that the row can have by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from outrider.host_array import HostArray
from outrider.prompt_media import MediaPiece, PromptMedia
from outrider.request import MAX_DEPTH, SamplingParams

UNREAD = -1  # in the place of a token that the step in front will sample

BLOCK_SIZE = 64  # cells of a block: what native attention takes at once; a cached file of a few MB
# Spare blocks. ZEROS is never written: it stands for blocks that a row does not have. JUNK takes all writes
# that belong to no row.
ZEROS_BLOCK, JUNK_BLOCK, NUM_SPARE_BLOCKS = 0, 1, 2
# Tokens of a wide pass, padding included. On CUDA a wide pass over prompts multiplies by dequantised weights
# (models/quantized_layers.py) and never runs far ahead of the device (cache/placement.py).
MANY_TOKENS = 512
MAX_DECODED_WIDTH = 1 + MAX_DEPTH  # tokens of each row; wider passes are over prompts


def is_wide_prompt_pass(num_tokens: int, width: int) -> bool:
    """`num_tokens`: of the pass, padding included. `width`: of each row."""
    return num_tokens >= MANY_TOKENS and width > MAX_DECODED_WIDTH


@dataclass(frozen=True)
class CacheGeometry:
    """The size in bytes of a model's caches. The scheduler and the caches share this arithmetic.

    A cell is the place of one token, a slot the place of one sequence. Cells are kept in one of two ways:

        slots    every slot has `capacity` cells. One more takes the padding's writes.
        blocks   a sequence has as many blocks of `block_size` cells as it needs. Two more blocks are spare.
    """

    bytes_per_cell: int  # keys and values of one token, over all layers and the head
    bytes_per_slot: int = 0  # recurrent state of one sequence: its size does not depend on the length
    capacity_step: int = 256
    block_size: int | None = None  # None: cells are kept by slots

    @property
    def has_blocks(self) -> bool:
        return self.block_size is not None

    def capacity_for(self, num_cells: int) -> int:
        """The smallest multiple of `capacity_step` that holds `num_cells`."""
        return -(-num_cells // self.capacity_step) * self.capacity_step

    def num_bytes(self, num_slots: int, capacity: int) -> int:
        if num_slots == 0:
            return 0
        return num_slots * ((capacity + 1) * self.bytes_per_cell + self.bytes_per_slot)

    def num_bytes_in_blocks(self, num_slots: int, num_blocks: int) -> int:
        """Where cells are kept by blocks; the spare ones are among `num_blocks`."""
        assert self.block_size is not None
        return num_blocks * self.block_size * self.bytes_per_cell + num_slots * self.bytes_per_slot

    def min_bytes(self) -> int:
        """Bytes of the smallest caches that a row can have."""
        if self.has_blocks:
            return self.num_bytes_in_blocks(1, NUM_SPARE_BLOCKS + 1)
        return self.num_bytes(1, self.capacity_step)

    def blocks_for(self, num_cells: int) -> int:
        assert self.block_size is not None
        return -(-num_cells // self.block_size)


@dataclass(frozen=True, slots=True)
class Move:
    """Exchange the cells of two slots before the step; `one_way`: only copy source to target."""

    source: int
    target: int
    one_way: bool


@dataclass(frozen=True, slots=True)
class BlockPiece:
    """Cells first..last-1 of a cached block."""

    block_id: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class SaveCells:
    """Copy a slot's cells start..end-1 into a cached block; with a file name, to disk as well."""

    block_id: int
    slot: int
    start: int
    end: int
    file_name: str | None = None
    row_block: int | None = None  # where cells are kept by blocks: the row's block that holds these cells


@dataclass(frozen=True, slots=True)
class SaveState:
    """Copy the recurrent states of a slot."""

    state_id: int
    slot: int
    file_name: str | None = None


@dataclass(frozen=True, slots=True)
class LoadCells:
    """Fill a slot's cells from `start` on, and its recurrent states if the model has them."""

    slot: int
    start: int
    pieces: tuple[BlockPiece, ...]
    state_id: int | None = None
    row_blocks: tuple[int, ...] = ()  # where cells are kept by blocks: the row's block for each piece

    @property
    def num_cells(self) -> int:
        return sum(piece.last - piece.first for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A block or state that was read from disk."""

    id: int
    arrays: Mapping[str, HostArray]  # empty on ranks other than 0, which read a file of their own
    file_name: str = ""


@dataclass(frozen=True, slots=True)
class PrefixCopies:
    """The copies between slots and cached blocks in a step, in this order. Moves come before the arrivals."""

    drops: tuple[int, ...] = ()  # ids of blocks and states to free
    saves: tuple[SaveCells, ...] = ()  # out of the slots as the last step left them
    states: tuple[SaveState, ...] = ()
    arrivals: tuple[Arrival, ...] = ()
    loads: tuple[LoadCells, ...] = ()  # into the slots as this step has them

    def __bool__(self) -> bool:
        return bool(self.drops or self.saves or self.states or self.arrivals or self.loads)


@dataclass(frozen=True, slots=True)
class RestoreState:
    """Give a slot the recurrent states that it had before one of the last overlapped steps."""

    slot: int  # as the last step had it: moves come later
    age: int  # 1: before the last step that kept its states; 2: before the one in front of it


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A loaded LoRA or DoRA adapter. Its rows carry the id, the prefix cache of its rows the fingerprint."""

    id: int  # from 1 on
    name: str
    path: str
    kind: str  # "lora" or "dora"
    rank: int
    num_layers: int  # linear layers that it changes
    num_bytes: int
    fingerprint: str  # of the contents


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One sequence's part in one forward pass."""

    sequence_id: int
    slot: int  # the sequence's row in the cache buffers
    start: int  # cells of the row already in the cache; in an overlapped plan, the most there can be
    token_ids: Sequence[int]  # fed now: committed tokens, then drafts
    num_drafts: int  # the last so many of token_ids are drafts
    next_id: int | None  # the prompt token after token_ids; None: the row samples its next token
    feeds_head: bool  # whether the MTP head is fed this row's pairs, or the draft model its tokens
    num_drafts_next: int  # drafts that the head makes now for the row's next step
    params: SamplingParams
    history: Sequence[int]  # all committed tokens; a live list: read it at once, never store it
    num_prompt: int  # the first so many tokens of history are the prompt
    banned_ids: Sequence[int] = ()  # may not be sampled while the answer is shorter than min_tokens
    head_start: int | None = None  # cells that the head has been fed; None: as many as the trunk
    defers_head: bool = False  # store the inputs that the head will be fed later, or in another row
    masks: np.ndarray | None = None  # [1 + num_drafts, words] one bit for each token that a grammar allows
    media: PromptMedia | None = None  # the prompt's images, while the row prefills
    position_delta: int = 0  # position minus cell number, after the prompt
    positions: tuple[int, ...] | None = None  # of token_ids, in a prompt of which tokens were skipped
    draft_source: str = "head"  # where the drafts come from: see speculate/acceptance.py
    num_forced: int = 0  # the first so many drafts are all that a grammar allows
    blocks: tuple[int, ...] = ()  # where cells are kept by blocks: the row's, in the order of its cells
    has_images: bool = False  # the prompt has images, also once the row decodes
    adapter: int = 0  # the id of the row's adapter; 0: none

    @property
    def is_sampling(self) -> bool:
        """False for a prefill chunk that is not the last."""
        return self.next_id is None

    @property
    def num_fed(self) -> int:
        return len(self.token_ids)

    @property
    def bans_tokens(self) -> bool:
        return bool(self.banned_ids) and len(self.history) - self.num_prompt < self.params.min_tokens

    @property
    def changes_logits(self) -> bool:
        """Whether the row has penalties, a bias, bad words, or banned tokens now."""
        return self.params.changes_logits or self.bans_tokens

    @property
    def head_lag(self) -> int:
        """Cells that the trunk has cached and the head was not fed."""
        return 0 if self.head_start is None else self.start - self.head_start

    @property
    def first_target(self) -> int:
        """The column of the row's first target token."""
        return len(self.token_ids) - 1 - self.num_drafts


@dataclass(frozen=True, slots=True)
class PassShape:
    """A pass is padded to at least this shape: a larger one is sometimes cheaper, or already traced."""

    rows: int = 1  # padding rows are added to traced passes only
    width: int = 1


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: restore states, save blocks, move rows, resize the caches, load blocks, run the batches.

    Each batch is one pass.

    A step without batches only copies.
    """

    num_slots: int
    capacity: int  # cells of each slot; 0 where cells are kept by blocks
    moves: tuple[Move, ...]
    batches: tuple[tuple[RowPlan, ...], ...]
    shapes: tuple[PassShape, ...] = ()  # of each batch; empty: no padding
    copies: PrefixCopies = PrefixCopies()
    is_overlapped: bool = False  # one batch, with the rows of the unread step in front: see UNREAD
    keeps_states: bool = False  # keep the recurrent states from before an overlapped step: see RestoreState
    restores: tuple[RestoreState, ...] = ()
    num_blocks: int = 0  # of the caches, where cells are kept by blocks
    # Blocks that stay, in their new order; the others are dropped before new ones are made. None: all stay.
    kept_blocks: tuple[int, ...] | None = None

    @property
    def num_tokens(self) -> int:
        """Fed in all batches, without padding."""
        return sum(row.num_fed for batch in self.batches for row in batch)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities by the model alone (temperature 1, before penalties, bias and filters)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), best first


@dataclass(frozen=True, slots=True)
class RowResult:
    """What a row gained: its sampled tokens (accepted drafts and the bonus) and its next drafts."""

    sequence_id: int
    token_ids: tuple[int, ...]  # empty for a prefill chunk that was not the last
    drafts: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    margins: tuple[float, ...] = ()  # of the drafts (sampling/sampler.py); not from traced passes
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt's tokens from start + 1 on, if requested
    error: str | None = None  # why no token could be sampled after token_ids: the request ends

    @property
    def num_accepted(self) -> int:
        return max(0, len(self.token_ids) - 1)


@dataclass(frozen=True, slots=True)
class StepResult:
    rows: tuple[RowResult, ...] = field(default=())


class LaunchedStep(Protocol):
    """What a runner returns for a step that the device works on."""

    @property
    def is_first_trace(self) -> bool: ...  # a pass was traced just now: the step's time is not typical

    @property
    def is_as_planned(self) -> bool: ...  # every pass has the planned shape


class ImageEmbeddings(Protocol):
    """The encoded pieces of images, by content key: see cache/embedding_cache.py."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def num_hits(self) -> int: ...  # pieces that were already encoded when a row needed them

    def __contains__(self, key: object) -> bool: ...

    def hold(self, keys: Iterable[str]) -> None: ...

    def release(self, keys: Iterable[str]) -> None: ...

    def forget_holds(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ScoringPiece:
    """Tokens start..end-1 of a prompt that is scored before its row prefills: see models/prompt_scorer.py."""

    sequence_id: int
    prompt_ids: Sequence[int]  # the whole prompt; a live list: read it at once, never store it
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        return self.end == len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


class StepRunner(Protocol):
    """Runs the steps of one model and owns its caches: see step/runner.py."""

    @property
    def num_bytes(self) -> int: ...  # of the row caches

    @property
    def prefix_bytes(self) -> int: ...  # of cached prefixes

    @property
    def image_embeddings(self) -> ImageEmbeddings | None: ...  # None if the model reads no images

    @property
    def has_head(self) -> bool: ...

    @property
    def compiles(self) -> bool: ...  # whether decode passes are traced

    def geometry(self, capacity_step: int) -> CacheGeometry: ...

    def run(self, plan: StepPlan) -> StepResult: ...  # launch and finish

    def launch(self, plan: StepPlan, previous: Any = None) -> LaunchedStep: ...

    def finish(self, launched: Any) -> StepResult: ...

    def encode(self, piece: MediaPiece) -> None: ...

    def score(self, piece: ScoringPiece) -> np.ndarray | None: ...  # of all tokens, after the last piece

    def reset(self) -> None: ...  # drop all cells

    def clear_prefixes(self) -> None: ...
