"""`outrider bench`: measures the speed with drafts and without. Owns the output and the files."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from outrider.cli.bench_options import add_options
from outrider.config import InvalidConfig

if TYPE_CHECKING:
    from outrider.bench.rounds import Benchmark
    from outrider.bench.settings import BenchSettings
    from outrider.bench.target import Target

Commands = argparse._SubParsersAction  # of argparse.ArgumentParser

DESCRIPTION = """Measures how fast a model answers without draft tokens and with them, in alternating rounds.
The model runs in this process, in a server that this command starts (--http), or in running servers of any
make (--url). An answer ends where the model ends it, or after --max-tokens."""
LOADING_OPTIONS = (
    "drafter",
    "head",
    "draft_model",
    "draft_vocabulary",
    "dtype",
    "kv_bits",
)  # of a model that this command loads
INTERRUPTED = 130  # exit status, as shells have it for SIGINT


def add_bench(commands: Commands[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure the speed with drafts and without, or compare servers",
        description=DESCRIPTION,
        allow_abbrev=False,
    )
    add_options(bench)
    bench.set_defaults(run=run_bench)


def run_bench(args: argparse.Namespace) -> int:
    from outrider.bench.errors import BenchFailed

    settings = _settings(args)
    _check_options(args)
    _check_files(args)
    # SIGTERM ends the benchmark as Ctrl-C does, so that a server that it started does not keep running.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        with _targets(args, settings) as (loop, targets):
            return _measure(args, settings, loop, targets)
    except BenchFailed as error:
        print(f"outrider: {error}", file=sys.stderr)
        return 2


def _settings(args: argparse.Namespace) -> BenchSettings:
    from outrider.bench.settings import PRESETS, BenchSettings

    preset = "quick" if args.quick else "full" if args.full else ""
    amounts = ("streams", "temperatures", "rounds", "repeats", "requests", "max_tokens", "prompt_tokens")
    names = ("workloads", *amounts, "depths", "seed")
    given: dict[str, Any] = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.timeout is not None:
        given["timeout_s"] = args.timeout
    lists = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return BenchSettings(**(PRESETS.get(preset, {}) | lists))


def _check_options(args: argparse.Namespace) -> None:
    """Some options are for a model that is loaded here, others for running servers."""
    given = [_flag(name) for name in LOADING_OPTIONS if getattr(args, name) is not None]
    if args.url and given:
        raise InvalidConfig(f"{given[0]} is for a model loaded here; a server of --url has its own")
    if args.url and args.http:
        raise InvalidConfig("--http starts a server and --url takes a running one: give one of them")
    if args.api_key and not args.url:
        raise InvalidConfig("--api-key is for a running server: give its address with --url")
    if args.pid and len(args.pid) != len(args.url):
        raise InvalidConfig(
            f"{len(args.pid)} --pid for {len(args.url)} --url: give one for each, in the same order"
        )


def _check_files(args: argparse.Namespace) -> None:
    """Raises InvalidConfig before the measurement, which may take hours."""
    from outrider.bench.plot import check_plot_file

    if args.plot is not None:
        check_plot_file(args.plot)
    for flag, file in (("--json", args.json), ("--plot", args.plot)):
        if file is not None and (file.is_dir() or not os.access(file.absolute().parent, os.W_OK)):
            raise InvalidConfig(f"{flag} {file}: this file cannot be written")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@contextlib.contextmanager
def _targets(
    args: argparse.Namespace, settings: BenchSettings
) -> Iterator[tuple[asyncio.Runner, list[Target]]]:
    with asyncio.Runner() as loop:
        if args.url:
            yield loop, loop.run(_servers(args, settings))
        elif args.http:
            with _child_server(args, settings, loop) as target:
                yield loop, [target]
        else:
            with _engine(args, settings) as target:
                yield loop, [target]


async def _servers(args: argparse.Namespace, settings: BenchSettings) -> list[Target]:
    from outrider.bench.http_target import connect
    from outrider.server_address import ServerAddress

    key = args.api_key or os.environ.get("OUTRIDER_API_KEY")
    targets: list[Target] = []
    for given, pid in zip(args.url, args.pid or [None] * len(args.url), strict=True):
        name, url = _split_name(given)
        address = ServerAddress.parse(url, key)
        targets.append(await connect(name, address, args.model, settings.timeout_s, pid))
    names = [target.name for target in targets]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InvalidConfig(f"two servers have the name {twice[0]!r}: give them names, --url NAME=URL")
    return targets


def _split_name(given: str) -> tuple[str | None, str]:
    """NAME=URL or URL, which may have an equals sign itself."""
    name, equals, url = given.partition("=")
    return (name, url) if equals and name and "/" not in name and ":" not in name else (None, given)


@contextlib.contextmanager
def _child_server(
    args: argparse.Namespace, settings: BenchSettings, loop: asyncio.Runner
) -> Iterator[Target]:
    from outrider.bench.child_server import child_server
    from outrider.bench.http_target import connect
    from outrider.bench.memory import resident_bytes
    from outrider.server_address import ServerAddress

    flags = ["--max-rows", str(max(settings.streams))]
    for name in LOADING_OPTIONS:
        if getattr(args, name) is not None:
            flags += [_flag(name), str(getattr(args, name))]
    with child_server(args.model, flags) as server:
        key = os.environ.get("OUTRIDER_API_KEY")
        pid = server.pid if resident_bytes(server.pid) else None
        address = ServerAddress.parse(server.url, key)
        yield loop.run(connect("outrider", address, None, settings.timeout_s, pid))


@contextlib.contextmanager
def _engine(args: argparse.Namespace, settings: BenchSettings) -> Iterator[Target]:
    from outrider.bench.in_process import EngineTarget
    from outrider.cli.process_settings import collect_garbage_less_often
    from outrider.llm import LLM

    with LLM(
        args.model,
        drafter=args.drafter or "auto",
        dtype=args.dtype or "auto",
        head=args.head,
        draft_model=args.draft_model,
        draft_vocabulary=args.draft_vocabulary,
        max_rows=max(settings.streams),
        kv_bits=args.kv_bits,
        generation_config="none",
    ) as llm:
        collect_garbage_less_often()  # as in a server
        yield EngineTarget(llm)


def _measure(
    args: argparse.Namespace, settings: BenchSettings, loop: asyncio.Runner, targets: list[Target]
) -> int:
    from outrider.bench.report import report
    from outrider.bench.rounds import Benchmark
    from outrider.bench.target import variants_of
    from outrider.progress import ProgressBar
    from outrider.terminal import console_for

    variants = variants_of(targets, settings.depths)
    baselines = _baselines(args.baseline, [variant.name for variant in variants])
    print(_opening(targets, [variant.name for variant in variants]), flush=True)
    bar = ProgressBar()
    benchmark = Benchmark(variants, settings, bar)
    is_complete = False
    try:
        loop.run(benchmark.run())
        is_complete = True
    except KeyboardInterrupt:
        pass
    finally:
        bar.close()
    print()
    console_for(sys.stdout).print(report(benchmark, baselines, is_complete))
    _write_files(args, benchmark, baselines, is_complete)
    if not is_complete:
        return INTERRUPTED
    return int(any(one.has_failed for result in benchmark.results for one in result.rounds))


def _baselines(given: list[str], variants: list[str]) -> list[str]:
    for name in given:
        if name not in variants:
            raise InvalidConfig(f"--baseline {name!r} is not one of the variants: {', '.join(variants)}")
    return given or variants[:1]


def _opening(targets: list[Target], variants: list[str]) -> str:
    from outrider.terminal import printable

    lines = []
    for target in targets:
        facts = target.facts()
        where = f" at {facts['url']}" if "url" in facts else ""
        runs = f", {facts['dtype']} on {facts['device']}" if "device" in facts else ""
        cells = f", keys and values in {facts['kv_bits']} bits" if facts.get("kv_bits") else ""
        drafter = f", drafter: {facts['drafter']}" if "drafter" in facts else ""
        lines.append(f"{target.name}: {facts['model']}{where}{runs}{cells}{drafter}")
        if facts.get("drafter") == "none":
            lines.append("  There is no drafter: only tokens that a grammar forces are drafted.")
    return printable("\n".join([*lines, f"variants, in turns: {', '.join(variants)}"]))


def _write_files(
    args: argparse.Namespace, benchmark: Benchmark, baselines: list[str], is_complete: bool
) -> None:
    from outrider.bench.environment import environment
    from outrider.bench.plot import write_plot
    from outrider.bench.record import record, write_record

    if args.json is not None:
        write_record(args.json, record(benchmark, baselines, environment(), is_complete))
        print(f"Wrote {args.json}")
    if args.plot is not None:
        write_plot(args.plot, benchmark.results, [one.name for one in benchmark.variants], baselines)
        print(f"Wrote {args.plot}")
