"""Decodes clients' images and videos in child processes: a decoder that crashes or hangs costs one image."""

from __future__ import annotations

import contextlib
import logging
import queue
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from outrider.isolation.messages import Message
from outrider.isolation.worker import IsolatedWorker, JobFailed, WorkerLimits
from outrider.media.frames import DecodedVideo, FrameSample, VideoHeader
from outrider.media.images import DecodedImage, image_from_pixels
from outrider.media.limits import MIB, InvalidMedia, MediaLimits

log = logging.getLogger(__name__)

CPU_S = 30  # processor time for one image or video; chosen by hand: the largest image takes 1 s
ANSWER_S = 120.0  # by the clock; chosen by hand
DECODER_BYTES = 512 * MIB  # memory of the decoders' libraries and tables; chosen by hand
BYTES_PER_PIXEL = 64  # memory for each pixel of the largest image: copies, and frames that others refer to
NOTHING: Mapping[str, Any] = {}


class MediaDecoder:
    """Thread-safe. Each process starts when it is first needed."""

    def __init__(self, limits: MediaLimits, num_processes: int) -> None:
        self._max_reply_bytes = frame_bytes = 3 * limits.max_image_pixels * limits.max_frames
        worker_limits = WorkerLimits(
            memory_bytes=DECODER_BYTES + BYTES_PER_PIXEL * limits.max_image_pixels + frame_bytes,
            cpu_s=CPU_S,
            answer_s=ANSWER_S,
            file_bytes=limits.max_image_bytes,
            max_reply_bytes=frame_bytes,
        )
        set_up = Message(asdict(replace(limits, local_folder=None)))
        self._workers = [
            IsolatedWorker("outrider.media.child", worker_limits, lambda: set_up)
            for _ in range(num_processes)
        ]
        self._free: queue.LifoQueue[IsolatedWorker] = (
            queue.LifoQueue()
        )  # the last used one is the first taken
        for worker in self._workers:
            self._free.put(worker)

    def decode_image(self, data: bytes, declared: str) -> DecodedImage:
        """An image, or the first frame of an animation. `declared`: its media type, "" if unknown."""
        (image,) = _images(self._ask("decode_image", data, declared))
        return image

    def decode_frames(self, data: bytes, declared: str) -> list[DecodedImage]:
        """Frames of a video or an animation, evenly spread from the first to the last."""
        return _images(self._ask("decode_frames", data, declared))

    def count_frames(self, data: bytes, declared: str) -> int:
        """The most frames that `decode_frames` returns, by the header. No pixels are decoded."""
        return int(self._ask("count_frames", data, declared).fields["count"])

    def read_header(self, data: bytes, declared: str) -> VideoHeader:
        """What a video or an animation says of itself."""
        return VideoHeader(**self._ask("video_header", data, declared).fields)

    def decode_video(
        self, data: bytes, declared: str, header: VideoHeader, sample: FrameSample
    ) -> DecodedVideo:
        """The frames of a sample, in its size."""
        if sample.num_bytes > self._max_reply_bytes:
            raise InvalidMedia(
                f"a video needs {len(sample.numbers)} frames of {sample.width} x {sample.height} pixels; the "
                f"limit is {self._max_reply_bytes // 3:,} pixels in all frames together"
            )
        reply = self._ask("decode_video", data, declared, {"sample": asdict(sample)})
        pixels = np.frombuffer(reply.data, np.uint8).reshape(-1, sample.height, sample.width, 3)
        return DecodedVideo(header, tuple(reply.fields["numbers"]), pixels)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    @property
    def process_ids(self) -> list[int]:
        return [worker.process_id for worker in self._workers if worker.process_id is not None]

    def _ask(self, work: str, data: bytes, declared: str, more: Mapping[str, Any] = NOTHING) -> Message:
        fields: dict[str, Any] = {"work": work, "declared": declared[:100], **more}
        try:
            with self._free_worker() as worker:
                reply = worker.call(fields, data)
        except JobFailed as failure:
            log.warning("an image or video of %d bytes is refused: %s", len(data), failure)
            raise InvalidMedia(f"an image or video cannot be decoded: {failure}") from None
        if "refused" in reply.fields:
            raise InvalidMedia(str(reply.fields["refused"]))
        return reply

    @contextlib.contextmanager
    def _free_worker(self) -> Iterator[IsolatedWorker]:
        worker = self._free.get()
        try:
            yield worker
        finally:
            self._free.put(worker)


def _images(reply: Message) -> list[DecodedImage]:
    """The images of a reply: their sizes, and the pixels of all of them."""
    pixels, images, start = np.frombuffer(reply.data, np.uint8), [], 0
    for height, width in reply.fields["sizes"]:
        end = start + 3 * height * width
        images.append(image_from_pixels(pixels[start:end].reshape(height, width, 3)))
        start = end
    return images
