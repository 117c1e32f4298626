"""What embeddings cost the answers beside them: the decode speed, and how long a step waits for its turn.

    python -m benchmarks.embeddings_beside [--model M] [--encoder all-minilm-l6-v2] [--rows 4] [--texts 16]
                                           [--words 40] [--seconds 5] [--rounds 3]

All rows of the chat model decode for the whole time. In every second round a client beside them sends one
request of `--texts` texts after another to the embedding model. Without --model: the default model.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks.side_by_side import spread
from benchmarks.two_models import Busy
from outrider.build_embedder import Embedder, build_embedder
from outrider.engine.device_turns import DeviceTurns, EngineTurns
from outrider.llm import default_model
from outrider.models import loader

TEXT = "the quick brown fox jumps over the lazy dog while seven wizards box in quiet harbour towns"
WORDS = TEXT.split()


class TimedTurns:
    """The seconds that an engine waited for each of its turns."""

    def __init__(self, turns: EngineTurns) -> None:
        self.waits_s: list[float] = []
        take = turns.take

        def timed(before_waiting: Callable[[], None] = lambda: None) -> bool:
            began_s = time.perf_counter()
            has_changed = take(before_waiting)
            self.waits_s.append(time.perf_counter() - began_s)
            return has_changed

        turns.take = timed  # type: ignore[method-assign]


def main() -> None:
    args = _arguments()
    device = DeviceTurns()
    own, others = device.join(), device.join()
    timed = TimedTurns(own)
    busy = Busy(Path(args.model or default_model()), args.rows, own)
    embedder = build_embedder(loader.find_folder(args.encoder), args.encoder, turn=others.held)
    texts = [" ".join(WORDS[(i + j) % len(WORDS)] for j in range(args.words)) for i in range(args.texts)]
    found: list[float] = []
    waits: dict[bool, list[float]] = {True: [], False: []}
    num_texts = 0
    for i in range(args.rounds):
        speeds = {}
        for is_beside in (False, True) if i % 2 == 0 else (True, False):
            speeds[is_beside], number = _round(busy, timed, embedder, texts, is_beside, args, waits)
            num_texts += number
        found.append(speeds[True] / speeds[False])
    print(f"{args.rows} rows, requests of {args.texts} texts of {args.words} words, {args.rounds} rounds\n")
    print("| | decode tokens/s, ratio | wait of a step, ms: median, 99 %, longest | texts/s |")
    print("|---|---|---|---|")
    rate = num_texts / (args.rounds * args.seconds)
    print(f"| alone | 1 | {_in_ms(waits[False])} | |")
    print(f"| beside embeddings | {spread(found)} | {_in_ms(waits[True])} | {rate:.0f} |")
    busy.engine.close()
    embedder.close()


def _round(
    busy: Busy,
    timed: TimedTurns,
    embedder: Embedder,
    texts: list[str],
    is_beside: bool,
    args: argparse.Namespace,
    waits: dict[bool, list[float]],
) -> tuple[float, int]:
    """Tokens a second of the chat model, and texts that were embedded."""
    with busy.decoding() as num_tokens, _embedding(embedder, texts if is_beside else []) as num_texts:
        time.sleep(0.5)
        timed.waits_s.clear()
        before, texts_before, began_s = num_tokens[0], num_texts[0], time.perf_counter()
        time.sleep(args.seconds)
        speed = (num_tokens[0] - before) / (time.perf_counter() - began_s)
        waits[is_beside] += timed.waits_s
        return speed, num_texts[0] - texts_before


@contextmanager
def _embedding(embedder: Embedder, texts: list[str]) -> Iterator[list[int]]:
    """Embeds the texts again and again. Yields a list of one number: how many are done."""
    num_texts, is_over = [0], threading.Event()

    async def work() -> None:
        while texts and not is_over.is_set():
            inputs = await embedder.service.read(texts, None, 1 << 30)
            await embedder.service.embed(inputs)
            num_texts[0] += len(texts)

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    try:
        yield num_texts
    finally:
        is_over.set()
        thread.join()


def _in_ms(waits_s: list[float]) -> str:
    ordered = sorted(waits_s)
    chosen = median(ordered), ordered[int(0.99 * (len(ordered) - 1))], ordered[-1]
    return ", ".join(f"{1000 * wait:.1f}" for wait in chosen)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.embeddings_beside")
    parser.add_argument("--model")
    parser.add_argument("--encoder", default="all-minilm-l6-v2")
    for name, default in (("rows", 4), ("texts", 16), ("words", 40), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=5.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
