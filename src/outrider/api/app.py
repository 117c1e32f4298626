"""Builds the HTTP application: routes, middleware, error handlers, start and shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from fastapi.telemetry import TelemetryConfig
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from outrider import __version__
from outrider.api.adapter_control import AdapterControl
from outrider.api.admission import Admit, admission_of
from outrider.api.answers import LiveRequests
from outrider.api.anthropic.messages import messages_router
from outrider.api.chat_backend import ChatBackend
from outrider.api.context import ServerContext
from outrider.api.embedding_backend import EmbeddingBackend
from outrider.api.errors import HANDLERS
from outrider.api.host_check import HostCheck, host_names
from outrider.api.keys import api_keys
from outrider.api.logprobs import TokenText
from outrider.api.middleware import OPEN_PATHS, RequestLimits, RequestLog
from outrider.api.model_card import NO_CARD, ModelCard
from outrider.api.ollama.chat import ollama_chat_router
from outrider.api.ollama.embed import ollama_embed_router
from outrider.api.ollama.models import ollama_models_router
from outrider.api.openai.chat import chat_router
from outrider.api.openai.completions import completions_router
from outrider.api.openai.embeddings import embeddings_router
from outrider.api.openai.models import models_router
from outrider.api.openai.responses import responses_router
from outrider.api.openapi import describe
from outrider.api.operations.adapters import adapters_router
from outrider.api.operations.all_models import AllMemory, AllPrefixes, ModelMetrics
from outrider.api.operations.health import health_router
from outrider.api.operations.liveness import LivenessMetrics
from outrider.api.operations.memory import MemoryMetrics, MemoryReport
from outrider.api.operations.metrics import Metrics, metrics_router
from outrider.api.operations.model_control import model_control_router
from outrider.api.operations.prefix_cache import PrefixControl, PrefixMetrics, prefix_cache_router
from outrider.api.operations.status_stream import status_stream_router
from outrider.api.page.routes import page_router, root_router
from outrider.api.require_key import RequireKey
from outrider.api.rerank import rerank_router
from outrider.api.served_model import Entry, Models, RequestDefaults, ServedModel
from outrider.api.settings import ServerSettings
from outrider.api.tokenize import tokenize_router
from outrider.api.unserved import unserved_router
from outrider.engine.validation import ModelFacts
from outrider.pool.model_entry import ModelEntry, NoSource
from outrider.pool.model_pool import ModelPool

if TYPE_CHECKING:
    from outrider.api.tracing import Tracing

DESCRIPTION = "OpenAI's, Anthropic's and Ollama's APIs over one engine."
ROUTERS = (
    chat_router,
    completions_router,
    responses_router,
    embeddings_router,
    rerank_router,
    tokenize_router,
    adapters_router,
    model_control_router,
    models_router,
    messages_router,
    ollama_chat_router,
    ollama_models_router,
    ollama_embed_router,
    health_router,
    status_stream_router,
    unserved_router,
)

StopEngine = Callable[[], Awaitable[None]]


@dataclass
class Server:
    """The application and its shutdown."""

    app: FastAPI
    context: ServerContext
    stop_engine: StopEngine
    _drain: asyncio.Task[None] | None = None

    def drain(self) -> asyncio.Task[None]:
        """Refuse new requests; running ones get `drain_s` seconds. Call this on the event loop.

        The task ends when the engine has stopped. New requests get a 503 until then, and afterwards.
        """
        if self._drain is None:
            self.context.live.drain()
            self._drain = asyncio.create_task(self._stop_after_drain())
        return self._drain

    async def _stop_after_drain(self) -> None:
        live, drain_s = self.context.live, self.context.settings.drain_s
        with suppress(TimeoutError):
            await asyncio.wait_for(live.until_none_is_live(), drain_s)
        await self.stop_engine()


async def _do_nothing() -> None:
    pass


def create_server(
    backend: ChatBackend,
    facts: ModelFacts,
    tokenizer: Any,
    settings: ServerSettings,
    *,
    cache_budget_bytes: int | None = None,
    prefix_cache: PrefixControl | None = None,
    memory: MemoryReport | None = None,
    embedder: EmbeddingBackend | None = None,
    card: ModelCard = NO_CARD,
    adapters: AdapterControl | None = None,
    **parts: Any,
) -> Server:
    """The server of one model that is loaded and stays loaded. `parts`: see `create_pool_server`."""
    served = ServedModel(
        backend,
        facts,
        TokenText(tokenizer),
        RequestDefaults(settings.max_tokens, settings.sampling),
        settings.max_rows,
        cache_budget_bytes,
        prefix_cache,
        memory,
        embedder,
        card,
        adapters,
    )
    name, *aliases = settings.served_model_names
    hidden = (*settings.old_model_names, facts.name)
    entry: Entry = ModelEntry(name, NoSource(), facts.name, tuple(aliases), hidden, is_pinned=True)
    entry.model, entry.state = served, "loaded"
    return create_pool_server(ModelPool([entry]), settings, **parts)


def create_pool_server(
    models: Models,
    settings: ServerSettings,
    *,
    metrics: Metrics | None = None,
    tracing: Tracing | None = None,
    stop_engine: StopEngine = _do_nothing,
    **context_parts: Any,
) -> Server:
    """Build the server. `metrics.steps` must observe the engines; `stop_engine` is awaited at shutdown.

    `context_parts`: further fields of ServerContext, such as a clock for tests.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        models.begin()
        yield
        await stop_engine()

    metrics = metrics or Metrics()
    live = LiveRequests(admission_of(settings), metrics, settings, tracing)
    for entry in models.loaded:
        assert entry.model is not None
        live.admission.allow_prompt_of(entry.model.facts.max_context)
    metrics.watch_live_requests(lambda: live.num_live)
    context = ServerContext(models, settings, live, **context_parts)
    app = FastAPI(
        title="Outrider",
        version=__version__,
        description=DESCRIPTION,
        middleware=_middleware(settings, live),
        exception_handlers=HANDLERS,
        lifespan=lifespan,
        docs_url=None,  # FastAPI's page would run scripts of another origin
        redoc_url=None,
        telemetry=_telemetry(tracing),
    )
    prefixes, memory = AllPrefixes(models), AllMemory(models)
    for collector in (PrefixMetrics(prefixes), MemoryMetrics(memory), ModelMetrics(models, metrics.steps)):
        metrics.registry.register(collector)
    if context.liveness is not None:
        metrics.registry.register(LivenessMetrics(context.liveness))
    routers = [*(router(context) for router in ROUTERS), metrics_router(metrics)]
    routers.append(prefix_cache_router(prefixes))
    routers.append(root_router(settings.serves_page))
    if settings.serves_page:
        routers.append(page_router())
    for router in routers:
        app.include_router(router)
    app.state.methods = _methods_by_path(routers)
    describe(app, needs_key=settings.needs_key, open_paths=OPEN_PATHS)
    return Server(app, context, stop_engine)


def _telemetry(tracing: Tracing | None) -> TelemetryConfig:
    """FastAPI's spans of HTTP requests only: its logs have exceptions, which may quote prompts."""
    telemetry: TelemetryConfig = {
        "tracing": tracing is not None,
        "metrics": False,
        "logs": False,
        "operation_spans": False,
        "auto_configure": False,
    }
    if tracing is not None:
        telemetry |= {"tracer_provider": tracing.provider, "exclude": tracing.is_untraced}
    return telemetry


def _methods_by_path(routers: list[APIRouter]) -> dict[str, set[str]]:
    """All methods of each path, for the Allow header of a 405: Starlette names those of one route only."""
    methods: dict[str, set[str]] = {}
    for router in routers:
        for route in router.routes:
            assert isinstance(route, APIRoute)
            methods.setdefault(route.path, set()).update(route.methods or ())
    return methods


def _middleware(settings: ServerSettings, live: LiveRequests) -> list[Middleware]:
    """The first entry is the outermost: it gets a request first and its response last."""
    stack = [
        Middleware(RequestLog, metrics=live.metrics),
        Middleware(HostCheck, names=host_names(settings), origins=settings.cors_origins),
    ]
    if settings.cors_origins:
        stack.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(settings.cors_origins),
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["x-request-id"],
            )
        )
    return [
        *stack,
        Middleware(RequireKey, keys=api_keys(settings)),
        Middleware(RequestLimits, settings=settings),
        Middleware(Admit, admission=live.admission),
    ]
