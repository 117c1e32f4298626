"""Pictures in a prompt: the cells they fill, what the tower needs of them, where they stand. Pure data.

prompt   t  t  I  I  I  I  t  t  t          I: image tokens, whose embeddings come from the tower
cells    0  1  2  3  4  5  6  7  8
grid     0  1  2  2  2  2  4  5  6          mrope: time, row and column, three numbers a cell
               2  2  3  3
               2  3  2  3
delta    -2: the token in cell 9 stands at position 7
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class MediaPiece:
    """What is encoded at once: a picture, or some tiles of one."""

    key: str  # equal pieces have equal keys, in whichever request
    inputs: Mapping[str, np.ndarray]  # for the tower; nobody else looks
    cells: np.ndarray  # int32 [tokens] of the prompt, rising

    @property
    def first(self) -> int:
        return int(self.cells[0])

    @property
    def num_tokens(self) -> int:
        return len(self.cells)


@dataclass(frozen=True, eq=False)
class PromptMedia:
    """All pieces of a prompt, in order."""

    pieces: tuple[MediaPiece, ...]
    positions: np.ndarray | None = None  # int32 [3, prompt]; None: a cell's position is its number
    delta: int = 0  # what is added to a cell's number after the prompt

    @property
    def keys(self) -> list[str]:
        return [piece.key for piece in self.pieces]

    def within(self, start: int, end: int) -> tuple[MediaPiece, ...]:
        """The pieces that fill any of the cells start..end-1."""
        return tuple(p for p in self.pieces if p.first < end and p.cells[-1] >= start)

    def first_missing(self, image_embeddings: Container[str], start: int = 0) -> MediaPiece | None:
        """The first piece at or after a cell that is not on the image_embeddings of encoded ones."""
        return next((p for p in self.pieces if p.cells[-1] >= start and p.key not in image_embeddings), None)

    def distinct_ids(self, prompt_ids: Sequence[int]) -> list[int]:
        """The prompt's ids with a number below zero, its picture's own, in place of each image token.

        Image tokens are the same for all pictures: whoever compares prompts by their ids compares these.
        """
        ids = list(prompt_ids)
        for piece in self.pieces:
            own = -1 - int.from_bytes(hashlib.sha256(piece.key.encode()).digest()[:16], "big")
            for cell in piece.cells.tolist():
                ids[cell] = own
        return ids

    def positions_of(self, start: int, end: int) -> np.ndarray:
        """Where the cells start..end-1 stand, those after the prompt included.  int32 [3, cells]"""
        if self.positions is None:
            return np.broadcast_to(np.arange(start, end, dtype=np.int32) + self.delta, (3, end - start))
        num_prompt = self.positions.shape[1]
        after = np.arange(max(start, num_prompt), max(end, num_prompt), dtype=np.int32) + self.delta
        return np.concatenate([self.positions[:, start:end], np.broadcast_to(after, (3, len(after)))], axis=1)


def grid_positions(
    token_ids: Sequence[int], image_token_id: int, grids: Sequence[tuple[int, int, int]]
) -> tuple[np.ndarray, int]:
    """Positions int32 [3, tokens] and the delta after them, for pictures of these times, rows and columns.

    Text counts up; a picture starts where the text before it ended and takes as many positions as its longest
    side; what follows goes on from there.
    """
    ids = np.asarray(token_ids)
    is_image = ids == image_token_id
    positions = np.zeros((3, len(ids)), np.int32)
    at, position = 0, 0
    for grid in grids:
        start = at + int(np.argmax(is_image[at:]))
        positions[:, at:start] = np.arange(position, position + start - at)
        position += start - at
        at = start + int(np.prod(grid))
        if not is_image[start:at].all() or at > len(ids):
            raise ValueError("a picture's tokens do not stand together in the prompt")
        positions[:, start:at] = np.indices(grid).reshape(3, -1) + position
        position += max(grid)
    positions[:, at:] = np.arange(position, position + len(ids) - at)
    return positions, position - at
