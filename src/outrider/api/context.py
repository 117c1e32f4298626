"""What the routes share: the backend, the model's facts, the settings, and the few things a test replaces."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.api.answers import AnswerDesk
from outrider.api.backend import ChatBackend
from outrider.api.errors import ApiError
from outrider.api.operations.prefix_cache import PrefixControl
from outrider.api.settings import ServerSettings
from outrider.api.token_text import TokenText
from outrider.engine.validation import ModelFacts


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


@dataclass(frozen=True)
class ServerContext:
    backend: ChatBackend
    facts: ModelFacts
    settings: ServerSettings
    tokens: TokenText
    desk: AnswerDesk
    now_s: Callable[[], float] = time.time
    new_id: Callable[[str], str] = new_id
    prefix_cache: PrefixControl | None = None
    started_s: float = field(default_factory=time.time)

    def check_model(self, name: str | None) -> None:
        """The served names and the model's own are known; no name means the one model there is."""
        if name is None or name in self.settings.served_model_names or name == self.facts.name:
            return
        known = ", ".join(repr(known) for known in self.settings.served_model_names)
        raise ApiError(
            404,
            f"the model {name[:200]!r} does not exist here; this server has {known}",
            param="model",
            code="model_not_found",
        )
