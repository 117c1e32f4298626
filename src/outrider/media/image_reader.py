"""What a vision model makes of a picture before a prompt is rendered: the contract of its reader. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from outrider.media.images import DecodedImage
from outrider.prompt_media import PromptMedia


@dataclass(frozen=True, eq=False)
class ProcessedImage:
    """A picture as its model wants it, before its place in a prompt is known."""

    digest: str
    text: str  # what the prompt says for it
    inputs: tuple[tuple[int, Mapping[str, np.ndarray]], ...]  # (image tokens, what the tower takes), in order
    grid: tuple[int, int, int] | None = None  # times, rows and columns of its tokens


class ImageReader(Protocol):
    """One for each layout of pictures."""

    placeholder: str  # the text that stands for a picture in a rendered conversation

    def read(self, picture: DecodedImage) -> ProcessedImage: ...

    def place(self, prompt_ids: Sequence[int], pictures: Sequence[ProcessedImage]) -> PromptMedia:
        """Which cells of the prompt each picture fills."""
        ...
