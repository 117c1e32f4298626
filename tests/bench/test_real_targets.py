"""A tiny model in this process and behind a real server. Both give the same counts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.bench.http_target import HttpTarget, connect
from outrider.bench.in_process import EngineTarget
from outrider.bench.rounds import Benchmark
from outrider.bench.settings import BenchSettings
from outrider.bench.summary import figures, same_texts
from outrider.bench.target import RequestOptions, Target, variants_of
from outrider.bench.workloads import Task
from outrider.llm import LLM
from outrider.server_address import ServerAddress
from server_process import ServerProcess, serving, write_tiny_model

SETTINGS = BenchSettings(
    workloads=("chat", "json", "mixed"),
    streams=(3,),
    temperatures=(0.8,),
    rounds=2,
    max_tokens=12,
    depths=(2,),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with serving(folder, "--max-rows", "3", "--log-level", "warning") as running:
        yield running


def check(target: Target) -> None:
    """Answers end by themselves or at their limit, drafts show where they were asked for, texts agree."""
    benchmark = Benchmark(variants_of([target], SETTINGS.depths), SETTINGS)
    asyncio.run(benchmark.run())
    for result in benchmark.results:
        off, on = (figures(result, name, ["off"]) for name in ("off", "depth 2"))
        assert off is not None
        assert on is not None
        assert (off.num_failed, on.num_failed) == (0, 0), (off.errors, on.errors)
        assert off.stride == 1.0
        assert off.acceptance == []
        assert on.acceptance
        assert on.ttft.p50_s is not None
        assert on.inter_token.p95_s is not None
        assert on.num_tokens == off.num_tokens > 0
        assert on.peak_bytes
        assert same_texts(result, "off", "depth 2") == (12, 12)
        for one in result.rounds:
            for answer in one.answers:
                assert answer.finish_reason in ("stop", "length")
                assert answer.num_tokens <= SETTINGS.max_tokens
                assert answer.num_prompt
                shares = sum(arrival.num_tokens for arrival in answer.arrivals)
                assert shares == pytest.approx(answer.num_tokens if answer.text else shares)


def test_the_engine_of_this_process(folder: Path) -> None:
    with LLM(folder, max_rows=3) as llm:
        target = EngineTarget(llm)
        assert target.facts()["drafter"] == "mtp"
        check(target)


def test_our_server(server: ServerProcess) -> None:
    target = asyncio.run(connect(None, ServerAddress.parse(server.url), None, 30.0, server.process.pid))
    assert (target.name, target.model, target.can_draft) == ("outrider", "tiny", True)
    assert target.facts()["server"].startswith("outrider-")
    check(target)


def test_both_count_tokens_and_steps_alike(folder: Path, server: ServerProcess) -> None:
    settings = BenchSettings(workloads=("chat",), streams=(2,), rounds=1, max_tokens=16, depths=(3,))

    def stride_and_tokens(target: Target) -> tuple[float | None, int]:
        benchmark = Benchmark(variants_of([target], settings.depths), settings)
        asyncio.run(benchmark.run())
        found = figures(benchmark.results[0], "depth 3", [])
        assert found is not None
        return found.stride, found.num_tokens

    with LLM(folder, max_rows=3) as llm:
        here = stride_and_tokens(EngineTarget(llm))
    there = stride_and_tokens(asyncio.run(connect(None, ServerAddress.parse(server.url), None, 30.0)))
    assert here[1] == there[1]
    assert here[0] == pytest.approx(
        there[0], rel=0.15
    )  # they differ in drafts that stood past an answer's end


def test_a_request_that_the_engine_refuses_is_a_failed_answer(folder: Path) -> None:
    with LLM(folder, drafter="none") as llm:
        answer = asyncio.run(EngineTarget(llm).ask(Task("Hi"), RequestOptions(0.0, 4, 1, 3)))
    assert "depth" in (answer.error or "")


def test_a_wrong_model_is_told_in_the_server_s_words(server: ServerProcess) -> None:
    target = asyncio.run(connect(None, ServerAddress.parse(server.url), "gpt-9", 30.0))
    assert isinstance(target, HttpTarget)
    with pytest.raises(Exception, match=r"outrider gave no answer: the server answered 404: .*gpt-9"):
        asyncio.run(Benchmark(variants_of([target], (1,)), SETTINGS).run())


GROWS = """
import sys
sys.stdin.readline()
ballast = bytearray(b"1") * (64 << 20)
print("grown", flush=True)
sys.stdin.readline()
"""


def test_memory_of_a_process_is_seen() -> None:
    from outrider.bench.memory import MemoryWatch

    with subprocess.Popen(
        [sys.executable, "-c", GROWS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        watch = MemoryWatch(process.pid)
        watch.reset()
        before = watch.peak_bytes() or 0
        print(file=process.stdin, flush=True)
        assert process.stdout.readline() == "grown\n"
        assert (watch.peak_bytes() or 0) > before + (32 << 20)
        watch.close()
        print(file=process.stdin, flush=True)


def test_prefixes_are_shared_within_a_turn_only(folder: Path) -> None:
    """A system message is computed once in a round, and again by the next variant."""
    task = Task("Hi", system="You know all about the weather. " * 20)
    with LLM(folder) as llm:
        target = EngineTarget(llm)
        asked = [RequestOptions(0.0, 4, 1, 0, turn) for turn in ("a", "a", "b")]
        answers = [asyncio.run(target.ask(task, options)) for options in asked]
    shares = [(answer.num_cached or 0) / (answer.num_prompt or 1) for answer in answers]
    assert [share > 0.5 for share in shares] == [False, True, False]
