"""Owns the images and videos of a prompt: their cells, the vision encoder's inputs, and positions. Pure data.

prompt   t  t  I  I  I  I  t  t  t          I: image tokens; their embeddings come from the vision encoder
cells    0  1  2  3  4  5  6  7  8
grid     0  1  2  2  2  2  4  5  6          mrope: time, row and column, three numbers per cell
               2  2  3  3
               2  3  2  3
delta    -2: the token in cell 9 has position 7

A video has such a grid for each of its times. Its tokens are called image tokens too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, eq=False)
class MediaPiece:
    """The input of one vision encoder call: an image, some tiles of an image, or some frames of a video."""

    key: str  # equal pieces have equal keys in all requests with the same cache salt
    inputs: Mapping[str, np.ndarray]  # only the vision encoder reads them
    cells: np.ndarray  # int32 [tokens]: cells of the prompt, in rising order

    @property
    def first(self) -> int:
        return int(self.cells[0])

    @property
    def num_tokens(self) -> int:
        return len(self.cells)


@dataclass(frozen=True, eq=False)
class PromptMedia:
    """All media pieces of a prompt, in order."""

    pieces: tuple[MediaPiece, ...]
    positions: np.ndarray | None = None  # int32 [3, prompt]; None: the position of a cell is its index
    delta: int = 0  # added to a cell's index to get its position, after the prompt
    is_bidirectional: bool = False  # the cells of a piece attend to each other; they are consecutive

    @property
    def keys(self) -> list[str]:
        return [piece.key for piece in self.pieces]

    def salted(self, salt: str) -> PromptMedia:
        """The same media under keys that only requests with the same cache salt use."""
        if not salt:
            return self
        prefix = hashlib.sha256(salt.encode()).hexdigest()[:32]
        return replace(self, pieces=tuple(replace(p, key=f"{prefix}/{p.key}") for p in self.pieces))

    def within(self, start: int, end: int) -> tuple[MediaPiece, ...]:
        """The pieces with a cell in start..end-1."""
        return tuple(p for p in self.pieces if p.first < end and p.cells[-1] >= start)

    def span_at(self, cell: int) -> tuple[int, int] | None:
        """The first cell, and the cell after the last, of the bidirectional piece that has this cell."""
        if not self.is_bidirectional:
            return None
        spans = ((p.first, p.first + p.num_tokens) for p in self.pieces)
        return next((span for span in spans if span[0] <= cell < span[1]), None)

    def chunk_end(self, start: int, end: int) -> int:
        """Where a prefill chunk from `start` that may reach `end` has to end.

        A bidirectional piece is computed in a chunk of its own: each of its cells reads all of them.
        """
        if not self.is_bidirectional:
            return end
        edges = (edge for p in self.pieces for edge in (p.first, p.first + p.num_tokens))
        return min((edge for edge in edges if start < edge < end), default=end)

    def first_missing(self, image_embeddings: Container[str], start: int = 0) -> MediaPiece | None:
        """The first piece with a cell at or after `start` whose embeddings are not there yet."""
        return next((p for p in self.pieces if p.cells[-1] >= start and p.key not in image_embeddings), None)

    def distinct_ids(self, prompt_ids: Sequence[int]) -> list[int]:
        """The prompt's ids, with each image token replaced by a negative number that identifies the image.

        Image tokens are the same for all images, so the prefix cache compares prompts by these ids.
        """
        ids = list(prompt_ids)
        for piece in self.pieces:
            own = -1 - int.from_bytes(hashlib.sha256(piece.key.encode()).digest()[:16], "big")
            for cell in piece.cells.tolist():
                ids[cell] = own
        return ids

    def positions_of(self, start: int, end: int) -> np.ndarray:
        """The positions of the cells start..end-1, also of cells after the prompt.  int32 [3, cells]"""
        if self.positions is None:
            return np.broadcast_to(np.arange(start, end, dtype=np.int32) + self.delta, (3, end - start))
        num_prompt = self.positions.shape[1]
        after = np.arange(max(start, num_prompt), max(end, num_prompt), dtype=np.int32) + self.delta
        return np.concatenate([self.positions[:, start:end], np.broadcast_to(after, (3, len(after)))], axis=1)


@dataclass(frozen=True)
class TokenGrid:
    """Image tokens that are consecutive in the prompt: an image, a video, or a video's part at one time."""

    rows: int
    columns: int
    times: tuple[int, ...] = (0,)  # rising; the position of each time, counted from the grid's first position

    @property
    def num_tokens(self) -> int:
        return len(self.times) * self.rows * self.columns

    @property
    def num_positions(self) -> int:
        """How much further on the text after the grid is than the text before it."""
        return max(self.times[-1] + 1, self.rows, self.columns)

    def positions(self) -> np.ndarray:
        """int [3, tokens]"""
        grid = np.indices((len(self.times), self.rows, self.columns)).reshape(3, -1)
        grid[0] = np.asarray(self.times)[grid[0]]
        return grid


def grid_positions(
    token_ids: Sequence[int], image_token_ids: Sequence[int], grids: Sequence[TokenGrid]
) -> tuple[np.ndarray, int]:
    """Positions int32 [3, tokens], and the delta after them, for a prompt with these grids.

    Text positions count up. A grid starts at the position after the text before it, and takes as many
    positions as its longest side. The text after the grid continues from there.
    """
    ids = np.asarray(token_ids)
    is_image = np.isin(ids, image_token_ids)
    positions = np.zeros((3, len(ids)), np.int32)
    at, position = 0, 0
    for grid in grids:
        start = at + int(np.argmax(is_image[at:]))
        positions[:, at:start] = np.arange(position, position + start - at)
        position += start - at
        at = start + grid.num_tokens
        if not is_image[start:at].all() or at > len(ids):
            raise ValueError("the tokens of an image are not consecutive in the prompt")
        positions[:, start:at] = grid.positions() + position
        position += grid.num_positions
    positions[:, at:] = np.arange(position, position + len(ids) - at)
    return positions, position - at
