"""Puts the HTTP application together: routes, middleware, error shapes, start and shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from outrider import __version__
from outrider.api.admission import Admission
from outrider.api.answers import AnswerDesk
from outrider.api.anthropic.messages import messages_router
from outrider.api.backend import ChatBackend
from outrider.api.context import ServerContext
from outrider.api.errors import HANDLERS
from outrider.api.middleware import BodyLimit, RequestLog, RequireKey
from outrider.api.openai.chat import chat_router
from outrider.api.openai.completions import completions_router
from outrider.api.openai.models import models_router
from outrider.api.openai.responses import responses_router
from outrider.api.operations.health import health_router
from outrider.api.operations.metrics import Metrics, metrics_router
from outrider.api.operations.prefix_cache import PrefixMetrics, prefix_cache_router
from outrider.api.settings import ServerSettings
from outrider.api.token_text import TokenText
from outrider.engine.validation import ModelFacts

DESCRIPTION = "OpenAI's and Anthropic's APIs over one engine in which every request drafts at its own pace."
ROUTERS = (
    chat_router,
    completions_router,
    responses_router,
    models_router,
    messages_router,
    health_router,
)

StopEngine = Callable[[], Awaitable[None]]


@dataclass
class Server:
    """The application, and the switch that starts its end."""

    app: FastAPI
    context: ServerContext
    stop_engine: StopEngine
    _ending: asyncio.Task[None] | None = None

    def drain(self) -> None:
        """Take no new requests; those under way have `drain_s` seconds. To be called on the event loop."""
        if not self.context.desk.admission.is_draining:
            self.context.desk.admission.drain()
            self._ending = asyncio.create_task(self._end_stragglers())

    async def _end_stragglers(self) -> None:
        await asyncio.sleep(self.context.settings.drain_s)
        await self.stop_engine()


async def _nothing() -> None:
    pass


def create_server(
    backend: ChatBackend,
    facts: ModelFacts,
    tokenizer: Any,
    settings: ServerSettings,
    *,
    metrics: Metrics | None = None,
    stop_engine: StopEngine = _nothing,
    **context_parts: Any,
) -> Server:
    """`metrics.steps` is the observer to give to the engine; `stop_engine` is awaited at the end."""
    metrics = metrics or Metrics()
    admission = Admission(settings.max_rows, settings.max_queue, settings.retry_after_s)
    metrics.watch_admission(admission)
    desk = AnswerDesk(admission, metrics)
    context = ServerContext(backend, facts, settings, TokenText(tokenizer), desk, **context_parts)
    app = FastAPI(
        title="Outrider",
        version=__version__,
        description=DESCRIPTION,
        middleware=_middleware(settings, metrics),
        exception_handlers=HANDLERS,
        lifespan=_lifespan(stop_engine),
        redoc_url=None,
    )
    if context.prefix_cache is not None:
        metrics.registry.register(PrefixMetrics(context.prefix_cache))
    for router in ROUTERS:
        app.include_router(router(context))
    app.include_router(metrics_router(metrics))
    app.include_router(prefix_cache_router(lambda: context.prefix_cache))
    return Server(app, context, stop_engine)


def create_app(backend: ChatBackend, facts: ModelFacts, tokenizer: Any, settings: ServerSettings) -> FastAPI:
    """The application alone, for whoever brings a server of their own."""
    return create_server(backend, facts, tokenizer, settings).app


def _middleware(settings: ServerSettings, metrics: Metrics) -> list[Middleware]:
    """Outermost first."""
    stack = [Middleware(RequestLog, metrics=metrics)]
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
    if settings.api_key:
        stack.append(Middleware(RequireKey, api_key=settings.api_key))
    return [*stack, Middleware(BodyLimit, max_bytes=settings.max_body_bytes)]


def _lifespan(stop_engine: StopEngine) -> Callable[[FastAPI], Any]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await stop_engine()

    return lifespan
