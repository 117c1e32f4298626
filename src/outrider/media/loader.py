"""All pictures of a request, from what the client named to what `use` makes of them.

Fetching is async; base64, files, decoding and `use` run on two worker threads, so that the event loop never
decodes a picture and many requests together never decode more than two at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from outrider.media.fetching import fetch
from outrider.media.images import DecodedImage, decode_frames, decode_image
from outrider.media.limits import InvalidMedia, MediaLimits
from outrider.media.sources import DataUrl, FileUrl, Source, WebUrl, parse_source, read_inline

NUM_THREADS = 2
MAX_FETCHES = 4  # of one request at a time

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class MediaItem:
    """What a client named."""

    kind: Literal["image", "video"]
    source: str


class MediaLoader(Generic[T]):
    """`use` turns each picture into what the model needs of it; the picture itself is then let go of."""

    def __init__(self, limits: MediaLimits, use: Callable[[DecodedImage], T]) -> None:
        self.limits = limits
        self._use = use
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="outrider-media")

    async def load(self, wanted: Sequence[MediaItem]) -> list[list[T]]:
        """For each, its pictures: one, or a video's frames. The first that is refused ends them all."""
        self._check_count(len(wanted))
        sources = [parse_source(one.source) for one in wanted]
        fetched = await self._fetch_all(sources)
        loop = asyncio.get_running_loop()
        loaded = await _all(
            loop.run_in_executor(self._threads, self._read, one.kind, source, data)
            for one, source, data in zip(wanted, sources, fetched, strict=True)
        )
        self._check_count(sum(map(len, loaded)))
        return loaded

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _check_count(self, count: int) -> None:
        if count > self.limits.max_images:
            raise InvalidMedia(
                f"the request has {count} pictures, frames of videos included; the most is "
                f"{self.limits.max_images}"
            )

    async def _fetch_all(self, sources: Sequence[Source]) -> list[bytes | None]:
        """The content of those that lie elsewhere."""
        gate = asyncio.Semaphore(MAX_FETCHES)

        async def content(source: Source) -> bytes | None:
            if not isinstance(source, WebUrl):
                return None
            async with gate:
                return await fetch(source.url, self.limits)

        try:
            async with asyncio.timeout(self.limits.fetch_total_s):
                return await _all(asyncio.create_task(content(source)) for source in sources)
        except TimeoutError:
            limit = self.limits.fetch_total_s
            raise InvalidMedia(f"the pictures could not be fetched within {limit:g} s") from None

    def _read(self, kind: str, source: Source, fetched: bytes | None) -> list[T]:
        """On a worker thread. A server's content type is hearsay; a data URL's is the client's own word."""
        declared = source.media_type if isinstance(source, DataUrl) else ""
        if fetched is None:
            assert isinstance(source, (DataUrl, FileUrl))
            fetched = read_inline(source, self.limits)
        if kind == "video":
            return [self._use(frame) for frame in decode_frames(fetched, declared, self.limits)]
        return [self._use(decode_image(fetched, declared, self.limits))]


async def _all(started: Iterable[asyncio.Future[R]]) -> list[R]:
    """All results, or the first failure, with nothing left running."""
    tasks = list(started)
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
