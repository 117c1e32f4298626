"""A chat beside a long prompt that is being read: its pace, its longest pause, and when its answer begins.

    python -m benchmarks.beside_prompt [--model M] [--prompt-tokens 7400] [--tokens 60] [--rounds 3] \
        [-- options of outrider serve]

Over HTTP, as users see it. In every round a chat is answered alone, then another one while a prompt that is
not cached is read. The pace counts the tokens after the first. Median (lowest-highest) of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from dataclasses import dataclass

import httpx

from benchmarks.side_by_side import spread
from outrider.bench.child_server import child_server
from outrider.bench.prompts import chat, reports

HEAD_START_S = 0.5  # the chat begins so long after the long prompt


@dataclass(frozen=True)
class Answer:
    first_s: float  # until the first token
    tokens_per_s: float  # after the first chunk
    longest_pause_s: float


async def ask(client: httpx.AsyncClient, text: str, max_tokens: int) -> Answer:
    body = {
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "return_token_origins": True,
    }
    began = time.perf_counter()
    times, counts = [], []
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            sys.exit((await response.aread()).decode())
        async for line in response.aiter_lines():
            if line.startswith("data: {") and (num := _num_tokens(json.loads(line[6:]))):
                times.append(time.perf_counter())
                counts.append(num)
    pauses = [after - before for before, after in itertools.pairwise(times)]
    pace = sum(counts[1:]) / (times[-1] - times[0]) if len(times) > 1 else float("nan")
    return Answer(times[0] - began, pace, max(pauses, default=0.0))


def _num_tokens(chunk: dict[str, object]) -> int:
    choices = chunk.get("choices") or []
    assert isinstance(choices, list)
    return sum(len(choice.get("token_origins") or ()) for choice in choices)


async def measure(url: str, args: argparse.Namespace) -> None:
    alone: list[Answer] = []
    beside: list[Answer] = []
    prompt_s: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as client:
        await ask(client, chat.PROMPTS[-1], args.tokens)  # the first answer is slower
        for number in range(args.rounds):
            text = f"Report no. {number + 1000}\n\n{reports.report(number, args.prompt_tokens)}"
            alone.append(await ask(client, chat.PROMPTS[2 * number], args.tokens))
            reading = asyncio.create_task(ask(client, text, 1))
            await asyncio.sleep(HEAD_START_S)
            own = await ask(client, chat.PROMPTS[2 * number + 1], args.tokens)
            if reading.done():
                sys.exit("the prompt was read before the chat ended: give --prompt-tokens a larger number")
            beside.append(own)
            prompt_s.append((await reading).first_s)
    print("| | alone | beside the prompt |\n|---|---|---|")
    rows = {
        "first token, s": lambda answer: answer.first_s,
        "tokens/s after it": lambda answer: answer.tokens_per_s,
        "longest pause, ms": lambda answer: 1e3 * answer.longest_pause_s,
    }
    for name, value in rows.items():
        print(f"| {name} | {spread([value(a) for a in alone])} | {spread([value(b) for b in beside])} |")
    ratios = [b.tokens_per_s / a.tokens_per_s for a, b in zip(alone, beside, strict=True)]
    print(f"| pace, beside / alone | | {spread(ratios)} |")
    print(f"| the prompt's first token, s | | {spread(prompt_s)} |")


def main() -> None:
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="(default: the default model)")
    parser.add_argument("--prompt-tokens", type=int, default=7400)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(words[:split])
    with child_server(args.model, words[split + 1 :]) as server:
        asyncio.run(measure(server.url, args))


if __name__ == "__main__":
    main()
