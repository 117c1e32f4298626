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
from collections.abc import Iterator
from typing import Any

import numpy as np

from outrider.media.limits import InvalidMedia, MediaLimits, import_extra

DAMAGED = "a video is damaged or has no frames"
MAX_VIDEO_FRAMES = 200_000  # by the file's header: almost two hours at 30 frames a second; chosen by hand
MEDIA_TYPES = {
    "mp4": ("video/mp4", "video/quicktime", "video/x-m4v"),
    "webm": ("video/webm", "video/x-matroska"),
}


def video_kind(data: bytes) -> str | None:
    """Return "mp4" (also for MOV), "webm" (also for Matroska), or None for other data."""
    if data[4:8] == b"ftyp":
        return "mp4"
    return "webm" if data[:4] == b"\x1a\x45\xdf\xa3" else None


def count_video_frames(data: bytes, declared: str, limits: MediaLimits) -> int:
    """The number of frames by the file's header, 1 or more. No pixels are decoded."""
    with _opened(data, declared) as capture:
        return _checked_count(capture, limits)


def read_frames(data: bytes, declared: str, limits: MediaLimits) -> list[np.ndarray]:
    """Return frames, evenly spread from the first to the last.  uint8 [height, width, 3] each"""
    with _opened(data, declared) as capture:
        frames = list(_sampled(capture, limits))
    if not frames:
        raise InvalidMedia(DAMAGED)
    return frames


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


def _checked_count(capture: Any, limits: MediaLimits) -> int:
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
    if count > MAX_VIDEO_FRAMES:
        raise InvalidMedia(
            f"a video has {count:,} frames; the limit is {MAX_VIDEO_FRAMES:,}: send a part of it"
        )
    return max(count, 1)  # some files do not say


def _sampled(capture: Any, limits: MediaLimits) -> Iterator[np.ndarray]:
    cv2 = import_extra("cv2", "videos")
    count = _checked_count(capture, limits)
    give_up_s = time.monotonic() + limits.fetch_total_s
    for number in np.linspace(0, count - 1, min(count, limits.max_frames)).round().astype(int).tolist():
        if time.monotonic() > give_up_s:
            raise InvalidMedia("a video takes too long to decode")
        capture.set(cv2.CAP_PROP_POS_FRAMES, number)
        is_read, frame = capture.read()
        if is_read:
            yield np.ascontiguousarray(frame[..., ::-1])  # OpenCV returns blue, green, red
