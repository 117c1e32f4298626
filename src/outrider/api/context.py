"""The objects that all routes share: chat service, model facts, settings, clock and id generator."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider import __version__
from outrider.api.answers import LiveRequests, PreparedAnswers
from outrider.api.errors import ApiError
from outrider.api.logprobs import TokenText
from outrider.api.operations.liveness import Liveness
from outrider.api.operations.memory import MemoryReport
from outrider.api.operations.prefix_cache import PrefixControl
from outrider.api.settings import ServerSettings
from outrider.chat.conversation import ChatRequest
from outrider.engine.validation import ModelFacts
from outrider.request import SamplingParams

FINGERPRINT = f"outrider-{__version__}"


class ChatBackend(Protocol):
    """The part of the chat service that the routes use. Tests replace it by a scripted one.

    Every call raises InvalidRequest for a request that it cannot serve, before any token is computed.
    """

    async def prepare(self, request: ChatRequest, num_answers: int = 1) -> PreparedAnswers: ...

    async def prepare_text(
        self, prompt: str | Sequence[int], params: SamplingParams, num_answers: int = 1
    ) -> PreparedAnswers: ...

    async def count_tokens(self, request: ChatRequest) -> int: ...


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


@dataclass(frozen=True)
class ServerContext:
    backend: ChatBackend
    facts: ModelFacts
    settings: ServerSettings
    tokens: TokenText
    live: LiveRequests
    now_s: Callable[[], float] = time.time
    new_id: Callable[[str], str] = new_id
    prefix_cache: PrefixControl | None = None
    cache_budget_bytes: int | None = None  # most bytes of the row caches; None: not known
    memory: MemoryReport | None = None
    liveness: Liveness | None = None
    started_s: float = field(default_factory=time.time)

    def fault(self) -> str | None:
        """Why the engine does not work; None if it does."""
        return None if self.liveness is None else self.liveness.fault()

    def resolve_model(self, requested: str | None) -> str:
        """The name that the answer carries: the requested one, or the first served name.

        Raises a 404 for a name that is neither served, nor an old name, nor the model's own, unless the
        server takes any name.
        """
        served = self.settings.served_model_names
        if requested is None:
            return served[0]
        is_known = requested in (*served, *self.settings.old_model_names, self.facts.name)
        if is_known or self.settings.any_model_name:
            return requested
        known = ", ".join(repr(name) for name in served)
        raise ApiError(
            404,
            f"the model {requested[:200]!r} does not exist on this server. It serves {known}.",
            param="model",
            code="model_not_found",
        )
