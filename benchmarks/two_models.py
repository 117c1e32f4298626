"""How two busy models share the device: the share of each, the speed of both, and what turns cost one alone.

    python -m benchmarks.two_models [--models A B] [--rows 4 4] [--seconds 5] [--rounds 3]

Each model has its own engine, and all rows of both decode for the whole time. Without models, two tiny random
ones of different size. Share: seconds of the model's turns over those of both, median (lowest-highest). The
last table compares the first model in a server of several models, where it takes turns and is alone, with the
same model in a server of one; the two take turns, round by round.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import mlx.core as mx

from benchmarks.side_by_side import spread
from outrider.build import ModelChoice, build_engine
from outrider.config import EngineConfig
from outrider.engine.device_turns import DeviceTurns, EngineTurns
from outrider.engine.engine import Engine
from outrider.engine_place import EnginePlace
from outrider.request import SamplingParams


class Busy:
    """An engine whose rows decode all the time."""

    def __init__(self, model: Path, rows: int, turns: EngineTurns | None) -> None:
        config = EngineConfig(
            max_rows=rows, drafter="none", memory_budget_bytes=1 << 30, prefix_cache_bytes=0
        )
        self.engine, _ = build_engine(ModelChoice(model), config, place=EnginePlace(turns))
        self.num_rows = rows
        self.turns = turns

    @contextmanager
    def decoding(self) -> Iterator[list[int]]:
        """Yields a list of one number: the tokens so far."""
        num_tokens, is_over = [0], threading.Event()
        threads = [
            threading.Thread(target=_keep_busy, args=(self.engine, i, num_tokens, is_over))
            for i in range(self.num_rows)
        ]
        for thread in threads:
            thread.start()
        try:
            yield num_tokens
        finally:
            is_over.set()
            for thread in threads:
                thread.join()


def _keep_busy(engine: Engine, seed: int, num_tokens: list[int], is_over: threading.Event) -> None:
    params = SamplingParams(max_tokens=256, ignore_eos=True, seed=seed)
    while not is_over.is_set():
        outbox = engine.submit(validated := engine.validate([3 + seed, 4, 5], params))
        while True:
            delta = outbox.take(0.2)
            if delta is not None:
                num_tokens[0] += len(delta.token_ids)
                if delta.finish_reason is not None:
                    break
            if is_over.is_set():
                engine.cancel(validated.id, outbox)


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        models = args.models or _tiny_models(Path(folder))
        device = DeviceTurns()
        busy = [Busy(Path(m), rows, device.join()) for m, rows in zip(models, args.rows, strict=True)]
        print(f"{' and '.join(Path(m).name for m in models)}, {args.rows} rows, {args.seconds} s a round\n")
        alone = [[_alone(one, args.seconds) for _ in range(args.rounds)] for one in busy]
        together = [_together(busy, args.seconds) for _ in range(args.rounds)]
        print("| model | rows | share of the time | tokens/s beside the other | alone |")
        print("|---|---|---|---|---|")
        for i, model in enumerate(models):
            shares = [shares[i] for shares, _ in together]
            speeds = [speeds[i] for _, speeds in together]
            print(
                f"| {Path(model).name} | {args.rows[i]} | {spread(shares)} | {median(speeds):.0f} "
                f"| {median(alone[i]):.0f} |"
            )
        single = Busy(Path(models[0]), args.rows[0], None)
        _compare_with_one_model(busy[0], single, args)
        for one in (*busy, single):
            one.engine.close()


def _compare_with_one_model(one_of_two: Busy, single: Busy, args: argparse.Namespace) -> None:
    found = []
    for i in range(args.rounds):
        order = (one_of_two, single) if i % 2 == 0 else (single, one_of_two)
        speeds = {id(one): _alone(one, args.seconds) for one in order}
        found.append(speeds[id(one_of_two)] / speeds[id(single)])
    print("\n| | tokens/s, ratio |\n|---|---|")
    print(f"| one model that takes turns and is alone / one model without turns | {spread(found)} |")
    print(f"\na turn of a model that is alone: {_turn_us():.2f} us")


def _alone(one: Busy, seconds: float) -> float:
    with one.decoding() as num_tokens:
        time.sleep(0.5)
        before, began_s = num_tokens[0], time.perf_counter()
        time.sleep(seconds)
        return (num_tokens[0] - before) / (time.perf_counter() - began_s)


def _together(busy: list[Busy], seconds: float) -> tuple[list[float], list[float]]:
    with busy[0].decoding() as first, busy[1].decoding() as second:
        time.sleep(0.5)
        tokens, used = (first[0], second[0]), [_used_s(one) for one in busy]
        time.sleep(seconds)
        gained = [first[0] - tokens[0], second[0] - tokens[1]]
        times = [_used_s(one) - before for one, before in zip(busy, used, strict=True)]
    return [one / sum(times) for one in times], [one / seconds for one in gained]


def _used_s(one: Busy) -> float:
    assert one.turns is not None
    return one.turns.used_s


def _turn_us() -> float:
    """Microseconds of a turn that nobody else waits for."""
    turns, number = DeviceTurns().join(), 100_000
    began_s = time.perf_counter()
    for _ in range(number):
        turns.take()
        turns.give_back()
    return (time.perf_counter() - began_s) / number * 1e6


def _tiny_models(folder: Path) -> list[Path]:
    """Two random models of about 10 and 40 million parameters, on the CPU."""
    from tests.tiny_models import write_checkpoint

    mx.random.seed(0)
    sizes = {"small": (256, 6), "large": (512, 12)}
    for name, (hidden, layers) in sizes.items():
        changes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers}
        write_checkpoint(folder / name, "llama", **changes, max_position_embeddings=4096)
    return [folder / name for name in sizes]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs=2, metavar=("A", "B"))
    parser.add_argument("--rows", type=int, nargs=2, default=[4, 4])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
