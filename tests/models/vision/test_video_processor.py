"""Which frames of a video are read, how large, and as which patches: what mlx-vlm's own processor does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import Qwen3VLVideoProcessor, _smart_resize_video
from mlx_vlm.utils import VideoSampling, load_video

from outrider.media.frames import DecodedVideo, VideoHeader
from outrider.media.limits import InvalidMedia
from outrider.models.vision.families import FrameTimes
from outrider.models.vision.video_processor import GridVideoReader
from video_files import clip, encoded_video

SIZES = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 512, "max_pixels": 8192}


def reader(
    times: FrameTimes = "text", vision: dict[str, Any] | None = None, **settings: Any
) -> GridVideoReader:
    processor = SimpleNamespace(
        video_processor=Qwen3VLVideoProcessor(**(SIZES | settings)),
        video_token="<v>",
        vision_start_token="<s>",
        vision_end_token="<e>",
    )
    return GridVideoReader(processor, {"vision_config": vision or {}}, times)


@given(
    num_frames=st.integers(2, 300),
    fps=st.sampled_from([1.0, 7.5, 10.0, 23.976, 60.0]),
    wanted=st.sampled_from([0.5, 2.0, 3.0]),
    least=st.integers(1, 9),
    most=st.integers(2, 40),
)
def test_frames_are_those_that_mlx_vlm_samples(
    num_frames: int, fps: float, wanted: float, least: int, most: int
) -> None:
    sampling = VideoSampling(fps=wanted, min_frames=least, max_frames=most)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cv2, "VideoCapture", lambda _: EmptyVideo(num_frames, fps))
        _, metadata = load_video("made up", sampling)
    header = VideoHeader(num_frames, fps, 64, 48)
    found = reader(fps=wanted, min_frames=least, max_frames=most).sample(header, 1000)
    assert list(found.numbers) == metadata.frames_indices


class EmptyVideo:
    """A cv2.VideoCapture whose frames are all black."""

    def __init__(self, num_frames: int, fps: float) -> None:
        self._facts = {cv2.CAP_PROP_FRAME_COUNT: num_frames, cv2.CAP_PROP_FPS: fps}

    def isOpened(self) -> bool:
        return True

    def get(self, what: int) -> float:
        return self._facts.get(what, 8)

    def set(self, *_: Any) -> None:
        pass

    def read(self) -> tuple[bool, np.ndarray]:
        return True, np.zeros((8, 8, 3), np.uint8)

    def release(self) -> None:
        pass


@given(st.integers(1, 40), st.integers(8, 400), st.integers(8, 400))
def test_sizes_are_those_of_mlx_vlm(num_frames: int, width: int, height: int) -> None:
    numbers = {"fps": 1, "min_frames": 1, "max_frames": 40}
    sample = reader(**numbers).sample(VideoHeader(num_frames, 1.0, width, height), 1000)
    expected = _smart_resize_video(len(sample.numbers), height, width, 2, 8, 512, 8192)
    assert (sample.height, sample.width) == expected
    assert sample.num_tokens == (len(sample.numbers) + 1) // 2 * (sample.height // 8) * (sample.width // 8)


def test_the_servers_limit_bounds_the_frames() -> None:
    header = VideoHeader(100, 10.0, 64, 48)
    assert len(reader().sample(header, 1000).numbers) == 20
    for limit, num_frames in ((7, 6), (2, 2), (1, 1)):
        numbers = reader().sample(header, limit).numbers
        assert len(numbers) == num_frames
        assert numbers[-1] == (99 if num_frames > 1 else 0)


def test_small_and_narrow_videos() -> None:
    tiny = reader(min_pixels=1).sample(VideoHeader(4, 2.0, 3, 5), 100)
    assert (tiny.width, tiny.height) == (8, 8)
    with pytest.raises(InvalidMedia, match="2000 x 8 pixels"):
        reader().sample(VideoHeader(4, 2.0, 2000, 8), 100)


@pytest.mark.parametrize("num_frames", [1, 4, 5])
def test_patches_are_those_of_mlx_vlm(num_frames: int) -> None:
    """Also of an odd number of frames, whose last one is repeated."""
    frames = clip(num_frames, 32, 24)
    found = reader().read(
        DecodedVideo(VideoHeader(num_frames, 2.0, 32, 24), tuple(range(num_frames)), frames)
    )
    settings = SIZES | {"min_pixels": 1, "max_pixels": 1 << 20}  # the frames keep their size
    expected = Qwen3VLVideoProcessor(**settings)([frames.transpose(0, 3, 1, 2)])
    pixels = np.concatenate([inputs["pixel_values"] for _, inputs in found.inputs])
    assert np.array_equal(pixels, expected["pixel_values_videos"])
    grids = np.concatenate([inputs["image_grid_thw"] for _, inputs in found.inputs])
    assert grids.tolist() == expected["video_grid_thw"].tolist()
    assert sum(size for size, _ in found.inputs) == sum(grid.num_tokens for grid in found.grids)
    assert found.num_frames == num_frames


def test_times_as_text_as_seconds_and_as_groups() -> None:
    """Frames 0, 10, 20 and 30 of 40, at 8 a second: groups at 0.6 and 3.1 seconds, 2.5 seconds apart."""
    video = DecodedVideo(VideoHeader(40, 8.0, 16, 8), (0, 10, 20, 30), clip(4, 16, 8))
    written = reader("text").read(video)
    assert written.text == "<0.6 seconds><s><v><v><e><3.1 seconds><s><v><v><e>"
    assert [(grid.rows, grid.columns, grid.times) for grid in written.grids] == [(1, 2, (0,))] * 2
    for times, vision, expected in (
        ("seconds", {"tokens_per_second": 2}, (0, 5)),
        ("seconds", {}, (0, 10)),
        ("groups", {"tokens_per_second": 2}, (0, 1)),
    ):
        found = reader(times, vision).read(video)  # type: ignore[arg-type]
        assert found.text == "<v>" * 4
        assert [grid.times for grid in found.grids] == [expected]


def test_a_file_is_read_as_mlx_vlm_reads_it(tmp_path: Path) -> None:
    """Frames and sizes together, from one file."""
    from outrider.media.images import frame_pixels, video_header
    from outrider.media.limits import MediaLimits

    data = encoded_video(clip(30, 72, 40))
    (tmp_path / "a.mp4").write_bytes(data)
    expected, metadata = load_video(str(tmp_path / "a.mp4"))
    header = video_header(data, "video/mp4", MediaLimits())
    assert (header.num_frames, header.fps, header.width, header.height) == (30, 10.0, 72, 40)
    sample = reader().sample(header, 1000)
    frames = frame_pixels(data, "video/mp4", MediaLimits(), sample)
    assert list(frames) == metadata.frames_indices
    video = DecodedVideo(header, tuple(frames), np.stack(list(frames.values())))
    pixels = np.concatenate([inputs["pixel_values"] for _, inputs in reader().read(video).inputs])
    assert np.array_equal(pixels, Qwen3VLVideoProcessor(**SIZES)([expected])["pixel_values_videos"])
