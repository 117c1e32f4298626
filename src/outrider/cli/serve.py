"""`outrider serve`: serves models over HTTP. Owns the process: socket, signals, logging."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import signal
import socket
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from outrider.cli.adapters import adapters_folder, named_adapters
from outrider.cli.connection_setup import allow_connections, tls_context
from outrider.cli.engine_options import engine_config, media_limits, sampling_defaults, tool_format
from outrider.cli.foreign_flags import notes
from outrider.cli.log_format import add_request_ids, log_to_terminal
from outrider.cli.model_specs import model_specs, option_sets
from outrider.cli.option_sources import resolve
from outrider.cli.process_settings import collect_garbage_less_often, settle_process
from outrider.cli.serve_options import add_options
from outrider.cli.standard_streams import keep_standard_streams
from outrider.cli.tensor_parallel import (
    OtherRanks,
    is_on_ranks,
    is_started_by_rank_0,
    join,
    own_rank,
    spec_of_ranks,
)
from outrider.cli.tracing import is_tracing_on, new_tracing
from outrider.cli.worker import ENGINE_FAILED, HARD_END_S, HUNG, Worker, inherited
from outrider.config import EngineConfig, InvalidConfig

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from outrider.api.app import Server
    from outrider.api.settings import ServerSettings
    from outrider.cli.served_pool import ServedPool
    from outrider.cli.watchdog import Watchdog
    from outrider.engine.engine import Engine

log = logging.getLogger(__name__)

DESCRIPTION = """Serves one model or several over OpenAI's, Anthropic's and Ollama's HTTP APIs.

Every option can also be set by an environment variable (--max-rows is OUTRIDER_MAX_ROWS) or in a TOML file
(max-rows = 8). A flag overrides the variable, and the variable overrides the file."""
BACKLOG = 2048  # connections that wait while the model is loaded or the server is busy; uvicorn's default


def add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve models over OpenAI's, Anthropic's and Ollama's APIs",
        usage="outrider serve [MODEL ...] [options]",
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
    settings = _settings(options, ("model",))  # built here too: a bad value is reported at once
    adapters_folder(options)
    if worker is None:
        api_keys(settings)
    for own in option_sets(options):
        engine_config(own)
        named_adapters(own)
        media_limits(own)
        tool_format(own)
        sampling_defaults(own)
    is_tracing_on(options["otlp_endpoint"])
    tls_context(options["tls_cert"], options["tls_key"])
    allow_connections(options["max_connections"])
    log_to_terminal(options["log_level"], args.log_level, options["log_format"])
    follows = (own_rank() or 0) > 0
    is_supervisor = worker is None and not options["no_supervisor"] and not is_started_by_rank_0()
    if follows:
        return _supervise(args, options, None) if is_supervisor else _follow(options, args.command, worker)
    if worker is not None and worker.listener is not None:
        with worker.listener:
            return _serve(options, worker.listener, worker, args.command)
    for note in notes(args):
        print(note, file=sys.stderr)
    with _listening_socket(options["host"], options["port"]) as listener:
        if is_supervisor:
            return _supervise(args, options, listener)
        return _serve(options, listener, None, args.command)


def _supervise(args: argparse.Namespace, options: dict[str, Any], listener: socket.socket | None) -> int:
    """`listener`: None for a rank that serves no clients."""
    from outrider.cli.supervisor import Supervisor

    stop_timeout_s = options["drain"] + HARD_END_S
    return Supervisor(args.command, listener, stop_timeout_s, _silence_timeout_s(options)).run()


def _silence_timeout_s(options: dict[str, Any]) -> float:
    """After which a worker without a sign of life is killed. (Then its other ranks have ended too.)"""
    timeouts = [options["step_timeout"]]
    if is_on_ranks(options):
        timeouts.append(options["rank_timeout"])
    return min((timeout for timeout in timeouts if timeout > 0), default=0.0)


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


def _follow(options: dict[str, Any], command: Sequence[str], worker: Worker | None) -> int:
    """Run a rank other than 0."""
    from outrider.build import follow_rank_0
    from outrider.cli.model_source import model_choice
    from outrider.models.errors import ModelUnavailable

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all ranks; rank 0 stops the others
    spec = spec_of_ranks(options)
    rank_0 = OtherRanks()
    if worker is not None:
        rank_0.report_alive = worker.report_alive
    ranks = join(options["tensor_parallel"], options["rank_timeout"], command, rank_0)
    assert ranks is not None
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # likewise: rank 0 finishes its running requests first
    try:
        follow_rank_0(model_choice(spec), engine_config(spec.options), ranks)
    except (InvalidConfig, ModelUnavailable):
        rank_0.leave()  # its exit status says that it refuses to start
        raise
    rank_0.leave()
    return 0


def _serve(
    options: dict[str, Any], listener: socket.socket, worker: Worker | None, command: Sequence[str]
) -> int:
    from outrider.api.app import create_pool_server
    from outrider.api.operations.metrics import Metrics
    from outrider.cli.banner import banner, pool_banner
    from outrider.cli.embedder_source import embedder_banner
    from outrider.cli.served_pool import ServedPool
    from outrider.embed.engine import EmbeddingEngine

    add_request_ids()
    settle_process()
    faulthandler.enable()  # a crash in native code writes the stacks of all threads into the log
    tls = tls_context(options["tls_cert"], options["tls_key"])
    url = _url(listener, "http" if tls is None else "https")
    metrics, tracing = Metrics(), new_tracing(options["otlp_endpoint"])
    specs = [spec_of_ranks(options)] if is_on_ranks(options) else model_specs(options)
    other_ranks = OtherRanks()
    ranks = join(options["tensor_parallel"], options["rank_timeout"], command, other_ranks)
    pool = ServedPool(specs, options["memory_limit"], metrics, ranks)
    try:
        pool.load_at_start()
        settings = pool.settings(_settings(options, pool.names))
        engines = pool.shared.engines
        watchdog = _new_watchdog(pool, settings.step_timeout_s, worker, other_ranks)
        server = create_pool_server(
            pool.models,
            settings,
            metrics=metrics,
            tracing=tracing,
            stop_engine=pool.close,
            adapters_folder=adapters_folder(options),
            liveness=watchdog,
            expected=pool.shared.expected,
        )
        if len(pool.models.entries) > 1:
            text = pool_banner(pool.models, settings, url)
        else:
            (engine,) = engines.values()
            if isinstance(engine, EmbeddingEngine):
                text = embedder_banner(engine.facts, settings, url)
            else:
                config = engine_config(pool.first_options)
                prefixes = _prefixes(engine, config)
                text = banner(engine.facts, settings, engine.budget_bytes, config.auto_depth, url, prefixes)
        _run(server, listener, text, watchdog, worker, tls)
    finally:
        pool.stop()
        if tracing is not None:
            tracing.close()
    has_failed = any(engine.failure is not None for engine in pool.shared.engines.values())
    return ENGINE_FAILED if has_failed else 0


def _new_watchdog(
    pool: ServedPool, step_timeout_s: float, worker: Worker | None, other_ranks: OtherRanks
) -> Watchdog:
    from outrider.cli.watchdog import Watchdog

    engines, restarts = pool.shared.engines, worker.restarts if worker else {}
    watchdog = Watchdog(lambda: list(engines.values()), step_timeout_s, restarts, other_ranks.end_process)

    def on_loss(reason: str) -> None:
        watchdog.lost_rank = reason
        pool.abandon(reason)

    if pool.shared.ranks is not None:
        other_ranks.on_loss = on_loss
        watchdog.on_hang = partial(other_ranks.lose, status=HUNG)
        other_ranks.begin()
    return watchdog


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
) -> None:
    """Serve until SIGINT or SIGTERM, then until running requests end or the drain time is over."""
    from outrider.cli.http_server import HttpServer, http_config

    def on_ready() -> None:
        if worker is None or worker.num_restarts == 0:
            print(banner_text, flush=True)
        else:
            log.warning("ready again: restart number %d", worker.num_restarts)
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
    collect_garbage_less_often()
    http.run(sockets=[listener])


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
