"""The interface between a vision model's readers and the code that renders prompts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from outrider.media.frames import DecodedVideo, FrameSample, VideoHeader
from outrider.media.images import DecodedImage
from outrider.prompt_media import PromptMedia, TokenGrid


@dataclass(frozen=True, eq=False)
class ProcessedImage:
    """An image, or a whole video, after the model's preprocessing, before its place in a prompt is known."""

    digest: str
    text: str  # its text in the prompt: placeholders and marks
    # For each piece, in order: the number of image tokens and the inputs of the vision encoder.
    inputs: tuple[tuple[int, Mapping[str, np.ndarray]], ...]
    grids: tuple[TokenGrid, ...] = ()  # of models with mrope
    num_frames: int | None = None  # of a video; None: an image

    @property
    def is_video(self) -> bool:
        return self.num_frames is not None


class VideoReader(Protocol):
    """Preprocesses videos for a model that reads several frames as one patch."""

    placeholder: str  # the text in the place of a video in a rendered conversation
    fps: float  # frames that the model reads of one second

    def sample(self, header: VideoHeader, max_frames: int) -> FrameSample:
        """Choose frames as the model's processor does, at most `max_frames`. Raises InvalidMedia."""
        ...

    def read(self, video: DecodedVideo) -> ProcessedImage: ...


class ImageReader(Protocol):
    """Preprocesses images. Each image layout (tiles, grid) has one implementation."""

    placeholder: str  # the text in the place of an image in a rendered conversation
    videos: VideoReader | None  # None: a video is read as separate images

    def read(self, image: DecodedImage) -> ProcessedImage: ...

    def place(self, prompt_ids: Sequence[int], images: Sequence[ProcessedImage]) -> PromptMedia:
        """Find the positions of the prompt that each image or video fills."""
        ...
