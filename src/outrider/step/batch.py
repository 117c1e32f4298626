"""A pass over a batch: the arrays that go in, and the arrays that come out.

`InputBatch` has what every row feeds. It is built from a plan (`from_plan`) or, for an overlapped step, from
the outputs of the pass before (`after`), which the host has not read yet. For images there are embeddings in
place of image tokens (`image_inputs`), and positions that are not cell numbers (`positions_of`). `PassOutput`
holds arrays that the device will fill, and `read` turns them into plain Python.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from outrider.cache.embedding_cache import EmbeddingCache, ImageInputs
from outrider.cache.placement import GridPositions, Positions, block_tables
from outrider.plan import RowPlan, RowResult, TokenLogprobs
from outrider.sampling.logprobs import read_logprobs

if TYPE_CHECKING:
    from outrider.sampling.custom_processors import RowError
    from outrider.step.head_rows import Drafts
    from outrider.step.prompt_logprobs import PromptLogprobs
    from outrider.step.verify import VerifyOutput

Batch = Sequence[RowPlan]
WIDTH_STEP = 16  # cells; the width of a catch-up pass is a multiple, so that shapes repeat; chosen by hand

NOT_FINITE, SAMPLED, NO_TOKEN = range(3)  # statuses of a target token
NO_TOKEN_LEFT = (
    "no token is left to sample: logit_bias, allowed_token_ids, bad_words, min_tokens, the grammar and "
    "logits_processors together exclude all of them (a logits processor also by NaN or +infinity)"
)


class InvalidLogits(RuntimeError):
    """The model gave NaN or infinity for a token that was to be committed."""


@dataclass(frozen=True)
class InputBatch:
    """The tokens of every row and the cells that they go to."""

    token_ids: mx.array  # [rows, width] committed tokens, drafts, padding
    starts: mx.array  # [rows] the cell of each row's first token
    num_fed: mx.array  # [rows]
    num_drafts: mx.array  # [rows] the last so many of the fed tokens are drafts
    head_fed: mx.array  # [rows] tokens whose pairs the head is fed: num_fed or 0
    position_deltas: mx.array | None = None  # [rows] position minus cell number; None: 0 for all rows
    tables: mx.array | None = None  # [rows, blocks] the rows' blocks; None: cells are kept by slots
    adapters: mx.array | None = None  # [rows] ids, 0 for none; None: 0 for all rows

    @classmethod
    def from_plan(cls, batch: Batch, width: int, num_columns: int = 0) -> InputBatch:
        """`num_columns`: that tables have at least."""
        token_ids = np.zeros((len(batch), width), np.int32)
        for i, row in enumerate(batch):
            token_ids[i, : row.num_fed] = row.token_ids
        starts = mx.array([row.start for row in batch])
        return cls(mx.array(token_ids), starts, *_planned_arrays(batch, num_columns))

    @classmethod
    def after(cls, previous: NextInputs, batch: Batch, width: int, num_columns: int = 0) -> InputBatch:
        """The same rows' next pass: each feeds the token that it has just sampled, then its drafts.

        The two passes may have different numbers of padding rows. Padding rows come last and feed nothing.
        """
        columns = [previous.last_ids[:, None]]
        if previous.drafts is not None:
            columns.append(previous.drafts[:, : width - 1])
        num_more = width - sum(part.shape[1] for part in columns)
        if num_more > 0:
            columns.append(mx.zeros((columns[0].shape[0], num_more), mx.int32))
        token_ids, starts = mx.concatenate(columns, axis=1), previous.ends
        if (num_rows := len(batch)) > starts.shape[0]:
            more = num_rows - starts.shape[0]
            token_ids, starts = mx.pad(token_ids, [(0, more), (0, 0)]), mx.pad(starts, (0, more))
        return cls(token_ids[:num_rows], starts[:num_rows], *_planned_arrays(batch, num_columns))

    @property
    def arrays(self) -> dict[str, mx.array]:
        named = {
            "token_ids": self.token_ids,
            "starts": self.starts,
            "num_fed": self.num_fed,
            "num_drafts": self.num_drafts,
            "head_fed": self.head_fed,
        }
        optional = {
            "position_deltas": self.position_deltas,
            "tables": self.tables,
            "adapters": self.adapters,
        }
        return named | {name: array for name, array in optional.items() if array is not None}


def _planned_arrays(
    batch: Batch, num_columns: int
) -> tuple[mx.array, mx.array, mx.array, mx.array | None, mx.array | None, mx.array | None]:
    """The fields of an InputBatch that a plan always knows."""
    deltas, adapters = [row.position_delta for row in batch], [row.adapter for row in batch]
    has_blocks = any(row.blocks for row in batch)
    return (
        mx.array([row.num_fed for row in batch]),
        mx.array([row.num_drafts for row in batch]),
        mx.array([row.num_fed if row.feeds_head else 0 for row in batch]),
        mx.array(deltas) if any(deltas) else None,
        block_tables([row.blocks for row in batch], num_columns) if has_blocks else None,
        mx.array(adapters) if any(adapters) else None,
    )


def image_inputs(
    batch: Batch, image_embeddings: EmbeddingCache | None, offset: int = 0
) -> ImageInputs | None:
    """The image embeddings among the fed tokens; with offset 1, among the tokens after each fed token."""
    rows: list[np.ndarray] = []
    columns: list[np.ndarray] = []
    parts: list[mx.array] = []
    for i, row in enumerate(batch):
        if row.media is None or image_embeddings is None:
            continue
        start = row.start + offset
        end = start + row.num_fed
        for piece in row.media.within(start, end):
            first, last = np.searchsorted(piece.cells, [start, end]).tolist()
            columns.append(piece.cells[first:last] - start)
            rows.append(np.full(last - first, i, np.int32))
            parts.append(image_embeddings.get(piece.key)[first:last])
    if not parts:
        return None
    row_index, column_index = (mx.array(np.concatenate(found)) for found in (rows, columns))
    return ImageInputs(row_index, column_index, mx.concatenate(parts))


def span_of(batch: Batch) -> tuple[int, int] | None:
    """The cells of the bidirectional image that the pass computes; None: the pass is causal."""
    spans = [row.media.span_at(row.start) for row in batch if row.media is not None]
    found = [span for span in spans if span is not None]
    if found and len(batch) > 1:
        raise ValueError("a bidirectional image needs a pass of its own")
    return found[0] if found else None


def positions_of(
    batch: Batch,
    starts: mx.array,
    width: int,
    position_deltas: mx.array | None,
    head_lag: np.ndarray | None = None,
) -> Positions | None:
    """Positions for rope: None (cell numbers), one offset for each row, or one for each token in a grid.

    There is a grid while a prompt prefills that has images, or of which tokens were skipped.

    `head_lag` [rows]: the pass begins so many cells before its rows' own starts.
    """
    if (grid := position_grid(batch, width, head_lag)) is not None:
        return GridPositions(mx.array(grid))
    return None if position_deltas is None else starts + position_deltas


def position_grid(batch: Batch, width: int, head_lag: np.ndarray | None = None) -> np.ndarray | None:
    """The positions of a pass in which an image prefills or tokens are skipped, int32 [3, rows, width]; None
    for other passes."""
    if not any(_has_grid(row) for row in batch):
        return None
    grid = np.zeros((3, len(batch), width), np.int32)
    for i, row in enumerate(batch):
        first = row.start - (0 if head_lag is None else int(head_lag[i]))
        if row.media is not None:
            end = row.start + row.num_fed
            grid[:, i, : end - first] = row.media.positions_of(first, end)
        elif row.positions is not None:
            grid[:, i, : row.num_fed] = row.positions
        else:
            grid[:, i] = np.arange(first, first + width) + row.position_delta
    return grid


def head_positions_of(
    batch: Batch, starts: mx.array, width: int, position_deltas: mx.array | None
) -> Positions | None:
    """Of the cells that the head is fed: from the first one that it has missed."""
    if (grid := head_position_grid(batch, width)) is not None:
        return GridPositions(mx.array(grid))
    if position_deltas is None:
        return None
    head_lag = lags_of(batch)
    return starts + position_deltas - mx.array(head_lag) if head_lag.any() else starts + position_deltas


def head_position_grid(batch: Batch, width: int) -> np.ndarray | None:
    """The same for the cells that the head is fed."""
    if not any(_has_grid(row) for row in batch):
        return None
    head_lag = lags_of(batch)
    return position_grid(batch, catch_up_width(head_lag, width), head_lag)


def lags_of(rows: Batch) -> np.ndarray:
    """Cells that each row's drafter has missed.  [rows]"""
    return np.array([row.head_lag for row in rows], np.int32)


def catch_up_width(head_lag: np.ndarray, width: int) -> int:
    """Columns of a pass that feeds `width` tokens after those that were missed."""
    if not head_lag.any():
        return width
    return -(-(int(head_lag.max()) + width) // WIDTH_STEP) * WIDTH_STEP


def _has_grid(row: RowPlan) -> bool:
    return row.positions is not None or (row.media is not None and row.media.positions is not None)


@dataclass(frozen=True)
class NextInputs:
    """What the next pass of the same rows starts from. The values of padding rows mean nothing."""

    last_ids: mx.array  # [rows] the last token that each row has sampled
    ends: mx.array  # [rows] cells that are committed
    drafts: mx.array | None  # [rows, depth] for the next pass; arbitrary for rows without drafts


@dataclass(frozen=True)
class PassOutput:
    batch: Batch
    verified: VerifyOutput | None  # None if no row samples
    drafting: list[int]  # rows that the head follows, indices into batch
    drafts: Drafts | None  # of these rows
    next_inputs: NextInputs | None  # None unless every row samples
    report: mx.array  # everything that the host reads, except log-probabilities, in one array
    prompt_logprobs: Mapping[int, PromptLogprobs] = field(default_factory=dict)  # by row of the batch
    is_first_trace: bool = False  # the pass was traced just now, which takes the host far longer than a step

    @classmethod
    def of(
        cls,
        batch: Batch,
        verified: VerifyOutput | None,
        drafting: list[int],
        drafts: Drafts | None,
        hidden: mx.array,
        ends: mx.array,
        prompt_logprobs: Mapping[int, PromptLogprobs],
    ) -> PassOutput:
        if verified is not None:
            parts = [verified.targets, verified.statuses, verified.num_accepted]
        else:
            parts = [hidden[:1, :1, 0] != 0]  # the host waits for this value
        if drafts is not None:
            parts.append(drafts.token_ids)
            if drafts.margins is not None:
                parts.append(drafts.margins.astype(mx.float32).view(mx.int32))
        report = mx.concatenate([x.astype(mx.int32).flatten() for x in parts])
        next_inputs = None
        if verified is not None and len(verified.rows) == len(batch):
            drafts_of_all = None if drafts is None else drafts.token_ids
            if drafts is not None and len(drafting) < len(batch):
                drafts_of_all = mx.zeros((len(batch), drafts.token_ids.shape[1]), drafts.token_ids.dtype)
                drafts_of_all[mx.array(drafting)] = drafts.token_ids
            next_inputs = NextInputs(verified.last_ids(), ends, drafts_of_all)
        return cls(batch, verified, drafting, drafts, next_inputs, report, prompt_logprobs)

    @property
    def num_rows(self) -> int:
        """Rows of the pass, padding rows included."""
        return len(self.batch) if self.next_inputs is None else self.next_inputs.ends.shape[0]

    def arrays(self) -> Iterator[mx.array]:
        """The arrays that the device has to compute."""
        yield self.report
        if self.verified is not None and self.verified.logprobs is not None:
            yield from self.verified.logprobs.arrays.values()
        for prompt in self.prompt_logprobs.values():
            yield from prompt.arrays()

    def read(self) -> Iterator[RowResult]:
        """Wait for the device, then take the report apart in the order in which it was put together."""
        report = np.array(self.report)

        def take(shape: tuple[int, ...]) -> np.ndarray:
            nonlocal report
            size = math.prod(shape)
            taken, report = report[:size], report[size:]
            return taken.reshape(shape)

        tokens: dict[int, tuple[int, ...]] = {}
        errors: dict[int, str | None] = {}
        logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        if (verified := self.verified) is not None:
            targets, statuses, num_accepted = (
                take(x.shape).tolist() for x in (verified.targets, verified.statuses, verified.num_accepted)
            )
            for j, i in enumerate(verified.rows):
                if i >= len(self.batch):
                    continue  # a padding row
                num, errors[i] = _usable(statuses[j][: num_accepted[j] + 1], verified.errors.get(j))
                tokens[i] = tuple(targets[j][:num])
            if verified.logprobs is not None:
                rows = [self.batch[i] for i in tokens]
                found = read_logprobs(verified.logprobs, rows, list(tokens.values()))
                logprobs = {verified.rows[j]: values for j, values in found.items()}
        drafts: dict[int, list[int]] = {}
        margins: dict[int, list[float]] = {}
        if self.drafts is not None:
            shape = self.drafts.token_ids.shape
            drafts = dict(zip(self.drafting, take(shape).tolist(), strict=True))
            if self.drafts.margins is not None:
                margins = dict(zip(self.drafting, take(shape).view(np.float32).tolist(), strict=True))
        for i, row in enumerate(self.batch):
            num_next = row.num_drafts_next
            yield RowResult(
                row.sequence_id,
                tokens.get(i, ()),
                tuple(drafts.get(i, ())[:num_next]),
                logprobs.get(i, ()),
                tuple(margins.get(i, ())[:num_next]),
                prompt.read() if (prompt := self.prompt_logprobs.get(i)) is not None else (),
                errors.get(i),
            )


def _usable(statuses: list[int], error: RowError | None) -> tuple[int, str | None]:
    """How many of a row's sampled tokens count, and the error after them, if there is one."""
    ends = [(statuses.index(NO_TOKEN), NO_TOKEN_LEFT)] if NO_TOKEN in statuses else []
    if error is not None and error.position < len(statuses):
        ends.append((error.position, error.message))
    num, message = min(ends, default=(len(statuses), None), key=lambda end: end[0])
    if NOT_FINITE in statuses[:num]:
        raise InvalidLogits("the model gave NaN or infinite logits")
    return num, message
