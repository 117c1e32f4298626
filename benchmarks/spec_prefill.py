"""Skipped prompt tokens (spec_prefill): time to first token, and needles found in long prompts.

    python -m benchmarks.spec_prefill [--model M] [--scorer self] [--layers N] [--lengths 1000 2000 4000 6000]
                                      [--keeps 0.5 0.3 0.2] [--trials 10] [--failures]

A needle is one sentence with a number, somewhere in a report of about so many tokens; the question asks for
the number. Each trial is another report, number and place. It is answered with the whole prompt and with each
share of it, in turns. Columns: right answers, trials whose needle was read at all, seconds to the first
token, and their ratio to those of the whole prompt. With --failures every wrong answer is printed.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from outrider import LLM, SamplingParams
from outrider.bench.prompts.reports import report
from outrider.engine import scheduler
from outrider.request import SpecPrefill

CITIES = ("Lisbon", "Oslo", "Quito", "Dakar", "Perth", "Turin", "Kyoto", "Riga")
WHOLE = 1.0  # the share of the exact answer, without spec_prefill
ANSWER_TOKENS = 16


@dataclass(frozen=True)
class Trial:
    prompt_ids: Sequence[int]
    needle: range  # the places of its tokens
    depth: float  # of the needle in the report, from 0 to 1
    number: str


@dataclass(frozen=True)
class Found:
    trial: Trial
    text: str
    ttft_s: float
    num_skipped: int
    needle_was_read: bool

    @property
    def is_right(self) -> bool:
        return self.trial.number in self.text


def new_trial(llm: LLM, seed: int, num_tokens: int) -> Trial:
    rng = random.Random(seed)
    city, number = rng.choice(CITIES), str(rng.randrange(10_000, 100_000))
    paragraphs = report(seed, num_tokens).split("\n\n")
    place = rng.randrange(len(paragraphs) + 1)
    needle = f"The secret number of {city} is {number}."
    before, after = "\n\n".join(paragraphs[:place]), "\n\n".join(paragraphs[place:])
    question = f"What is the secret number of {city}? Answer with the number only."
    content = f"{before}\n\n{needle}\n\n{after}\n\n{question}"
    messages = [{"role": "user", "content": content}]
    text = llm.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = [llm.tokenizer.encode(part, add_special_tokens=False) for part in _around(text, needle)]
    start, end = len(ids[0]), len(ids[0]) + len(ids[1])
    return Trial([i for part in ids for i in part], range(start, end), place / len(paragraphs), number)


def _around(text: str, needle: str) -> tuple[str, str, str]:
    before, _, after = text.partition(needle)
    return before, needle, after


@contextmanager
def noted_positions() -> Iterator[list[set[int]]]:
    """The positions that are kept, of each prompt that is scored while the context is open."""
    noted: list[set[int]] = []
    choose = scheduler.kept_positions

    def note(scores: np.ndarray, keep: float) -> list[int]:
        kept = choose(scores, keep)
        noted.append(set(kept))
        return kept

    scheduler.kept_positions = note
    try:
        yield noted
    finally:
        scheduler.kept_positions = choose


def ask(llm: LLM, trial: Trial, keep: float) -> Found:
    params = SamplingParams(
        max_tokens=ANSWER_TOKENS, temperature=0, spec_prefill=None if keep == WHOLE else SpecPrefill(keep)
    )
    with noted_positions() as noted:
        (answer,) = llm.generate([trial.prompt_ids], params)
    stats = answer.stats
    assert stats.ttft_s is not None
    was_read = set(trial.needle) <= noted[0] if noted else True
    return Found(trial, answer.text.strip(), stats.ttft_s, stats.num_skipped, was_read)


def main() -> None:
    args = _arguments()
    keeps = [WHOLE, *args.keeps]
    with LLM(
        args.model,
        prefix_cache_bytes=0,
        spec_prefill_model=args.scorer,
        spec_prefill_layers=args.layers,
    ) as llm:
        print(
            f"{'tokens':>7} {'keep':>5} {'right':>7} {'needle read':>12} {'first token':>12} {'/ whole':>8}"
        )
        for length in args.lengths:
            found: dict[float, list[Found]] = {keep: [] for keep in keeps}
            for number in range(args.trials):
                trial = new_trial(llm, 1000 * args.seed + number, length)
                for keep in keeps[number % len(keeps) :] + keeps[: number % len(keeps)]:
                    found[keep].append(ask(llm, trial, keep))
            for keep in keeps:
                print(_line(keep, found[keep], found[WHOLE]), flush=True)
            if args.failures:
                _print_failures(found)


def _line(keep: float, found: Sequence[Found], whole: Sequence[Found]) -> str:
    tokens = statistics.median(len(one.trial.prompt_ids) for one in found)
    right, was_read = sum(one.is_right for one in found), sum(one.needle_was_read for one in found)
    seconds = statistics.median(one.ttft_s for one in found)
    ratio = statistics.median(one.ttft_s / other.ttft_s for one, other in zip(found, whole, strict=True))
    counts = f"{right:>4}/{len(found):<2} {was_read:>9}/{len(found):<2}"
    return f"{tokens:>7.0f} {keep:>5.2f} {counts} {seconds:>10.2f} s {ratio:>8.2f}"


def _print_failures(found: dict[float, list[Found]]) -> None:
    for keep, each in found.items():
        for one in each:
            if not one.is_right:
                read = "read" if one.needle_was_read else "skipped"
                place = f"{one.trial.depth:.0%} deep"
                print(f"    keep {keep:.2f}: {one.trial.number}, {place}, needle {read}: {one.text!r}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="model folder or Hugging Face id (default: the default model)")
    parser.add_argument("--scorer", default="self", help="scoring model, or self (self)")
    parser.add_argument("--layers", type=int, help="layers of it that score (half of them)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 2000, 4000, 6000])
    parser.add_argument("--keeps", type=float, nargs="+", default=[0.5, 0.3, 0.2])
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--failures", action="store_true", help="print every wrong answer")
    return parser.parse_args()


if __name__ == "__main__":
    main()
