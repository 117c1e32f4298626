"""`outrider bench`: how fast, with drafts and without. Owns what is printed and written."""

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
    from outrider.bench.rounds import Benchmark, Turn, Watcher
    from outrider.bench.settings import Settings
    from outrider.bench.target import Target
    from outrider.train.progress import Listener

Commands = argparse._SubParsersAction  # of argparse.ArgumentParser

DESCRIPTION = """Measures how fast a model answers, drafts off beside drafts on, in alternating rounds: in
this process, over HTTP with a server of its own (--http), or with running servers of any make (--url).
Answers end where the model ends them, at the latest after --max-tokens."""
INTERRUPTED = 130


def add_bench(commands: Commands[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure speed: drafts off beside drafts on, or servers beside each other",
        description=DESCRIPTION,
        allow_abbrev=False,
    )
    add_options(bench)
    bench.set_defaults(run=run_bench)


def run_bench(args: argparse.Namespace) -> int:
    from outrider.bench.errors import BenchFailed

    settings = _settings(args)
    _check_sides(args)
    _check_files(args)
    signal.signal(
        signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT)
    )  # its own server must not stay
    try:
        with _targets(args, settings) as (loop, targets):
            return _measure(args, settings, loop, targets)
    except BenchFailed as error:
        print(f"outrider: {error}", file=sys.stderr)
        return 2


def _settings(args: argparse.Namespace) -> Settings:
    from outrider.bench.settings import PRESETS, Settings

    preset = "quick" if args.quick else "full" if args.full else ""
    names = ("workloads", "streams", "temperatures", "rounds", "requests", "max_tokens", "depths", "seed")
    given: dict[str, Any] = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.timeout is not None:
        given["timeout_s"] = args.timeout
    lists = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return Settings(**(PRESETS.get(preset, {}) | lists))


def _check_sides(args: argparse.Namespace) -> None:
    """Options of a model loaded here say nothing to a running server, and the other way round."""
    loading = ("drafter", "head", "draft_vocabulary", "dtype")
    given = [f"--{name.replace('_', '-')}" for name in loading if getattr(args, name) is not None]
    if args.url and given:
        raise InvalidConfig(f"{given[0]} is for a model loaded here; a server at --url has its own")
    if args.url and args.http:
        raise InvalidConfig("--http starts a server and --url takes a running one: give one of them")
    if args.api_key and not args.url:
        raise InvalidConfig("--api-key is for a running server: name it with --url")
    if args.pid and len(args.pid) != len(args.url):
        raise InvalidConfig(
            f"{len(args.pid)} --pid for {len(args.url)} --url: give one for each, in their order"
        )


def _check_files(args: argparse.Namespace) -> None:
    """Found out before hours of measuring, not after."""
    from outrider.bench.plot import check_plot_file

    if args.plot is not None:
        check_plot_file(args.plot)
    for flag, file in (("--json", args.json), ("--plot", args.plot)):
        if file is not None and (file.is_dir() or not os.access(file.absolute().parent, os.W_OK)):
            raise InvalidConfig(f"{flag} {file}: cannot be written there")


@contextlib.contextmanager
def _targets(args: argparse.Namespace, settings: Settings) -> Iterator[tuple[asyncio.Runner, list[Target]]]:
    with asyncio.Runner() as loop:
        if args.url:
            yield loop, loop.run(_servers(args, settings))
        elif args.http:
            with _own_server(args, settings, loop) as target:
                yield loop, [target]
        else:
            with _engine(args, settings) as target:
                yield loop, [target]


async def _servers(args: argparse.Namespace, settings: Settings) -> list[Target]:
    from outrider.bench.http_target import connect
    from outrider.server_address import ServerAddress

    key = args.api_key or os.environ.get("OUTRIDER_API_KEY")
    found: list[Target] = []
    for place, given in enumerate(args.url):
        name, url = _named(given)
        pid = args.pid[place] if args.pid else None
        address = ServerAddress.parse(url, key)
        found.append(await connect(name, address, args.model, settings.timeout_s, pid))
    names = [target.name for target in found]
    if len(set(names)) < len(names):
        raise InvalidConfig(f"two servers are called {names[0]!r}: name them, --url NAME=URL")
    return found


def _named(given: str) -> tuple[str | None, str]:
    """NAME=URL or URL; an equals sign within a URL is none of ours."""
    name, equals, url = given.partition("=")
    return (name, url) if equals and name and "/" not in name and ":" not in name else (None, given)


@contextlib.contextmanager
def _own_server(args: argparse.Namespace, settings: Settings, loop: asyncio.Runner) -> Iterator[Target]:
    from outrider.bench.http_target import connect
    from outrider.bench.memory import resident_bytes
    from outrider.bench.own_server import own_server
    from outrider.server_address import ServerAddress

    flags = ["--max-rows", str(max(settings.streams))]
    for name in ("drafter", "head", "draft_vocabulary", "dtype"):
        if getattr(args, name) is not None:
            flags += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    with own_server(args.model, flags) as server:
        key = os.environ.get("OUTRIDER_API_KEY")
        pid = server.pid if resident_bytes(server.pid) else None
        address = ServerAddress.parse(server.url, key)
        yield loop.run(connect("outrider", address, None, settings.timeout_s, pid))


@contextlib.contextmanager
def _engine(args: argparse.Namespace, settings: Settings) -> Iterator[Target]:
    from outrider.bench.in_process import EngineTarget
    from outrider.llm import LLM

    with LLM(
        args.model,
        drafter=args.drafter or "auto",
        dtype=args.dtype or "auto",
        head=args.head,
        draft_vocabulary=args.draft_vocabulary,
        max_rows=max(settings.streams),
    ) as llm:
        yield EngineTarget(llm)


def _measure(
    args: argparse.Namespace, settings: Settings, loop: asyncio.Runner, targets: list[Target]
) -> int:
    from outrider.bench.report import report
    from outrider.bench.rounds import Benchmark
    from outrider.bench.target import arms_of
    from outrider.train.progress import TrainingBar

    arms = arms_of(targets, settings.depths)
    baselines = _baselines(args.baseline, [arm.name for arm in arms])
    print(_opening(targets, [arm.name for arm in arms]), flush=True)
    bar = TrainingBar()
    benchmark = Benchmark(arms, settings, _watcher(bar))
    is_complete = False
    try:
        loop.run(benchmark.run())
        is_complete = True
    except KeyboardInterrupt:
        pass
    finally:
        bar.close()
    print("\n" + report(benchmark, baselines, is_complete), flush=True)
    _write(args, benchmark, baselines, is_complete)
    return _status(benchmark) if is_complete else INTERRUPTED


def _baselines(given: list[str], arms: list[str]) -> list[str]:
    for name in given:
        if name not in arms:
            raise InvalidConfig(f"--baseline {name!r} is none of the arms: {', '.join(arms)}")
    return given or arms[:1]


def _opening(targets: list[Target], arms: list[str]) -> str:
    lines = []
    for target in targets:
        facts = target.facts()
        where = f" at {facts['url']}" if "url" in facts else ""
        runs = f", {facts['dtype']} on {facts['device']}" if "device" in facts else ""
        drafts = f", drafts: {facts['drafter']}" if "drafter" in facts else ""
        lines.append(f"{target.name}: {facts['model']}{where}{runs}{drafts}")
        if facts.get("drafter") == "none":
            lines.append("  no drafter: only what grammars force is drafted")
    return "\n".join([*lines, f"arms, in turns: {', '.join(arms)}"])


def _watcher(bar: Listener) -> Watcher:
    from outrider.train.progress import Progress

    def watch(turn: Turn) -> None:
        pace = "" if turn.last is None else f": {turn.last.tokens_per_s:.1f} tokens/s"
        note = f"{turn.case}, {turn.arm.name}, round {turn.index + 1}{pace}"
        bar(Progress("Measuring", turn.num_done, turn.num_total, "answers", note))

    return watch


def _write(args: argparse.Namespace, benchmark: Benchmark, baselines: list[str], is_complete: bool) -> None:
    from outrider.bench.environment import environment
    from outrider.bench.plot import write_plot
    from outrider.bench.record import record, write_record

    if args.json is not None:
        write_record(args.json, record(benchmark, baselines, environment(), is_complete))
        print(f"Written: {args.json}")
    if args.plot is not None:
        write_plot(args.plot, benchmark.measured, [arm.name for arm in benchmark.arms], baselines)
        print(f"Drawn: {args.plot}")


def _status(benchmark: Benchmark) -> int:
    """1 where an arm brought not one answer to a case."""
    rounds = [one for measured in benchmark.measured for one in measured.rounds]
    return 1 if any(one.has_failed for one in rounds) else 0
