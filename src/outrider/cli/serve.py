"""`outrider serve`: loads a model and serves it over HTTP. Owns the process: socket, signals, logging."""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import threading
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.cli.connection_setup import allow_connections, tls_context
from outrider.cli.foreign_flags import notes
from outrider.cli.log_format import add_request_ids, log_to_terminal
from outrider.cli.serve_options import add_options, resolve
from outrider.cli.standard_streams import keep_standard_streams
from outrider.cli.tracing import is_tracing_on, new_tracing
from outrider.cli.worker import ENGINE_FAILED, HARD_END_S, Worker, inherited
from outrider.config import EngineConfig, InvalidConfig
from outrider.request import InvalidRequest, SamplingDefaults

if TYPE_CHECKING:
    import ssl

    from outrider.api.app import Server
    from outrider.api.settings import ServerSettings
    from outrider.chat.formats.tool_format import ToolFormat
    from outrider.cli.watchdog import Watchdog
    from outrider.engine.engine import Engine
    from outrider.media.limits import MediaLimits

log = logging.getLogger(__name__)

DESCRIPTION = """Serves a model over OpenAI's and Anthropic's HTTP APIs.

Every option can also be set by an environment variable (--max-rows is OUTRIDER_MAX_ROWS) or in a TOML file
(max-rows = 8). A flag overrides the variable, and the variable overrides the file."""
BACKLOG = 2048  # connections that wait while the model is loaded or the server is busy; uvicorn's default


def add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve a model over OpenAI's and Anthropic's APIs",
        usage="outrider serve [MODEL] [options]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_options(serve)
    serve.set_defaults(run=run_serve)


def run_serve(args: argparse.Namespace) -> int:
    """The supervisor, which starts this command again as its worker; the worker; or both in one process."""
    from outrider.api.keys import api_keys

    keep_standard_streams()
    worker = inherited()
    if worker is not None:
        worker.settle()
    options = resolve(args)
    config = engine_config(options)
    settings = _settings(options, ("model",))  # built here too: a bad value is reported at once
    if worker is None:
        api_keys(settings)
    media_limits(options)
    tool_format(options)
    is_tracing_on(options["otlp_endpoint"])
    tls_context(options["tls_cert"], options["tls_key"])
    allow_connections(options["max_connections"])
    log_to_terminal(options["log_level"], args.log_level, options["log_format"])
    if worker is not None:
        with worker.listener:
            return _serve(options, config, worker.listener, worker)
    for note in notes(args):
        print(note, file=sys.stderr)
    with _listening_socket(options["host"], options["port"]) as listener:
        if not options["no_supervisor"]:
            return _supervise(args, options, listener)
        return _serve(options, config, listener, None)


def _supervise(args: argparse.Namespace, options: dict[str, Any], listener: socket.socket) -> int:
    from outrider.cli.supervisor import Supervisor

    stop_timeout_s = options["drain"] + HARD_END_S
    return Supervisor(args.command, listener, stop_timeout_s, options["step_timeout"]).run()


def engine_config(options: dict[str, Any]) -> EngineConfig:
    """--mtp narrows --drafter. `_check_drafter` checks `--mtp on` once the model is loaded."""
    mtp, drafter = options["mtp"], options["drafter"]
    if mtp in ("on", "wanted") and drafter not in ("auto", "mtp"):
        raise InvalidConfig(
            f"--mtp {mtp} and --drafter {drafter} contradict each other: give only one of them"
        )
    if mtp == "off" and drafter == "mtp":
        raise InvalidConfig("--mtp off and --drafter mtp contradict each other: give only one of them")
    if mtp == "off" and options["head"] is not None:
        raise InvalidConfig("--mtp off and --head contradict each other: give only one of them")
    if mtp == "off" and drafter == "auto":
        drafter = "none"
    if options["no_prefix_cache"] and (options["prefix_cache_bytes"] or options["prefix_cache_dir"]):
        raise InvalidConfig(
            "--no-prefix-cache contradicts --prefix-cache-bytes (--cache-memory-mb) and --prefix-cache-dir: "
            "give one or the others"
        )
    disk_bytes = options["prefix_cache_disk_bytes"]
    if disk_bytes is not None and options["prefix_cache_dir"] is None:
        raise InvalidConfig("--prefix-cache-disk-bytes needs --prefix-cache-dir, the folder that it limits")
    depth = {} if options["draft_depth"] is None else {"auto_depth": options["draft_depth"]}
    return EngineConfig(
        max_rows=options["max_rows"],
        max_context=options["max_context"],
        memory_budget_bytes=options["memory_budget"],
        prefill_step_size=options["prefill_step_size"],
        max_stall_ms=options["max_stall_ms"],
        drafter=drafter,
        prefix_cache_bytes=0 if options["no_prefix_cache"] else options["prefix_cache_bytes"],
        prefix_cache_dir=options["prefix_cache_dir"],
        prefix_cache_disk_bytes=EngineConfig.prefix_cache_disk_bytes if disk_bytes is None else disk_bytes,
        image_cache_bytes=options["image_cache"],
        **depth,
    )


def _check_drafter(options: dict[str, Any], engine: Engine) -> None:
    """Warn, or refuse to start, if the loaded model has no drafter although the options ask for one."""
    facts = engine.facts
    if facts.drafter != "mtp" and options["mtp"] in ("on", "wanted"):
        problem = (
            f"--mtp {options['mtp']} needs an MTP head, and {facts.name} has none that can be used, neither "
            "in its checkpoint nor beside it (mtp/weights.safetensors or mtp.safetensors). Pass --head FILE, "
            "extract a head from the original checkpoint with `outrider mtp extract`, train one with "
            "`outrider mtp train`, or use --drafter ngram."
        )
        if options["mtp"] == "on":
            raise InvalidConfig(f"{problem} Or use --mtp auto.")
        log.warning("%s Answering without drafts.", problem)
        return
    if options["draft_depth"] and facts.drafter == "none":
        raise InvalidConfig(
            f"--draft-depth {options['draft_depth']} needs a drafter, and {facts.name} has none: "
            "pass --head FILE or --drafter ngram, or use --draft-depth auto."
        )


def _settings(options: dict[str, Any], names: tuple[str, ...]) -> ServerSettings:
    from outrider.api.settings import ServerSettings

    return ServerSettings(
        host=options["host"],
        port=options["port"],
        api_key=options["api_key"],
        operator_key=options["operator_key"],
        api_keys_file=options["api_keys_file"],
        allow_public_without_key=options["allow_public_without_key"],
        served_model_names=options["served_model_name"] or names,
        any_model_name=options["any_model_name"],
        max_tokens=options["max_tokens"],
        sampling=sampling_defaults(options),
        max_rows=1 if options["max_rows"] is None else options["max_rows"],  # `_serve` knows it
        max_queue=options["max_queue"],
        max_body_bytes=options["max_body"],
        max_live_bytes=options["max_live_bytes"],
        max_live_tokens=options["max_live_tokens"],
        max_connections=options["max_connections"],
        header_timeout_s=options["header_timeout"],
        body_timeout_s=options["body_timeout"],
        queue_timeout_s=options["queue_timeout"],
        request_timeout_s=options["request_timeout"],
        write_timeout_s=options["write_timeout"],
        max_stored_responses=options["max_stored_responses"],
        keep_alive_s=options["keep_alive"],
        drain_s=options["drain"],
        step_timeout_s=options["step_timeout"],
        cors_origins=options["cors_origin"],
        allowed_hosts=options["allowed_hosts"],
        serves_page=not options["no_page"],
    )


def sampling_defaults(options: dict[str, Any]) -> SamplingDefaults:
    """The values of the flags. Raises InvalidConfig, which names the flag."""
    names = [field.name for field in fields(SamplingDefaults)]
    values = {name: options[f"default_{name}"] for name in names}
    for name, value in values.items():
        try:
            SamplingDefaults(**{name: value})
        except InvalidRequest as error:
            raise InvalidConfig(f"--default-{name.replace('_', '-')}: {error}") from None
    return SamplingDefaults(**values)


def media_limits(options: dict[str, Any]) -> MediaLimits:
    from outrider.media.limits import MediaLimits

    return MediaLimits(
        max_image_bytes=options["max_image_bytes"],
        max_image_pixels=options["max_image_pixels"],
        max_images=options["max_images"],
        max_frames=options["max_frames"],
        fetch_total_s=options["fetch_timeout"],
        fetch_timeout_s=min(options["fetch_timeout"], 10.0),
        allow_private_urls=options["allow_private_urls"],
        local_folder=options["allow_local_media"],
    )


def tool_format(options: dict[str, Any]) -> ToolFormat | None:
    """The format that --tool-call-parser names; None without the flag: the chat template is to show it."""
    if (name := options["tool_call_parser"]) is None:
        return None
    from outrider.chat.formats import tool_format_named

    return tool_format_named(name)


def model_name(model: str | Path) -> str:
    """The default served name: a Hugging Face id itself, the last part of a path, or an own model's name."""
    from outrider.models.files.named import named_model

    path = Path(model).expanduser()
    if not path.exists():
        own = named_model(model)
        return str(model) if own is None else own.NAME
    return path.stem if path.is_file() else path.resolve().name


def _serve(
    options: dict[str, Any], config: EngineConfig, listener: socket.socket, worker: Worker | None
) -> int:
    from outrider.api.app import create_server
    from outrider.api.operations.metrics import Metrics
    from outrider.build import ModelChoice, build_engine
    from outrider.chat.renderer import ChatRenderer
    from outrider.chat.service import ChatService
    from outrider.chat.thinking import check_most, check_parser
    from outrider.cli.banner import banner
    from outrider.cli.loading import loading_bar
    from outrider.cli.watchdog import Watchdog, watch_loading
    from outrider.engine.engine import AsyncEngine
    from outrider.llm import default_model
    from outrider.media.loader import MediaLoader
    from outrider.models.files.named import named_model
    from outrider.models.loader import find_folder

    add_request_ids()
    faulthandler.enable()  # a crash in native code writes the stacks of all threads into the log
    model = options["model"] or default_model()
    name = model_name(model)
    named = named_model(name)
    check_parser(options["reasoning_parser"])
    check_most(options["max_thinking_tokens"])
    tls = tls_context(options["tls_cert"], options["tls_key"])
    settings = replace(_settings(options, (name,)), old_model_names=named.OLD_NAMES if named else ())
    revision = options["revision"]
    choice = ModelChoice(
        model,
        options["head"],
        options["draft_vocabulary"],
        options["dtype"],
        revision,
        options["generation_config"],
    )
    metrics, tracing = Metrics(), new_tracing(options["otlp_endpoint"])
    folder, is_ready = find_folder(model, revision), threading.Event()  # downloads it, if needed
    watch_loading(is_ready, options["load_timeout"])
    with loading_bar(folder, name) as notify:
        engine, tokenizer = build_engine(choice, config, metrics.steps, notify)
    try:
        _check_drafter(options, engine)
        async_engine = AsyncEngine(engine)
        reader = engine.reader
        facts = engine.facts
        sampling = settings.sampling.over(facts.sampling)
        settings = replace(settings, sampling=sampling, max_rows=engine.max_rows)
        renderer = ChatRenderer(
            tokenizer,
            reader,
            facts.no_images_reason,
            facts.max_context,
            tool_format(options),
            has_tool_grammar=not options["no_tool_grammar"],
            reasoning_parser=options["reasoning_parser"],
            budget_message=options["reasoning_budget_message"],
            max_thinking_tokens=options["max_thinking_tokens"],
        )
        loader = MediaLoader(media_limits(options), reader.read) if reader is not None else None
        service = ChatService(async_engine, renderer, loader)
        watchdog = Watchdog(engine, settings.step_timeout_s, worker.restarts if worker else {})
        server = create_server(
            service,
            engine.facts,
            tokenizer,
            settings,
            metrics=metrics,
            tracing=tracing,
            stop_engine=async_engine.close,
            prefix_cache=engine,
            cache_budget_bytes=engine.budget_bytes,
            memory=engine,
            liveness=watchdog,
        )
        text = banner(
            engine.facts,
            settings,
            engine.budget_bytes,
            config.auto_depth,
            _url(listener, "http" if tls is None else "https"),
            _prefixes(engine, config),
        )
        _run(server, listener, text, watchdog, worker, tls, is_ready)
        service.close()
    finally:
        engine.close()
        if tracing is not None:
            tracing.close()
    return 0 if engine.failure is None else ENGINE_FAILED


def _prefixes(engine: Engine, config: EngineConfig) -> str:
    """The banner's line about the prefix cache."""
    status = engine.prefix_status()
    if status is None:
        return "not cached"
    limit = f"cached, up to {status.gauges()['budget_bytes'] / 1e9:.2f} GB"
    if config.prefix_cache_dir is None:
        return limit
    return f"{limit}, and {config.prefix_cache_disk_bytes / 1e9:.2f} GB in {config.prefix_cache_dir}"


def _run(
    server: Server,
    listener: socket.socket,
    banner_text: str,
    watchdog: Watchdog,
    worker: Worker | None,
    tls: ssl.SSLContext | None,
    is_ready: threading.Event,
) -> None:
    """Serve until SIGINT or SIGTERM, then until running requests end or the drain time is over."""
    from outrider.cli.http_server import HttpServer, http_config

    def on_ready() -> None:
        if worker is None or worker.num_restarts == 0:
            print(banner_text, flush=True)
        else:
            log.warning("ready again: restart number %d", worker.num_restarts)
        is_ready.set()
        watchdog.on_engine_failure = on_engine_failure
        watchdog.start(worker.report_alive if worker else lambda: None)

    def on_engine_failure() -> None:
        watchdog.end_within(HARD_END_S)
        http.stop()

    def on_first_signal(*_: object) -> None:
        watchdog.end_within(server.context.settings.drain_s + HARD_END_S)
        http.stop()
        for number in signals:
            signal.signal(number, on_second_signal)

    def on_second_signal(number: int, _: object) -> None:
        if worker is None:  # else the supervisor counts: both may have got the first one
            os._exit(128 + number)

    # A worker ignores SIGINT: a Ctrl-C in the terminal reaches the supervisor too, which sends SIGTERM.
    signals = (signal.SIGTERM,) if worker else (signal.SIGTERM, signal.SIGINT)
    metrics = server.context.live.metrics
    settings = server.context.settings
    http_settings = http_config(server.app, settings, metrics, tls)
    http = HttpServer(http_settings, on_ready, server.drain, watchdog.event_loop, settings.header_timeout_s)
    metrics.watch_connections(lambda: len(http.server_state.connections))
    for number in signals:
        signal.signal(number, on_first_signal)
    _collect_garbage_less_often()
    http.run(sockets=[listener])


def _collect_garbage_less_often() -> None:
    """A collection stops all threads. Measured, with Python's defaults: to validate a request of 90,000 parts
    took 380 ms, and the collector 270 ms of it.
    """
    gc.collect()
    gc.freeze()  # what is loaded now stays, so collections need not look at it
    gc.set_threshold(10_000, 10, 10)  # Python 3.11: 700, 10, 10. Above 10,000 the time stays the same


def _listening_socket(host: str, port: int) -> socket.socket:
    """Listen before the model is loaded: a port in use is reported at once, and connections wait."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol 0, asyncio does not set TCP_NODELAY, and every small write would wait 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise InvalidConfig(
            f"cannot listen on {host}:{port}: {error}. Choose another --host or --port."
        ) from None
    return listener


def _url(listener: socket.socket, scheme: str) -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
