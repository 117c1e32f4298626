"""One server for all tests of the same settings: to build one takes thirty times as long as to ask it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fake_backend import FACTS, HELLO, Client, FakeBackend, FakeTokenizer, settings
from fake_embedder import FakeEmbedder

from outrider.api.app import create_server
from outrider.api.model_card import NO_CARD, ModelCard
from outrider.chat.events import ChatEvent
from outrider.engine.validation import ModelFacts

_MADE: dict[str, tuple[Client, FakeBackend]] = {}


def shared_server(
    events: Sequence[ChatEvent] = HELLO,
    facts: dict[str, Any] | None = None,
    card: ModelCard = NO_CARD,
    embedder: FakeEmbedder | None = None,
    **changes: Any,
) -> tuple[Client, FakeBackend]:
    """A client, and the backend, which answers with `events` and has seen no request yet."""
    key = repr((facts, card, id(embedder), sorted(changes.items())))
    if key not in _MADE:
        backend = FakeBackend()
        known = ModelFacts(**(vars(FACTS) | (facts or {})))
        made = create_server(
            backend,
            known,
            FakeTokenizer(),
            settings(**changes),
            now_s=lambda: 1700000000.0,
            card=card,
            embedder=embedder,
        )
        _MADE[key] = Client(made), backend
    client, backend = _MADE[key]
    backend.events = events
    for seen in (backend.requests, backend.completions, backend.streams):
        seen.clear()
    return client, backend
