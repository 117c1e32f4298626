"""Decodes frames of MP4, MOV and WebM files with OpenCV (part of outrider[vision]). For clients' videos this
runs in a child process: see decoder.py.

The first bytes must be those of an allowed container. Other kinds that the decoder knows, such as playlists,
could name files and URLs of their own.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from outrider.media.frames import FrameSample, VideoHeader
from outrider.media.limits import InvalidMedia, MediaLimits, import_extra

DAMAGED = "a video is damaged or has no frames"
MAX_VIDEO_FRAMES = 200_000  # by the file's header: almost two hours at 30 frames a second; chosen by hand
# Frames that are decoded and dropped to reach a later one; over that the decoder seeks, and starts again at a
# key frame, which is often a second earlier. Chosen by hand: two frames a second of most videos need no seek.
MAX_SKIPPED = 30
FPS_RANGE = (0.01, 1000.0)  # frames per second that are believed; chosen by hand
DEFAULT_FPS = 24.0  # of a file that does not say; Hugging Face's default
MEDIA_TYPES = {
    "mp4": ("video/mp4", "video/quicktime", "video/x-m4v"),
    "webm": ("video/webm", "video/x-matroska"),
}


def video_kind(data: bytes) -> str | None:
    """Return "mp4" (also for MOV), "webm" (also for Matroska), or None for other data."""
    if data[4:8] == b"ftyp":
        return "mp4"
    return "webm" if data[:4] == b"\x1a\x45\xdf\xa3" else None


def read_header(data: bytes, declared: str, limits: MediaLimits) -> VideoHeader:
    """What the file's header says. Nothing is decoded if the header says how many frames there are."""
    with _opened(data, declared) as capture:
        return _checked_header(capture, limits)


def read_frames(
    data: bytes, declared: str, limits: MediaLimits, sample: FrameSample | None = None
) -> dict[int, np.ndarray]:
    """The frames of a sample by their numbers; without one, frames evenly spread from the first to the last.

    uint8 [height, width, 3] each. A frame that cannot be decoded is left out.
    """
    if sample is None:
        numbers = spread(read_header(data, declared, limits).num_frames, limits.max_frames)
    else:
        numbers = sample.numbers
    with _opened(data, declared) as capture:
        found = _decoded(capture, numbers, limits)
        frames = {number: resized(frame, sample) if sample else frame for number, frame in found}
    if not frames:
        raise InvalidMedia(DAMAGED)
    return frames


def is_fps(value: float) -> bool:
    return FPS_RANGE[0] <= value <= FPS_RANGE[1]


def spread(count: int, most: int) -> tuple[int, ...]:
    """Numbers of at most `most` of `count` frames, evenly spread from the first to the last."""
    return tuple(np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist())


def resized(frame: np.ndarray, sample: FrameSample) -> np.ndarray:
    """A frame in the size of its sample.  uint8 [height, width, 3]"""
    pillow = import_extra("PIL.Image", "videos")
    if frame.shape[:2] == (sample.height, sample.width):
        return frame
    image = pillow.fromarray(np.ascontiguousarray(frame))
    return np.asarray(image.resize((sample.width, sample.height), pillow.Resampling.BICUBIC))


@contextlib.contextmanager
def _opened(data: bytes, declared: str) -> Iterator[Any]:
    kind = video_kind(data)
    assert kind is not None
    if declared.startswith(("video/", "image/")) and declared not in MEDIA_TYPES[kind]:
        raise InvalidMedia(f"a video is declared as {declared[:60]!r} but contains {MEDIA_TYPES[kind][0]}")
    cv2 = import_extra("cv2", "videos")
    # The file has no name, so nothing is left behind if the process is killed.
    with tempfile.TemporaryFile(prefix="outrider-") as file:
        file.write(data)
        file.flush()
        file.seek(0)  # on macOS, what is opened by /dev/fd begins where this file is
        capture = cv2.VideoCapture(f"/dev/fd/{file.fileno()}", cv2.CAP_FFMPEG)
        try:
            if not capture.isOpened():
                raise InvalidMedia(DAMAGED)
            yield capture
        except cv2.error:
            raise InvalidMedia(DAMAGED) from None
        finally:
            capture.release()


def _checked_header(capture: Any, limits: MediaLimits) -> VideoHeader:
    cv2 = import_extra("cv2", "videos")
    facts = [
        capture.get(what)
        for what in (cv2.CAP_PROP_FRAME_COUNT, cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT)
    ]
    if not all(map(math.isfinite, facts)):
        raise InvalidMedia(DAMAGED)
    count, width, height = map(int, facts)
    if width * height > limits.max_image_pixels:
        raise InvalidMedia(f"a video has {width} x {height} pixels; the limit is {limits.max_image_pixels:,}")
    if width < 1 or height < 1:
        raise InvalidMedia(DAMAGED)
    fps = float(capture.get(cv2.CAP_PROP_FPS))
    if count < 1:  # the header of a recording that was streamed
        count, seconds = _counted(capture, limits)
        fps = (count - 1) / seconds if seconds > 0 else fps
    if count > MAX_VIDEO_FRAMES:
        raise InvalidMedia(
            f"a video has {count:,} frames; the limit is {MAX_VIDEO_FRAMES:,}: send a part of it"
        )
    return VideoHeader(count, fps if is_fps(fps) else DEFAULT_FPS, width, height)


def _counted(capture: Any, limits: MediaLimits) -> tuple[int, float]:
    """The number of frames, found by decoding them, and the time of the last one in seconds."""
    cv2 = import_extra("cv2", "videos")
    give_up_s = time.monotonic() + limits.fetch_total_s
    count, last_ms = 0, 0.0
    while count <= MAX_VIDEO_FRAMES and capture.grab():
        count, last_ms = count + 1, float(capture.get(cv2.CAP_PROP_POS_MSEC))
        if time.monotonic() > give_up_s:
            raise InvalidMedia("a video does not say how many frames it has, and takes too long to decode")
    if count == 0:
        raise InvalidMedia(DAMAGED)
    return count, last_ms / 1000


def _decoded(capture: Any, numbers: Sequence[int], limits: MediaLimits) -> Iterator[tuple[int, np.ndarray]]:
    cv2 = import_extra("cv2", "videos")
    give_up_s = time.monotonic() + limits.fetch_total_s
    upcoming = 0  # the number of the frame that would be decoded next
    for number in numbers:
        if time.monotonic() > give_up_s:
            raise InvalidMedia("a video takes too long to decode")
        if 0 <= number - upcoming <= MAX_SKIPPED:
            for _ in range(number - upcoming):
                capture.grab()
        else:
            capture.set(cv2.CAP_PROP_POS_FRAMES, number)
        is_read, frame = capture.read()
        upcoming = number + 1
        if is_read:
            yield number, np.ascontiguousarray(frame[..., ::-1])  # OpenCV returns blue, green, red
