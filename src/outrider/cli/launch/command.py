"""`outrider launch`: runs a coding agent on Outrider and leaves the user's own settings as they are."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from outrider.cli.launch import TOOLS
from outrider.cli.launch.server import (
    DEFAULT_URL,
    OtherServer,
    ServedModel,
    serve_command,
    served_models,
    started,
)
from outrider.cli.launch.tool import NO_KEY, Plan, Target, Tool
from outrider.config import InvalidConfig
from outrider.server_address import ServerAddress

KEY_VARIABLE = "OUTRIDER_API_KEY"
LOG_LEVELS = ("debug", "info", "warning", "error")
NAMED_KEY = "YOUR_KEY"  # in what is printed
UNKNOWN_PORT = "http://127.0.0.1:PORT"  # of a server that is not started yet

DESCRIPTION = """Runs a coding agent on Outrider: finds a running server or starts one, sets what the agent
needs in its environment, its flags or temporary files, and stops what it started. Your own settings stay as
they are.

    outrider launch claude                      Claude Code on the server at 127.0.0.1:8000
    outrider launch codex --model MODEL         serves MODEL for as long as Codex runs
    outrider launch opencode -- run "Hello"     what follows -- are arguments of the tool
    outrider launch aider --print               only show what would be done

Tools: {tools}."""


def add_launch(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    launch = commands.add_parser(
        "launch",
        help="run Claude Code, Codex, OpenCode, aider or llm on Outrider",
        usage="outrider launch TOOL [--model MODEL] [--url URL] [--print] [-- ARGUMENT ...]",
        description=DESCRIPTION.format(tools=", ".join(TOOLS)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    launch.add_argument("tool", metavar="TOOL", help=", ".join(TOOLS))
    launch.add_argument(
        "--model",
        help="served name on a running server; else the model to serve: folder, GGUF file or Hugging Face id "
        "(default: the first model of the running server, else SmolLM2-135M-Instruct)",
    )
    launch.add_argument(
        "--url", help=f"address of a running server (default: {DEFAULT_URL}, if Outrider runs there)"
    )
    launch.add_argument("--api-key", metavar="KEY", help=f"key of the server (default: ${KEY_VARIABLE})")
    launch.add_argument(
        "--print", action="store_true", dest="only_prints", help="show what would be done, and do nothing"
    )
    launch.set_defaults(run=run_launch)


def split_arguments(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a command line, and those after the -- of `outrider launch`: argparse would drop it."""
    options = itertools.takewhile(lambda word: word != "launch", words)
    is_launch = all(word.startswith("--log-level") or word in LOG_LEVELS for word in options)
    if not (is_launch and "launch" in words and "--" in words):
        return list(words), []
    at = list(words).index("--")
    return list(words[:at]), list(words[at + 1 :])


def run_launch(args: argparse.Namespace) -> int:
    tool = TOOLS.get(args.tool)
    if tool is None:
        raise InvalidConfig(f"{args.tool!r} is no tool that can be launched: choose {', '.join(TOOLS)}")
    program = shutil.which(tool.program)
    if program is None and not args.only_prints:
        raise InvalidConfig(f"{tool.title} is not installed (no {tool.program} in PATH): {tool.install}")
    api_key = args.api_key or os.environ.get(KEY_VARIABLE)
    running = _running_server(args.url, args.model, api_key)
    with tempfile.TemporaryDirectory(prefix="outrider-launch-") as name, _ending_on_signals():
        folder = Path(name)
        if args.only_prints:
            target = replace(running or _future_target(args.model), api_key=NAMED_KEY if api_key else NO_KEY)
            command = [tool.program, *args.tool_arguments]
            print(printed(tool, tool.plan(target, folder), command, None if running else args.model or ""))
            return 0
        with contextlib.ExitStack() as stack:
            target = running or stack.enter_context(_started_target(args.model, api_key, folder))
            assert program is not None
            return run_tool(tool, target, folder, [program, *args.tool_arguments])


def _running_server(url: str | None, model: str | None, api_key: str | None) -> Target | None:
    """The server at the given address, or at the usual one if it serves the model; None: start one."""
    address = ServerAddress.parse(url or DEFAULT_URL, api_key)
    try:
        models = served_models(address)
    except OtherServer as error:
        if url is not None:
            raise InvalidConfig(str(error)) from None
        return None
    if models is None:
        if url is not None:
            raise InvalidConfig(
                f"nothing answers at {address}: start it with `outrider serve`, or leave --url out"
            )
        return None
    served = models[0] if model is None else next((each for each in models if each.name == model), None)
    if served is None and url is not None:
        names = ", ".join(each.name for each in models)
        raise InvalidConfig(f"{address} does not serve {model}; it serves {names}")
    return None if served is None else _target(str(address), served, api_key)


def _target(url: str, served: ServedModel, api_key: str | None) -> Target:
    return Target(url, served.name, served.context, api_key or NO_KEY, served.reads_images)


def _future_target(model: str | None) -> Target:
    """What is known before the server is started: neither its port nor the model's context."""
    from outrider.cli.model_specs import model_name
    from outrider.llm import default_model

    return Target(UNKNOWN_PORT, model_name(model or default_model()), None)


@contextlib.contextmanager
def _started_target(model: str | None, api_key: str | None, folder: Path) -> Iterator[Target]:
    log_file = folder / "server.log"
    print(f"Starting a server (its log: {log_file})", file=sys.stderr)
    with started(serve_command(model), log_file, sys.stderr) as url:
        models = served_models(ServerAddress.parse(url, api_key))
        if not models:
            raise InvalidConfig(f"the server at {url} has ended: see its last lines above")
        yield _target(url, models[0], api_key)


def run_tool(tool: Tool, target: Target, folder: Path, command: Sequence[str]) -> int:
    """Runs the tool until it ends. Returns its exit status, as a shell reports it."""
    plan = tool.plan(target, folder)
    for file, text in plan.files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for note in [*plan.notes, *_warnings(tool, target)]:
        print(f"outrider: {note}", file=sys.stderr)
    program, *arguments = command
    environment = environment_of(plan, os.environ)
    with _leaving_interrupts_to_the_tool():
        process = subprocess.Popen([program, *plan.arguments, *arguments], env=environment)
        try:
            status = process.wait()
        finally:
            if process.poll() is None:  # this command got SIGTERM or SIGHUP
                process.terminate()
                process.wait()
    return 128 - status if status < 0 else status


@contextlib.contextmanager
def _leaving_interrupts_to_the_tool() -> Iterator[None]:
    """A Ctrl-C reaches the tool too, and the tool decides what it means. (It would inherit SIG_IGN.)"""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def environment_of(plan: Plan, environment: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in environment.items() if name not in plan.removed}
    return {**kept, **plan.environment}


def _warnings(tool: Tool, target: Target) -> Iterator[str]:
    if target.context is not None and target.context < 2 * tool.prompt_tokens:
        yield (
            f"{target.model} has a context of {target.context:,} tokens, of which {tool.title}'s own prompt "
            f"takes about {tool.prompt_tokens:,}: it will not get far. Serve a model with a longer context."
        )


@contextlib.contextmanager
def _ending_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end this command as an exception does: what it started is stopped."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def printed(tool: Tool, plan: Plan, command: Sequence[str], starts: str | None) -> str:
    """What --print shows, as lines for a shell. `starts`: the model of a server that would be started."""
    lines = []
    if starts is not None:
        serve = shlex.join(["outrider", "serve", *([starts] if starts else []), "--port", "0"])
        lines += ["# starts a server, and stops it when the tool ends; PORT is the one that it prints", serve]
        lines.append("# the limits of the context are told to the tool too, once the model is loaded")
    for file, text in plan.files.items():
        lines += [f"# file {file}", *(f"#   {line}" for line in text.splitlines())]
    lines += [f"# {note}" for note in plan.notes]
    if shutil.which(tool.program) is None:
        lines.append(f"# {tool.title} is not installed: {tool.install}")
    lines += [f"unset {name}" for name in plan.removed]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in plan.environment.items()]
    program, *arguments = command
    return "\n".join([*lines, shlex.join([program, *plan.arguments, *arguments])])
