"""Loads all images of a request: fetches, decodes and preprocesses them.

Downloads are async. Base64, files, decoding (in child processes) and preprocessing run on two threads: the
event loop never decodes an image, and all requests together never decode more than two images at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from outrider.media.decoder import MediaDecoder
from outrider.media.fetching import fetch
from outrider.media.frames import DecodedVideo, FrameSample, VideoHeader
from outrider.media.images import DecodedImage
from outrider.media.limits import InvalidMedia, MediaLimits
from outrider.media.sources import DataUrl, FileUrl, Source, WebUrl, parse_source, read_inline
from outrider.request import PromptTooLong

NUM_THREADS = 2  # chosen by hand
MAX_FETCHES = 4  # concurrent downloads of one request; chosen by hand

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
R = TypeVar("R")


class VideoUse(Protocol[T_co]):
    """Chooses the frames of a video by its header, and preprocesses the decoded frames."""

    def sample(self, header: VideoHeader, max_frames: int) -> FrameSample: ...

    def read(self, video: DecodedVideo) -> T_co: ...


@dataclass(frozen=True)
class MediaItem:
    """An image or video that a client sent."""

    kind: Literal["image", "video"]
    source: str  # a URL: data:, http:, https: or file:


@dataclass(frozen=True)
class _Content:
    """The bytes of an item, before they are decoded."""

    kind: Literal["image", "video"]
    data: bytes
    declared: str  # media type; "" if unknown
    num_images: int = 1  # at most
    video: tuple[VideoHeader, FrameSample] | None = None  # of a video that is read as a video


class MediaLoader(Generic[T]):
    """`use` preprocesses each decoded image. Only the result of `use` is stored."""

    def __init__(
        self,
        limits: MediaLimits,
        use: Callable[[DecodedImage], T],
        videos: VideoUse[T] | None = None,
        max_context: int | None = None,
    ) -> None:
        """`videos`: None for a model that reads a video as separate images.

        `max_context`: videos that need more tokens are refused before they are decoded.
        """
        self.limits = limits
        self._use = use
        self._videos = videos
        self._max_context = max_context
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="outrider-media")
        self.decoder = MediaDecoder(limits, num_processes=NUM_THREADS)

    async def load(self, items: Sequence[MediaItem]) -> list[list[T]]:
        """Return for each item its images: one image, one video, or the frames of a video.

        One refusal refuses all.
        """
        self._check_count(len(items))
        sources = [parse_source(item.source) for item in items]
        fetched = await self._fetch_all(sources)
        loop = asyncio.get_running_loop()
        contents = await _all(
            loop.run_in_executor(self._threads, self._read, item.kind, source, data)
            for item, source, data in zip(items, sources, fetched, strict=True)
        )
        self._check_count(sum(content.num_images for content in contents))  # before anything is decoded
        self._check_videos([content.video[1] for content in contents if content.video is not None])
        return await _all(loop.run_in_executor(self._threads, self._decode, content) for content in contents)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.decoder.close()

    def _check_count(self, count: int) -> None:
        if count > self.limits.max_images:
            raise InvalidMedia(
                f"the request has {count} images, frames of videos included; the limit is "
                f"{self.limits.max_images}"
            )

    def _check_videos(self, samples: Sequence[FrameSample]) -> None:
        num_frames = sum(len(sample.numbers) for sample in samples)
        if num_frames > self.limits.max_video_frames:
            raise InvalidMedia(
                f"the videos of the request have {num_frames} frames to read; the limit is "
                f"{self.limits.max_video_frames} for all of them together: send fewer or shorter videos"
            )
        num_tokens = sum(sample.num_tokens for sample in samples)
        if self._max_context is not None and num_tokens >= self._max_context:
            raise PromptTooLong(
                f"the videos of the request need {num_tokens} tokens and the context holds "
                f"{self._max_context}, answer included: send fewer, shorter or smaller videos",
                f"more than {num_tokens} tokens",
                self._max_context,
            )

    async def _fetch_all(self, sources: Sequence[Source]) -> list[bytes | None]:
        """Download the content of web URLs. The result is None for other sources."""
        gate = asyncio.Semaphore(MAX_FETCHES)

        async def content(number: int, source: Source) -> bytes | None:
            if not isinstance(source, WebUrl):
                return None
            try:
                async with gate:
                    return await fetch(source.url, self.limits)
            except InvalidMedia as refusal:
                which = f"image or video {number} of {len(sources)}"
                raise InvalidMedia(f"{which} cannot be fetched: {refusal}") from None

        try:
            async with asyncio.timeout(self.limits.fetch_total_s):
                return await _all(asyncio.create_task(content(*one)) for one in enumerate(sources, 1))
        except TimeoutError:
            limit = self.limits.fetch_total_s
            raise InvalidMedia(f"the images could not be fetched within {limit:g} s") from None

    def _read(self, kind: Literal["image", "video"], source: Source, fetched: bytes | None) -> _Content:
        """Read one item on a worker thread. Only a data URL's media type is compared with the content."""
        declared = source.media_type if isinstance(source, DataUrl) else ""
        if fetched is None:
            assert isinstance(source, (DataUrl, FileUrl))
            fetched = read_inline(source, self.limits)
        if kind == "image":
            return _Content(kind, fetched, declared)
        if self._videos is None:
            return _Content(kind, fetched, declared, self.decoder.count_frames(fetched, declared))
        header = self.decoder.read_header(fetched, declared)
        sample = self._videos.sample(header, self.limits.max_video_frames)
        return _Content(kind, fetched, declared, video=(header, sample))

    def _decode(self, content: _Content) -> list[T]:
        if content.video is not None and self._videos is not None:
            video = self.decoder.decode_video(content.data, content.declared, *content.video)
            return [self._videos.read(video)]
        if content.kind == "video":
            frames = self.decoder.decode_frames(content.data, content.declared)
        else:
            frames = [self.decoder.decode_image(content.data, content.declared)]
        return [self._use(frame) for frame in frames]


async def _all(started: Iterable[asyncio.Future[R]]) -> list[R]:
    """Return all results, or raise the first failure after every task has ended."""
    tasks = list(started)
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
