"""The contract of a step: what the scheduler decides, and what the runner brings back.

Pure data. The cells of a row that had `start` cells and feeds c committed tokens and k drafts:

    cells   0 ........ start-1 | start ..... start+c-1 | start+c .... start+c+k-1
    hold    committed, cached  | committed, fed now    | tentative, fed now
    picks                                      x         x             x

The picks are the target tokens; the row keeps `c + accepted` of the fed cells.

A step may follow one that nobody has read yet: then its rows feed the token that they will have picked and
their drafts, wherever they will stand. The plan has UNREAD in the place of such tokens, and as `start` the
most cells that the row can have by then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.host_array import HostArray
from outrider.prompt_media import PromptMedia
from outrider.request import SamplingParams

UNREAD = -1  # a token that a step under way will bring


@dataclass(frozen=True, slots=True)
class Move:
    """Exchange two slots' cells before the step; `one_way` when nothing in `target` needs to be kept."""

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
    """Copy a slot's cells start..end-1 into a block; with a file name, to disk as well."""

    block_id: int
    slot: int
    start: int
    end: int
    file_name: str | None = None


@dataclass(frozen=True, slots=True)
class SaveState:
    """Copy the states that recurrent layers have for a slot."""

    state_id: int
    slot: int
    file_name: str | None = None


@dataclass(frozen=True, slots=True)
class LoadCells:
    """Fill a slot's cells from `start` on; and its states, where a model has them."""

    slot: int
    start: int
    pieces: tuple[BlockPiece, ...]
    state_id: int | None = None

    @property
    def num_cells(self) -> int:
        return sum(piece.last - piece.first for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A block or state that came from disk."""

    id: int
    arrays: Mapping[str, HostArray]


@dataclass(frozen=True, slots=True)
class PrefixCopies:
    """What the prefix cache asks of a step, in this order; the moves come before the arrivals."""

    drops: tuple[int, ...] = ()  # blocks and states to let go
    saves: tuple[SaveCells, ...] = ()  # out of slots as the last step left them
    states: tuple[SaveState, ...] = ()
    arrivals: tuple[Arrival, ...] = ()
    loads: tuple[LoadCells, ...] = ()  # into slots as this step has them

    def __bool__(self) -> bool:
        return bool(self.drops or self.saves or self.states or self.arrivals or self.loads)


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One sequence's part in one forward pass."""

    sequence_id: int
    slot: int
    start: int  # cells of the row already in the cache
    token_ids: Sequence[int]  # fed now: committed tokens, then drafts
    num_drafts: int  # how many of token_ids, at the end, are tentative
    next_id: int | None  # the prompt token after token_ids; None when the row picks its next token
    feeds_head: bool  # whether the MTP head follows this row
    num_drafts_next: int  # drafts wanted from the head for the row's next step
    params: SamplingParams
    history: Sequence[int]  # all committed tokens; read, never kept
    num_prompt: int  # how many of history are the prompt
    banned_ids: Sequence[int] = ()  # may not be picked while the answer is shorter than min_tokens
    head_start: int | None = None  # cells that the head has been fed; None: as many as the trunk
    defers_head: bool = False  # the head will follow later: keep what it is to be fed
    masks: np.ndarray | None = None  # [1 + num_drafts, words] bits of the tokens that a grammar allows
    media: PromptMedia | None = None  # a prompt's pictures, while it is read
    position_delta: int = 0  # what is added to a cell's number to get its position, after the prompt

    @property
    def picks(self) -> bool:
        return self.next_id is None

    @property
    def num_fed(self) -> int:
        return len(self.token_ids)

    @property
    def num_behind(self) -> int:
        """Cells that the trunk has and the head has not."""
        return 0 if self.head_start is None else self.start - self.head_start

    @property
    def first_pick(self) -> int:
        """Column of the row's first target token."""
        return len(self.token_ids) - 1 - self.num_drafts


@dataclass(frozen=True, slots=True)
class PassShape:
    """The least that a pass is made for, since some shapes are cheaper or sooner ready than smaller ones."""

    rows: int = 1  # of a pass that can be traced; in the slots after its own rows nothing is changed
    width: int = 1


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: give the caches this shape, make these moves, run these batches, one forward pass each.

    A step without batches only copies.
    """

    num_slots: int
    capacity: int
    moves: tuple[Move, ...]
    batches: tuple[tuple[RowPlan, ...], ...]
    shapes: tuple[PassShape, ...] = ()  # of each batch; none: as its rows need it
    copies: PrefixCopies = PrefixCopies()
    is_overlapped: bool = (
        False  # its one batch has the rows of the step before, which was not read: see UNREAD
    )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities by the model alone (temperature 1, before penalties, bias and filters)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), best first


@dataclass(frozen=True, slots=True)
class RowResult:
    """What a row gained: its picked tokens (accepted drafts and the bonus) and its next drafts."""

    sequence_id: int
    token_ids: tuple[int, ...]  # empty for a prefill chunk that was not the last
    drafts: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def num_accepted(self) -> int:
        return max(0, len(self.token_ids) - 1)


@dataclass(frozen=True, slots=True)
class StepResult:
    rows: tuple[RowResult, ...] = field(default=())
