"""The event loop of `outrider chat` ends without a word about what was still open."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator

import pytest

from outrider.cli.chat_backends import EventLoopThread


async def _nested(depth: int) -> AsyncGenerator[str, None]:
    """As an HTTP client's streams are: each reads from another, and needs some time to close."""
    inner = _nested(depth - 1) if depth else None
    try:
        if inner is None:
            yield "first"
            yield "second"
        else:
            async for item in inner:
                yield item
    finally:
        await asyncio.sleep(0.001)


async def _first_only() -> AsyncGenerator[str, None]:
    async for item in _nested(8):
        yield item
        return


def test_generators_that_were_left_open_are_closed_one_after_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = EventLoopThread()
    assert list(loop.iterate(_first_only())) == ["first"]
    loop.close()
    gc.collect()
    assert not caplog.records  # asyncio logs tasks that never ended


def test_an_answer_that_is_stopped_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    loop = EventLoopThread()
    answer = loop.iterate(_nested(8))
    assert next(answer) == "first"
    answer.close()
    loop.close()
    gc.collect()
    assert not caplog.records
