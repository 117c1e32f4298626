"""Videos of Qwen's families on the host, without MLX: which frames are read, their size, text and patches.

    frames   0 1 | 2 3 | 4 5       a patch covers two frames (temporal_patch_size): a frame group
    tokens   ggg   ggg   ggg       a group has a grid of tokens; the vision encoder reads each group alone

Sampling and sizes are those of mlx-vlm, by the checkpoint's video_preprocessor_config.json. Runs on worker
threads and stores nothing; the patches alone are cut on the engine's thread, when a piece is encoded.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from outrider.media.frames import DecodedVideo, FrameSample, VideoHeader
from outrider.media.image_reader import ProcessedImage
from outrider.media.limits import InvalidMedia
from outrider.models.vision.families import FrameTimes
from outrider.prompt_media import TokenGrid

PATCHES_PER_PIECE = 4096  # of a video, encoded between two steps; at least one group; chosen by hand
MAX_RATIO = 200  # of width to height, as for images
TOKENS_PER_SECOND = 4  # Hugging Face's default for configs without it


class GridVideoReader:
    def __init__(self, processor: Any, config: Mapping[str, Any], times: FrameTimes) -> None:
        self._processor = processor.video_processor
        self._times = times
        self.fps = float(self._processor.fps)
        self._group = int(self._processor.temporal_patch_size)
        self._side = int(self._processor.patch_size) * int(self._processor.merge_size)  # pixels of a token
        vision = config.get("vision_config") or {}
        self._tokens_per_second = float(vision.get("tokens_per_second", TOKENS_PER_SECOND))
        self._token = self.placeholder = str(processor.video_token)
        if times == "text":  # each group gets marks of its own
            self._begin, self._end = str(processor.vision_start_token), str(processor.vision_end_token)
            self.placeholder = f"{self._begin}{self._token}{self._end}"

    def sample(self, header: VideoHeader, max_frames: int) -> FrameSample:
        numbers = self._numbers(header, min(max_frames, int(self._processor.max_frames)))
        width, height = self._size(header, len(numbers))
        per_group = (width // self._side) * (height // self._side)
        return FrameSample(numbers, width, height, -(-len(numbers) // self._group) * per_group)

    def read(self, video: DecodedVideo) -> ProcessedImage:
        padding = -len(video.frames) % self._group  # the last frame is repeated
        frames = np.concatenate([video.frames, np.repeat(video.frames[-1:], padding, axis=0)])
        numbers = (*video.numbers, *video.numbers[-1:] * padding)
        rows, columns = frames.shape[1] // self._side, frames.shape[2] // self._side
        text, grids = self._layout(video, numbers, rows, columns)
        digest = hashlib.sha256(repr((frames.shape, text, grids)).encode())
        digest.update(frames.data)
        pieces = tuple(self._pieces(frames, rows * columns))
        return ProcessedImage(f"video/{digest.hexdigest()}", text, pieces, grids, len(video.numbers))

    def _numbers(self, header: VideoHeader, most: int) -> tuple[int, ...]:
        """Evenly spread frames: as many a second as the processor asks for, within its bounds, in groups."""
        group, total = self._group, header.num_frames
        least = math.ceil(int(self._processor.min_frames) / group) * group
        wanted = total / header.fps * self.fps
        count = min(max(wanted, least), min(most, total) // group * group)
        count = max(int(count) // group * group, 1)  # fewer frames than a group has: one, repeated
        return tuple(np.linspace(0, total - 1, count).round().astype(int).tolist())

    def _size(self, header: VideoHeader, num_frames: int) -> tuple[int, int]:
        """Of all frames: multiples of a token's side, within the bounds for all pixels of the video."""
        sides, unit = (header.width, header.height), self._side
        if max(sides) > MAX_RATIO * min(sides):
            raise InvalidMedia(
                f"a video has {sides[0]} x {sides[1]} pixels: one is more than {MAX_RATIO} times the other"
            )
        width, height = (max(unit, round(side / unit) * unit) for side in sides)
        num_padded = math.ceil(num_frames / self._group) * self._group
        pixels, given = num_padded * width * height, num_frames * header.width * header.height
        if pixels > self._processor.max_pixels:
            scale = math.sqrt(given / self._processor.max_pixels)
            width, height = (max(unit, math.floor(side / scale / unit) * unit) for side in sides)
        elif pixels < self._processor.min_pixels:
            scale = math.sqrt(self._processor.min_pixels / given)
            width, height = (math.ceil(side * scale / unit) * unit for side in sides)
        return width, height

    def _layout(
        self, video: DecodedVideo, numbers: Sequence[int], rows: int, columns: int
    ) -> tuple[str, tuple[TokenGrid, ...]]:
        """The video's text in the prompt, and its grids."""
        num_groups, size = len(numbers) // self._group, rows * columns
        if self._times == "text":
            block = f"{self._begin}{self._token * size}{self._end}"
            seconds = [number / video.header.fps for number in numbers]
            ends = zip(seconds[:: self._group], seconds[self._group - 1 :: self._group], strict=True)
            text = "".join(f"<{(first + last) / 2:.1f} seconds>{block}" for first, last in ends)
            return text, (TokenGrid(rows, columns),) * num_groups
        times = np.arange(num_groups, dtype=np.float32)  # in float32, as Hugging Face's code rounds
        if self._times == "seconds":
            sampled_fps = len(video.numbers) / video.header.num_frames * video.header.fps
            times *= np.float32(self._tokens_per_second * self._group / sampled_fps)
        grid = TokenGrid(rows, columns, tuple(times.astype(int).tolist()))
        return self._token * grid.num_tokens, (grid,)

    def _pieces(
        self, frames: np.ndarray, tokens_per_group: int
    ) -> Iterator[tuple[int, Mapping[str, np.ndarray]]]:
        patches_per_group = tokens_per_group * int(self._processor.merge_size) ** 2
        num_groups = max(1, PATCHES_PER_PIECE // patches_per_group)
        for first in range(0, len(frames), num_groups * self._group):
            some = frames[first : first + num_groups * self._group]
            yield len(some) // self._group * tokens_per_group, _FrameInputs(some, self._processor)


class _FrameInputs(Mapping[str, np.ndarray]):
    """The vision encoder's inputs for some frames, cut when they are read: floats take more memory."""

    NAMES = ("pixel_values", "image_grid_thw")

    def __init__(self, frames: np.ndarray, processor: Any) -> None:
        self._frames = frames  # uint8 [groups x temporal_patch_size, height, width, 3]
        self._processor = processor

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.NAMES:
            raise KeyError(name)
        return self._patches() if name == "pixel_values" else np.array([self._grid], np.int32)

    def __iter__(self) -> Iterator[str]:
        return iter(self.NAMES)

    def __len__(self) -> int:
        return len(self.NAMES)

    @property
    def _grid(self) -> tuple[int, int, int]:
        """Groups, and rows and columns of patches."""
        num_frames, height, width, _ = self._frames.shape
        size = self._processor.patch_size
        return num_frames // self._processor.temporal_patch_size, height // size, width // size

    def _patches(self) -> np.ndarray:
        """float32 [patches, 3 x temporal_patch_size x patch_size x patch_size]; a token's patches together"""
        settings, (groups, rows, columns) = self._processor, self._grid
        pixels = self._frames.astype(np.float32)
        if settings.do_rescale:
            pixels = pixels * settings.rescale_factor
        if settings.do_normalize:
            mean, std = (np.array(one, np.float32) for one in (settings.image_mean, settings.image_std))
            pixels = (pixels - mean) / std
        merge, size, depth = settings.merge_size, settings.patch_size, settings.temporal_patch_size
        cut = pixels.reshape(groups, depth, rows // merge, merge, size, columns // merge, merge, size, 3)
        return cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(groups * rows * columns, -1)
