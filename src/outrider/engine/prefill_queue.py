"""The rows that prefill: whose turn it is, and how much of its prompt a step feeds. Pure Python."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Rows

from outrider.engine.draft_planner import prefill_row
from outrider.engine.prefix.cache import PrefixCache
from outrider.engine.prefix.no_cache import NoPrefixCache
from outrider.engine.prompt_pacing import MIN_CHUNK, ChunkLimit, chunk_sizes
from outrider.engine.sequence import Sequence
from outrider.plan import ImageEmbeddings, RowPlan, ScoringPiece
from outrider.prompt_media import MediaPiece
from outrider.speculate.prompt_costs import PromptCosts, PromptShape

MAX_PADDING_SHARE = 0.5  # of a token's cost, up to which padding costs little; chosen by hand
ROUNDING = 1 + 1e-9  # two costs that differ by less are equal


class PrefillQueue:
    """Rows in the order of their turns: a row that has fed a chunk goes to the end."""

    def __init__(
        self,
        costs: PromptCosts,
        prefix: PrefixCache | NoPrefixCache,
        image_embeddings: ImageEmbeddings | None,
    ) -> None:
        self._costs = costs
        self._prefix = prefix
        self._image_embeddings = image_embeddings
        self._rows: deque[Sequence] = deque()

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._rows

    def add(self, sequence: Sequence) -> None:
        """The embeddings of its images stay in memory until its prompt is fed."""
        self._rows.append(sequence)
        if sequence.request.media is not None and self._image_embeddings is not None:
            self._image_embeddings.hold(sequence.request.media.keys)

    def pass_turn(self, sequence: Sequence) -> None:
        self._rows.remove(sequence)
        self._rows.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._rows:
            self._rows.remove(sequence)
            if sequence.request.media is not None and self._image_embeddings is not None:
                self._image_embeddings.release(sequence.request.media.keys)

    # -- images ------------------------------------------------------------------------------------------

    def next_piece(self) -> MediaPiece | None:
        """The piece to encode next: the first one that the row whose turn it is waits for."""
        return next((piece for row in self._rows if (piece := self._missing(row))), None)

    def waiting_for(self, piece: MediaPiece) -> list[Sequence]:
        return [row for row in self._rows if (missing := self._missing(row)) and missing.key == piece.key]

    def _missing(self, sequence: Sequence) -> MediaPiece | None:
        media = sequence.request.media
        if media is None or self._image_embeddings is None:
            return None
        return media.first_missing(self._image_embeddings, sequence.num_cached)

    # -- scores ------------------------------------------------------------------------------------------

    def next_to_score(self, max_tokens: int) -> ScoringPiece | None:
        """The next tokens of a prompt that the scorer reads: prompts are scored one after the other."""
        waiting = [row for row in self._rows if row.awaits_scores]
        if not waiting:
            return None
        row = next((row for row in waiting if row.num_scored), waiting[0])
        prompt_ids, start = row.request.prompt_ids, row.num_scored
        return ScoringPiece(row.id, prompt_ids, start, min(start + max_tokens, len(prompt_ids)))

    def scored(self, piece: ScoringPiece) -> Sequence | None:
        """The row that a piece belongs to, which has been read; None if the row has left meanwhile."""
        row = next((row for row in self._rows if row.id == piece.sequence_id), None)
        if row is not None:
            row.num_scored = piece.end
        return row

    # -- chunks ------------------------------------------------------------------------------------------

    def ready(self, rows: Rows[Sequence]) -> list[Sequence]:
        """The rows that compute their next cells in this step, in turn.

        The prefix cache fills in the cells that it has. A row whose next cells come from elsewhere (an older
        row that computes them, or the disk) is left out, and so is one whose prompt has to be scored first.
        """
        return self._prefix.ready_rows([row for row in self._rows if row in rows and not row.awaits_scores])

    def about_to_sample(self, rows: Rows[Sequence], max_tokens: int) -> list[Sequence]:
        """The rows whose prompts end within a step of `max_tokens` prompt tokens.

        They may have to wait for it: for their turn, or for an older row that computes cells which they need.
        """
        prefilling = [row for row in rows if not row.is_decoding and not row.awaits_scores]
        return [
            row for row in prefilling if row.num_prefill - row.num_cached <= self._max_chunk(row, max_tokens)
        ]

    def batch(self, ready: Rows[Sequence], limit: ChunkLimit) -> tuple[list[RowPlan], PromptShape]:
        """A chunk of the row whose turn it is, and the chunks of other rows that fit beside it.

        A bidirectional image is computed whole, whatever the limit, in a pass of its own: its attention has
        another mask.
        """
        if ready and _in_span(ready[0]) and (size := self._num_readable(ready[0])) > 0:
            return [prefill_row(ready[0], size)], PromptShape().plus(size, ready[0].num_cached)
        ready = [row for row in ready if not _in_span(row)]
        sizes, shape = self._joined(ready, self._short(ready, limit), limit)
        if self._costs.pass_bytes(shape) > limit.max_bytes:  # the short rows leave no memory for the first
            sizes, shape = self._joined(ready, [], limit)
        return [prefill_row(row, sizes[row.id]) for row in ready if row.id in sizes], shape

    def _joined(
        self, ready: Rows[Sequence], short: Rows[Sequence], limit: ChunkLimit
    ) -> tuple[dict[int, int], PromptShape]:
        """The chunks of a pass, by sequence id. `short`: rows that join before the one whose turn it is."""
        sizes: dict[int, int] = {}
        shape = PromptShape()
        for sequence in [*short, *ready]:
            if sequence.id in sizes:
                continue
            if sizes and ready[0].id in sizes and not self._fits(shape.plus(1, sequence.num_cached), limit):
                break
            size = self._chunk_size(sequence, shape, limit, is_first=sequence is ready[0])
            if size > 0:
                shape = shape.plus(size, sequence.num_cached)
                sizes[sequence.id] = size
        return sizes, shape

    def _short(self, ready: Rows[Sequence], limit: ChunkLimit) -> list[Sequence]:
        """Rows that feed the rest of their prompts beside a long chunk of another row, which is cut for them.

        They need not wait for a turn. Together they get half of the pass, if padding costs little.
        """
        found: list[Sequence] = []
        left = limit.max_tokens // 2
        if self._costs.padding_share > MAX_PADDING_SHARE:
            return found
        for sequence in ready[1:]:
            rest = self._num_readable(sequence)
            if 0 < rest <= left:
                found.append(sequence)
                left -= rest
        return found

    def _chunk_size(self, sequence: Sequence, shape: PromptShape, limit: ChunkLimit, is_first: bool) -> int:
        """How much of its prompt a row feeds in a pass that has `shape` without it; 0: nothing.

        The row whose turn it is, `is_first`, always feeds something. Another row joins it only if its chunk
        costs less here than in a pass of its own: padding may cost more.
        """
        start, rest = sequence.num_cached, self._num_readable(sequence)
        for most in chunk_sizes(rest, limit.max_tokens):
            size = self._prefix.chunk_end(sequence, start + most) - start
            if size <= 0:
                return 0
            joined = shape.plus(size, start)
            if is_first and most <= MIN_CHUNK:
                return min(size, limit.max_tokens - shape.num_tokens)
            if is_first and most <= limit.min_tokens and self._costs.pass_bytes(joined) <= limit.max_bytes:
                return size
            if self._fits(joined, limit) and self._is_worth(shape, size, start):
                return size
        return 0

    def _fits(self, shape: PromptShape, limit: ChunkLimit) -> bool:
        if self._costs.num_charged(shape) > limit.max_tokens:
            return False
        if limit.max_bytes < math.inf and self._costs.pass_bytes(shape) > limit.max_bytes:
            return False
        return limit.max_s == math.inf or self._costs.pass_s(shape) <= limit.max_s

    def _is_worth(self, shape: PromptShape, size: int, start: int) -> bool:
        """Whether a chunk costs at most as much beside the others as in a pass of its own."""
        if shape.rows == 0 or not self._costs.is_known:
            return True
        apart_s = self._costs.pass_s(shape) + self._costs.pass_s(PromptShape().plus(size, start))
        return self._costs.pass_s(shape.plus(size, start)) <= apart_s * ROUNDING

    def _num_readable(self, sequence: Sequence) -> int:
        """Tokens that can be fed now: up to one before the first image piece that is not encoded.

        The head reads one token ahead. A chunk also ends where a bidirectional image begins or ends."""
        missing, media = self._missing(sequence), sequence.request.media
        end = sequence.num_prefill if missing is None else missing.first - 1
        if media is not None:
            end = media.chunk_end(sequence.num_cached, end)
        return end - sequence.num_cached

    def _max_chunk(self, sequence: Sequence, max_tokens: int) -> int:
        readable = self._num_readable(sequence)
        return readable if _in_span(sequence) else min(max_tokens, readable)


def _in_span(sequence: Sequence) -> bool:
    """True if the row's next cell is in a bidirectional image."""
    media = sequence.request.media
    return media is not None and media.span_at(sequence.num_cached) is not None
