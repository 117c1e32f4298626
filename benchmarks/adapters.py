"""What adapters cost: rows with adapters over plain rows, on the same weights.

    python -m benchmarks.adapters [--model M] [--rows 8] [--adapters 4] [--rank 8] [--kind lora|dora]
                                  [--tokens 48] [--rounds 8] [--process-time]

The adapters have random numbers and change all linear layers of the decoder. Every figure is a ratio of runs
that took turns: median (lowest-highest). --process-time: CPU time, for machines that others use too.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import mlx.core as mx

from benchmarks.side_by_side import DecodeRun, StepBench, ratios, spread
from outrider.llm import default_model
from outrider.models.adapters.files import AdapterFiles, read_adapter
from outrider.models.adapters.fit import LINEAR, linear_shape
from outrider.models.trunk import Trunk
from outrider.plan import AdapterInfo


def main() -> None:
    args = _arguments()
    bench = StepBench(args.model or default_model(), None, None)
    if args.process_time:
        bench.clock = time.process_time
    store = bench.loaded.trunk.adapters
    store.allow(args.adapters, 1 << 40)
    files = [_random_adapter(bench.loaded.trunk, args, seed) for seed in range(args.adapters)]

    def load() -> list[AdapterInfo]:
        return [store.load(f"adapter-{i}", own) for i, own in enumerate(files)]

    def run(*adapters: AdapterInfo | None) -> DecodeRun:
        return bench.ours([0] * args.rows, args.tokens, adapters=adapters)[0]

    def run_unloaded() -> DecodeRun:
        for name in list(store.loaded):
            store.unload(name)
        found = run()
        load()
        return found

    loaded = load()
    in_turn = [loaded[i % len(loaded)] for i in range(args.rows)]
    half = [info if i % 2 else None for i, info in enumerate(in_turn)]
    name = bench.loaded.path.name
    print(f"{name}, {args.rows} rows, {args.adapters} adapters of rank {args.rank} ({args.kind})")
    print(f"each changes {loaded[0].num_layers} layers and has {loaded[0].num_bytes / 1e6:.1f} MB\n")
    print("| | tokens/s, ratio |\n|---|---|")
    run(), run(*in_turn)
    for text, first, second in (
        ("loaded, and nobody uses one / none loaded", run, run_unloaded),
        ("all rows have the same one / plain rows", lambda: run(*[loaded[0]] * args.rows), run),
        ("every second row has one / plain rows", lambda: run(*half), run),
        ("rows have them in turn / plain rows", lambda: run(*in_turn), run),
    ):
        found = ratios(first, second, args.rounds)
        print(f"| {text} | {spread(found)} |", flush=True)
    speed = run().tokens_per_s
    print(f"\nplain rows: {speed:.0f} tokens/s, {1000 * args.rows / speed:.2f} ms a step")


def _random_adapter(trunk: Trunk, args: argparse.Namespace, seed: int) -> AdapterFiles:
    keys = iter(mx.random.split(mx.random.key(seed), 10_000))
    arrays: dict[str, mx.array] = {}
    for path, module in trunk.model.named_modules():
        if not isinstance(module, LINEAR) or not path.startswith("model."):
            continue
        num_outputs, num_inputs = linear_shape(module)
        arrays[f"{path}.lora_a"] = mx.random.normal((num_inputs, args.rank), key=next(keys)) / num_inputs**0.5
        arrays[f"{path}.lora_b"] = 0.01 * mx.random.normal((args.rank, num_outputs), key=next(keys))
        if args.kind == "dora":
            arrays[f"{path}.m"] = mx.ones(num_outputs)
    config = {"fine_tune_type": args.kind, "lora_parameters": {"rank": args.rank, "scale": 1.0}}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "adapter_config.json").write_text(json.dumps(config))
        mx.save_safetensors(str(Path(folder, "adapters.safetensors")), arrays)
        return read_adapter(folder)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.adapters")
    parser.add_argument("--model")
    for name, default in (("rows", 8), ("adapters", 4), ("rank", 8), ("tokens", 48), ("rounds", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kind", choices=("lora", "dora"), default="lora")
    parser.add_argument("--process-time", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
