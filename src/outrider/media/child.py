"""The media child process: decodes clients' images and videos. Only pixels go back to the server."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict

import numpy as np

from outrider.isolation.child import Handler, Reply, serve
from outrider.isolation.messages import Message
from outrider.media.frames import FrameSample
from outrider.media.images import count_frames, frame_pixels, image_pixels, video_header
from outrider.media.limits import InvalidMedia, MediaLimits

# FFmpeg opens nothing but the file itself, and decodes on one thread: other threads need more memory.
FFMPEG_OPTIONS = "protocol_whitelist;file|threads;1"


def new_handler(message: Message) -> Handler:
    limits = MediaLimits(**message.fields)
    os.environ["OPENCV_FFMPEG_CAPTURE_OPTIONS"] = FFMPEG_OPTIONS

    def handle(job: Message) -> Reply:
        try:
            return _done(job, limits)
        except InvalidMedia as refusal:
            return {"refused": str(refusal)}, ()

    return handle


def _done(job: Message, limits: MediaLimits) -> Reply:
    data, declared = bytes(job.data), job.fields["declared"]
    match job.fields["work"]:
        case "count_frames":
            return {"count": count_frames(data, declared, limits)}, ()
        case "decode_frames":
            return _images(frame_pixels(data, declared, limits).values())
        case "video_header":
            return asdict(video_header(data, declared, limits)), ()
        case "decode_video":
            frames = frame_pixels(data, declared, limits, FrameSample(**job.fields["sample"]))
            fields, parts = _images(frames.values())
            return {**fields, "numbers": list(frames)}, parts
        case "decode_image":
            return _images([image_pixels(data, declared, limits)])
    raise ValueError(f"unknown work: {job.fields['work']}")


def _images(arrays: Iterable[np.ndarray]) -> Reply:
    arrays = list(arrays)
    parts = [np.ascontiguousarray(array).data.cast("B") for array in arrays]
    return {"sizes": [array.shape[:2] for array in arrays]}, parts


if __name__ == "__main__":
    serve(new_handler)
