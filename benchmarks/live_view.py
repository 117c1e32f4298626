"""What the live view of the page costs: tokens per second of eight clients with the view open, and closed.

    python -m benchmarks.live_view                    # a reader of GET /v1/status/stream
    python -m benchmarks.live_view --browser FILE     # the page itself, in Chromium, which needs CPU time too

Rounds of open and closed take turns. Besides tokens per second, the script reports tokens per second of CPU
time that the server used: this hardly changes if other programs run on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

PROMPTS = (
    "Explain how bees make honey.",
    "Write a Python function that checks whether a word is a palindrome.",
    "Write a short story about a lighthouse.",
    "Give me three tips for learning a language.",
)
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Round:
    tokens_per_s: float
    tokens_per_cpu_s: float

    def over(self, other: Round) -> tuple[float, float]:
        return self.tokens_per_s / other.tokens_per_s, self.tokens_per_cpu_s / other.tokens_per_cpu_s


@contextlib.contextmanager
def serving() -> Iterator[tuple[str, int]]:
    """The address of a server with the default model, and the id of the process that computes."""
    command = [
        sys.executable,
        "-m",
        "outrider",
        "serve",
        "--port",
        "0",
        "--no-supervisor",
        "--log-level",
        "warning",
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert server.stdout is not None
    try:
        for line in server.stdout:
            if found := re.match(r"Ready: (\S+)", line):
                yield found.group(1), server.pid
                return
        sys.exit("the server did not start")
    finally:
        server.terminate()
        server.wait()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def load(url: str, num_clients: int, num_requests: int, max_tokens: int) -> int:
    """Streams of `num_clients` at once, each one request after the other. Returns the number of tokens."""
    limits = httpx.Limits(max_connections=num_clients)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:

        async def one(number: int) -> int:
            tokens = 0
            for i in range(num_requests):
                text = PROMPTS[(number + i) % len(PROMPTS)]
                body = {
                    "messages": [{"role": "user", "content": text}],
                    "seed": number * 100 + i,
                    "max_tokens": max_tokens,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
                async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                    async for line in response.aiter_lines():
                        if found := re.search(r'"completion_tokens":\s*(\d+)', line):
                            tokens += int(found.group(1))
            return tokens

        return sum(await asyncio.gather(*(one(number) for number in range(num_clients))))


@contextlib.asynccontextmanager
async def reader(url: str) -> AsyncIterator[None]:
    """Reads the stream of events, as the page does."""

    async def read() -> None:
        async with (
            httpx.AsyncClient(base_url=url, timeout=None) as client,
            client.stream("GET", "/v1/status/stream") as response,
        ):
            async for _ in response.aiter_raw():
                pass

    task = asyncio.create_task(read())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def page(url: str, browser: str) -> AsyncIterator[None]:
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = await playwright.chromium.launch(executable_path=browser, args=flags)
        opened = await chromium.new_page()
        await opened.goto(f"{url}/#live")
        yield
        await chromium.close()


async def measure(url: str, pid: int, args: argparse.Namespace, is_open: bool) -> Round:
    view = contextlib.nullcontext()
    if is_open:
        view = page(url, args.browser) if args.browser else reader(url)
    async with view:
        await asyncio.sleep(1)
        started_s, started_cpu_s = time.monotonic(), cpu_s(pid)
        tokens = await load(url, args.clients, args.requests, args.max_tokens)
        return Round(tokens / (time.monotonic() - started_s), tokens / (cpu_s(pid) - started_cpu_s))


def main() -> None:
    kept = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kept)
    parser.add_argument("--browser", metavar="FILE", help="Chromium, to open the page in it")
    parser.add_argument("--rounds", type=int, default=6, help="of each kind (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--requests", type=int, default=2, help="of a client, in a round (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="(default: %(default)s)")
    args = parser.parse_args()
    ratios = []
    with serving() as (url, pid):
        asyncio.run(load(url, args.clients, 1, 64))  # first steps of each kind
        for i in range(args.rounds):
            order = (True, False) if i % 2 else (False, True)
            found = {is_open: asyncio.run(measure(url, pid, args, is_open)) for is_open in order}
            for is_open in (True, False):
                one = found[is_open]
                print(f"round {i + 1}, {'open' if is_open else 'closed'}: {one.tokens_per_s:.1f} tokens/s, "
                      f"{one.tokens_per_cpu_s:.1f} per CPU second", flush=True)  # fmt: skip
            ratios.append(found[True].over(found[False]))
    for name, values in zip(("tokens/s", "tokens per CPU second"), zip(*ratios, strict=True), strict=True):
        print(f"open / closed, {name}: {statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})")


if __name__ == "__main__":
    main()
