"""The interface between a vision model's image reader and the code that renders prompts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from outrider.media.images import DecodedImage
from outrider.prompt_media import PromptMedia


@dataclass(frozen=True, eq=False)
class ProcessedImage:
    """An image after the model's preprocessing, before its place in a prompt is known."""

    digest: str
    text: str  # the image's text in the prompt: its placeholders and marks
    # For each piece, in order: the number of image tokens and the inputs of the vision encoder.
    inputs: tuple[tuple[int, Mapping[str, np.ndarray]], ...]
    grid: tuple[int, int, int] | None = None  # frames, rows and columns of image tokens


class ImageReader(Protocol):
    """Preprocesses images. Each image layout (tiles, grid) has one implementation."""

    placeholder: str  # the text in the place of an image in a rendered conversation

    def read(self, image: DecodedImage) -> ProcessedImage: ...

    def place(self, prompt_ids: Sequence[int], images: Sequence[ProcessedImage]) -> PromptMedia:
        """Find the positions of the prompt that each image fills."""
        ...
