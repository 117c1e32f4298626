"""`outrider chat`: a conversation in the terminal, with the speed and the accepted drafts of every answer."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from outrider.engine.sequence import Stats
from outrider.llm import LLM
from outrider.request import SamplingParams

HELP = "Type a message. /reset starts over, /quit (or Ctrl-D) leaves, Ctrl-C stops an answer."


def run_chat(args: argparse.Namespace) -> int:
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
        draft_depth=args.draft_depth,
    )
    with LLM(args.model, drafter=args.drafter, head=args.head) as llm:
        _greet(llm)
        return _converse(llm, args.system, params)


def _greet(llm: LLM) -> None:
    facts = llm.engine.facts
    drafts = {"mtp": f"MTP head {facts.head}", "ngram": "n-gram lookup", "none": "no drafts"}[facts.drafter]
    print(f"{facts.name}: {facts.dtype} on {facts.device}, {drafts}, context {facts.max_context}.\n{HELP}")


def _converse(llm: LLM, system: str | None, params: SamplingParams) -> int:
    opening = [{"role": "system", "content": system}] if system else []
    messages: list[dict[str, Any]] = list(opening)
    while (line := _read_line()) is not None:
        if line == "/quit":
            break
        if line == "/reset":
            messages = list(opening)
        elif line:
            messages.append({"role": "user", "content": line})
            messages.append({"role": "assistant", "content": _answer(llm, messages, params)})
    return 0


def _read_line() -> str | None:
    try:
        return input("\n> ").strip()
    except EOFError:
        print()
        return None


def _answer(llm: LLM, messages: list[dict[str, Any]], params: SamplingParams) -> str:
    pieces: list[str] = []
    started = time.perf_counter()
    try:
        for delta in llm.stream_chat(messages, params):
            pieces.append(delta.text)
            sys.stdout.write(delta.text)
            sys.stdout.flush()
            if delta.stats is not None:
                print(f"\n\033[2m{_summary(delta.stats, time.perf_counter() - started)}\033[0m")
    except KeyboardInterrupt:
        print("\n(stopped)")
    return "".join(pieces)


def _summary(stats: Stats, seconds: float) -> str:
    rate = stats.num_generated / seconds if seconds else 0.0
    parts = [f"{stats.num_generated} tokens, {rate:.1f} tokens/s"]
    if stats.ttft_s is not None:
        parts.append(f"first after {stats.ttft_s * 1000:.0f} ms")
    if stats.drafted:
        accepted = ", ".join(f"{a}/{d}" for a, d in zip(stats.accepted, stats.drafted, strict=True))
        parts.append(f"accepted {accepted} by position, {stats.stride:.2f} tokens a step")
    return "; ".join(parts)
