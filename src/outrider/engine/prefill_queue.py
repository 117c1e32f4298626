"""The rows that prefill: whose turn it is, and how much of its prompt a step feeds. Pure Python."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Rows

from outrider.engine.draft_planner import prefill_row
from outrider.engine.prefix.cache import PrefixCache
from outrider.engine.prefix.no_cache import NoPrefixCache
from outrider.engine.sequence import Sequence
from outrider.plan import ImageEmbeddings, RowPlan
from outrider.prompt_media import MediaPiece

DEFAULT_CHUNK = 512  # prompt tokens in a step, with padding; chosen by hand (config.prefill_step_size)


class PrefillQueue:
    """Rows in the order of their turns: a row that has fed a chunk goes to the end."""

    def __init__(
        self, chunk: int, prefix: PrefixCache | NoPrefixCache, image_embeddings: ImageEmbeddings | None
    ) -> None:
        """`chunk`: prompt tokens that a step feeds, padding counted."""
        self._chunk = chunk
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

    # -- chunks ------------------------------------------------------------------------------------------

    def ready(self, rows: Rows[Sequence]) -> list[Sequence]:
        """The rows that compute their next cells in this step, in turn.

        The prefix cache fills in the cells that it has. A row whose next cells come from elsewhere (an older
        row that computes them, or the disk) is left out.
        """
        return self._prefix.ready_rows([row for row in self._rows if row in rows])

    def about_to_sample(self, rows: Rows[Sequence]) -> list[Sequence]:
        """The rows that may feed the rest of their prompt in this step."""
        prefilling = [row for row in rows if not row.is_decoding]
        return [
            row
            for row in prefilling
            if row.num_prefill - row.num_cached <= min(self._chunk, self._num_readable(row))
        ]

    def batch(self, ready: Rows[Sequence]) -> list[RowPlan]:
        """A chunk of the row whose turn it is, and the chunks that fit beside it, padding counted."""
        batch: list[RowPlan] = []
        widest = 0
        for sequence in ready:
            start = sequence.num_cached
            end = start + min(self._chunk, self._num_readable(sequence))
            size = self._prefix.chunk_end(sequence, end) - start
            if size <= 0 or (batch and (len(batch) + 1) * max(widest, size) > self._chunk):
                continue
            widest = max(widest, size)
            batch.append(prefill_row(sequence, size))
        return batch

    def _num_readable(self, sequence: Sequence) -> int:
        """Tokens that can be fed now: up to one before the first image piece that is not encoded.

        The head reads one token ahead."""
        missing = self._missing(sequence)
        end = sequence.num_prefill if missing is None else missing.first - 1
        return end - sequence.num_cached
