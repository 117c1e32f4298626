"""Loads all images of a request: fetches, decodes and preprocesses them.

Downloads are async. Base64, files, decoding (in child processes) and preprocessing run on two threads: the
event loop never decodes an image, and all requests together never decode more than two images at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from outrider.media.decoder import MediaDecoder
from outrider.media.fetching import fetch
from outrider.media.images import DecodedImage
from outrider.media.limits import InvalidMedia, MediaLimits
from outrider.media.sources import DataUrl, FileUrl, Source, WebUrl, parse_source, read_inline

NUM_THREADS = 2  # chosen by hand
MAX_FETCHES = 4  # concurrent downloads of one request; chosen by hand

T = TypeVar("T")
R = TypeVar("R")


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
    num_images: int  # at most


class MediaLoader(Generic[T]):
    """`use` preprocesses each decoded image. Only the result of `use` is stored."""

    def __init__(self, limits: MediaLimits, use: Callable[[DecodedImage], T]) -> None:
        self.limits = limits
        self._use = use
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="outrider-media")
        self.decoder = MediaDecoder(limits, num_processes=NUM_THREADS)

    async def load(self, items: Sequence[MediaItem]) -> list[list[T]]:
        """Return for each item its images: one image, or the frames of a video. One refusal refuses all."""
        self._check_count(len(items))
        sources = [parse_source(item.source) for item in items]
        fetched = await self._fetch_all(sources)
        loop = asyncio.get_running_loop()
        contents = await _all(
            loop.run_in_executor(self._threads, self._read, item.kind, source, data)
            for item, source, data in zip(items, sources, fetched, strict=True)
        )
        self._check_count(sum(content.num_images for content in contents))  # before anything is decoded
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
        num_images = self.decoder.count_frames(fetched, declared) if kind == "video" else 1
        return _Content(kind, fetched, declared, num_images)

    def _decode(self, content: _Content) -> list[T]:
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
