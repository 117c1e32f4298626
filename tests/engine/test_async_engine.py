"""The engine from an event loop: streams, aborts, and a loop that never waits for a forward pass."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from outrider import LLM, InvalidRequest, SamplingParams
from outrider.engine.async_engine import AsyncEngine
from patience import goes_on_while_held, held_steps, until
from tiny_models import write_checkpoint

LONG = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, "llama")
    with LLM(folder, drafter="ngram", max_rows=4) as llm:
        yield llm


async def _tokens(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> list[int]:
    return [i async for delta in await engine.start(prompt, params) for i in delta.token_ids]


def test_concurrent_streams_equal_their_solo_answers(llm: LLM) -> None:
    prompts = [[3 + i] * (5 + 3 * i) for i in range(7)]
    expected = [llm.generate([p], SHORT)[0].token_ids for p in prompts]

    async def together() -> list[list[int]]:
        return await asyncio.gather(*(_tokens(llm.async_engine, p, SHORT) for p in prompts))

    assert asyncio.run(together()) == expected


def test_abort_ends_the_stream_and_frees_the_row(llm: LLM) -> None:
    async def run() -> int:
        stream = await llm.async_engine.start([5, 6, 7], LONG)
        seen = 0
        async for delta in stream:
            seen += len(delta.token_ids)
            if seen >= 3:
                stream.abort()
                hurdle.open()
        return seen

    with held_steps(llm.engine, num_free=10) as hurdle:
        assert 3 <= asyncio.run(run()) < 300
    llm.generate([[5]], SHORT)
    assert not llm.engine._loop.live


def test_cancelling_the_reading_task_aborts_the_request(llm: LLM) -> None:
    async def run() -> None:
        task = asyncio.create_task(_tokens(llm.async_engine, [5, 6, 7], LONG))
        await until(hurdle.reached.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with held_steps(llm.engine, num_free=3) as hurdle:
        asyncio.run(run())
    llm.generate([[5]], SHORT)
    assert not llm.engine._loop.live


def test_bad_request_is_refused_at_once(llm: LLM) -> None:
    async def run() -> None:
        with pytest.raises(InvalidRequest, match="empty"):
            await llm.async_engine.start([], SHORT)

    asyncio.run(run())


def test_slow_reader_loses_nothing_and_stalls_no_one(llm: LLM) -> None:
    expected = llm.generate([[9, 9, 9]], LONG)[0].token_ids

    async def run() -> tuple[int, list[list[int]]]:
        slow = await llm.async_engine.start([9, 9, 9], LONG)
        others = [await _tokens(llm.async_engine, [8, 8], SHORT) for _ in range(3)]
        await until(lambda: slow.num_tokens == len(expected))  # nobody has read it; it ends all the same
        deltas = [delta async for delta in slow]
        assert deltas[-1].finish_reason == "length"
        assert [i for delta in deltas for i in delta.token_ids] == expected
        return len(deltas), others

    num_deltas, others = asyncio.run(run())
    assert num_deltas == 1  # unread deltas are merged: what waits for a reader is bounded
    assert others[1:] == others[:-1]


def test_event_loop_is_never_blocked_by_a_forward_pass(llm: LLM) -> None:
    async def run() -> list[int]:
        task = asyncio.create_task(_tokens(llm.async_engine, [4, 5], SHORT))
        await goes_on_while_held(hurdle)
        return await task

    with held_steps(llm.engine) as hurdle:  # a long forward pass
        assert len(asyncio.run(run())) == 10
