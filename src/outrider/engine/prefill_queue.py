"""The rows that read their prompts: whose turn it is, and how much of it a step takes. Pure Python."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Rows

from outrider.engine.image_encoding import ImageEmbeddings
from outrider.engine.prefix.cache import PrefixCache
from outrider.engine.row_plans import prefill_row
from outrider.engine.sequence import Sequence
from outrider.plan import RowPlan
from outrider.prompt_media import MediaPiece

DEFAULT_CHUNK = 512


class PrefillQueue:
    """Rows in the order of their turns: who has read a chunk goes to the end of the line."""

    def __init__(
        self, chunk: int, prefix: PrefixCache | None, image_embeddings: ImageEmbeddings | None
    ) -> None:
        """`chunk`: tokens of prompts that a step reads, padding counted."""
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

    def begin(self, sequence: Sequence) -> None:
        """What it reads stays on the image_embeddings until it has read its prompt."""
        self._rows.append(sequence)
        if sequence.request.media is not None and self._image_embeddings is not None:
            self._image_embeddings.hold(sequence.request.media.keys)

    def pass_turn(self, sequence: Sequence) -> None:
        self._rows.remove(sequence)
        self._rows.append(sequence)

    def end(self, sequence: Sequence) -> None:
        if sequence in self._rows:
            self._rows.remove(sequence)
            if sequence.request.media is not None and self._image_embeddings is not None:
                self._image_embeddings.release(sequence.request.media.keys)

    # -- pictures ----------------------------------------------------------------------------------------

    def next_piece(self) -> MediaPiece | None:
        """What is to be encoded next: the first piece that the row whose turn it is waits for."""
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
        """Those of the rows that are to compute, in turn: what the prefix cache has for them is in place.

        Not those whose next cells come from elsewhere: from an older row that computes them, or from disk.
        """
        reading = [row for row in self._rows if row in rows]
        if self._prefix is None:
            return reading
        self._prefix.receive()
        return [
            row
            for row in reading
            if self._prefix.prepare(row, [other for other in reading if other.id < row.id])
        ]

    def about_to_pick(self, rows: Rows[Sequence]) -> list[Sequence]:
        """Those of the rows that may read the rest of their prompt in this step."""

        def reads_the_rest(row: Sequence) -> bool:
            return row.num_prefill - row.num_cached <= min(self._chunk, self._readable(row))

        return [row for row in rows if not row.is_decoding and reads_the_rest(row)]

    def batch(self, ready: Rows[Sequence]) -> list[RowPlan]:
        """Chunks of prompts: the one whose turn it is, and those that fit in beside it, padding counted."""
        batch: list[RowPlan] = []
        widest = 0
        for sequence in ready:
            size = self._chunk_size(sequence)
            if size <= 0 or (batch and (len(batch) + 1) * max(widest, size) > self._chunk):
                continue
            widest = max(widest, size)
            batch.append(prefill_row(sequence, size))
        return batch

    def _chunk_size(self, sequence: Sequence) -> int:
        start = sequence.num_cached
        end = start + min(self._chunk, self._readable(sequence))
        if self._prefix is not None and end > start:
            end = self._prefix.stop_before(sequence, end)
        return end - start

    def _readable(self, sequence: Sequence) -> int:
        """Tokens left to read before a piece that is not encoded. The head reads one ahead."""
        missing = self._missing(sequence)
        end = sequence.num_prefill if missing is None else missing.first - 1
        return end - sequence.num_cached
