"""A video that is read as a video: its header, the frames chosen by it, the decoded frames. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class VideoHeader:
    """What a file says of its video before any frame is decoded."""

    num_frames: int  # 1 or more
    fps: float  # frames per second, above 0
    width: int
    height: int


@dataclass(frozen=True)
class FrameSample:
    """The frames that a model reads of a video, and the size that they get."""

    numbers: tuple[int, ...]  # of frames, from 0, rising
    width: int
    height: int
    num_tokens: int  # of the prompt

    @property
    def num_bytes(self) -> int:
        """Of the decoded frames."""
        return 3 * len(self.numbers) * self.width * self.height


@dataclass(frozen=True, eq=False)
class DecodedVideo:
    header: VideoHeader
    numbers: tuple[int, ...]  # of the frames; fewer than those of the sample if some could not be decoded
    frames: np.ndarray  # uint8 [frames, height, width, 3], in the size of the sample
