"""Two servers behind HAProxy (deploy/haproxy.cfg) against one: cached prompt tokens and tokens a second.

    python -m benchmarks.replicas [MODEL] [--conversations 8] [--turns 4] [--prefix-cache-bytes 75MB]

Conversations run side by side, each turn after the one before. They have a system prompt in common and a long
first question each. The cache of one server is too small for all of them. All servers run on this machine and
share its cores: the speed shows what cached prompts save, not what a second machine would add.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
from tests.haproxy_process import PROGRAM, Proxy, proxying

from outrider.bench.child_server import child_server

WORDS = ("river", "mill", "two", "friends", "count", "boats", "write", "names", "long", "book", "old", "and")
SYSTEM_WORDS, QUESTION_WORDS, TURN_WORDS = 150, 400, 30  # system prompt, first question, later questions
ANSWER_TOKENS = 16
BY_CONVERSATION = "balance hash var(txn.key)"
WAYS = (  # name, number of servers, how HAProxy chooses one
    ("one server", 1, BY_CONVERSATION),
    ("two, by conversation", 2, BY_CONVERSATION),
    ("two, in turns", 2, "balance roundrobin"),
)


@dataclass(frozen=True)
class Usage:
    num_prompt: int
    num_cached: int
    num_answer: int


def words(number: int, seed: str) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=number))


def converse(url: str, number: int, num_turns: int) -> list[Usage]:
    """What each turn of a conversation took."""
    messages = [{"role": "system", "content": words(SYSTEM_WORDS, "system")}]
    found = []
    with httpx.Client(timeout=600) as client:
        for turn in range(num_turns):
            length = TURN_WORDS if turn else QUESTION_WORDS
            messages.append({"role": "user", "content": words(length, f"{number} {turn}")})
            body = {"messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
            response = client.post(f"{url}/v1/chat/completions", json=body)
            response.raise_for_status()
            answer, usage = response.json()["choices"][0]["message"], response.json()["usage"]
            messages.append({"role": "assistant", "content": answer["content"] or ""})
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            found.append(Usage(usage["prompt_tokens"], cached, usage["completion_tokens"]))
    return found


def run(proxy: Proxy, num_conversations: int, num_turns: int) -> tuple[list[list[Usage]], float]:
    began_s = time.perf_counter()
    with ThreadPoolExecutor(num_conversations) as pool:
        asked = [pool.submit(converse, proxy.url, i, num_turns) for i in range(num_conversations)]
        return [one.result() for one in asked], time.perf_counter() - began_s


def report(name: str, conversations: Sequence[Sequence[Usage]], seconds: float) -> None:
    later = [usage for turns in conversations for usage in turns[1:]]
    every = [usage for turns in conversations for usage in turns]
    hits = sum(usage.num_cached for usage in later) / sum(usage.num_prompt for usage in later)
    computed = sum(usage.num_prompt - usage.num_cached for usage in every)
    answered = sum(usage.num_answer for usage in every)
    print(
        f"{name:22} {hits:5.0%} of the prompt tokens of later turns were cached; {computed} prompt tokens "
        f"computed; {seconds:.1f} s; {answered / seconds:.1f} answered tokens/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--prefix-cache-bytes", default="75MB", help="of each server")
    args = parser.parse_args()
    if PROGRAM is None:
        parser.error("HAProxy is not installed (apt-get install haproxy)")
    for name, num_servers, balance in WAYS:
        with ExitStack() as stack:
            flags = ("--prefix-cache-bytes", args.prefix_cache_bytes)
            servers = [stack.enter_context(child_server(args.model, flags)) for _ in range(num_servers)]
            ports = {f"s{i}": urlsplit(server.url).port or 0 for i, server in enumerate(servers)}
            proxy = stack.enter_context(proxying(ports, **{BY_CONVERSATION: balance}))
            report(name, *run(proxy, args.conversations, args.turns))


if __name__ == "__main__":
    main()
