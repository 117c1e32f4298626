"""Decodes frames of MP4, MOV and WebM files with OpenCV (part of outrider[vision]). Runs on a worker thread.

The first bytes must be those of an allowed container. Other kinds that the decoder knows, such as playlists,
could name files and URLs of their own. The temporary file for the decoder is deleted before the frames are
returned.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from outrider.media.limits import InvalidMedia, MediaLimits, import_extra

MEDIA_TYPES = {
    "mp4": ("video/mp4", "video/quicktime", "video/x-m4v"),
    "webm": ("video/webm", "video/x-matroska"),
}


def video_kind(data: bytes) -> str | None:
    """Return "mp4" (also for MOV), "webm" (also for Matroska), or None for other data."""
    if data[4:8] == b"ftyp":
        return "mp4"
    return "webm" if data[:4] == b"\x1a\x45\xdf\xa3" else None


def read_frames(data: bytes, declared: str, limits: MediaLimits) -> list[np.ndarray]:
    """Return frames, evenly spread from the first to the last.  uint8 [height, width, 3] each"""
    kind = video_kind(data)
    assert kind is not None
    if declared.startswith(("video/", "image/")) and declared not in MEDIA_TYPES[kind]:
        raise InvalidMedia(f"a video is declared as {declared[:60]!r} but contains {MEDIA_TYPES[kind][0]}")
    cv2 = import_extra("cv2", "videos")
    with tempfile.NamedTemporaryFile(prefix="outrider-", suffix=f".{kind}") as file:
        file.write(data)
        file.flush()
        capture = cv2.VideoCapture(file.name, cv2.CAP_FFMPEG)
        try:
            frames = list(_sampled(cv2, capture, limits))
        except cv2.error as error:
            raise InvalidMedia(f"a video is damaged ({str(error)[:100]})") from None
        finally:
            capture.release()
    if not frames:
        raise InvalidMedia("a video is damaged or has no frames")
    return frames


def _sampled(cv2: Any, capture: Any, limits: MediaLimits) -> Iterator[np.ndarray]:
    if not capture.isOpened():
        return
    count, width, height = (
        int(capture.get(what))
        for what in (cv2.CAP_PROP_FRAME_COUNT, cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT)
    )
    if width * height > limits.max_image_pixels:
        raise InvalidMedia(f"a video has {width} x {height} pixels; the limit is {limits.max_image_pixels:,}")
    give_up_s = time.monotonic() + limits.fetch_total_s
    num_frames = min(max(count, 1), limits.max_frames)
    for number in np.linspace(0, max(count, 1) - 1, num_frames).round().astype(int).tolist():
        if time.monotonic() > give_up_s:
            raise InvalidMedia("a video takes too long to decode")
        capture.set(cv2.CAP_PROP_POS_FRAMES, number)
        is_read, frame = capture.read()
        if is_read:
            yield np.ascontiguousarray(frame[..., ::-1])  # OpenCV returns blue, green, red
