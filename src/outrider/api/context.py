"""The objects that all routes share: models, settings, running requests, clock and id generator.

How a route gets the model that a request names is described in `served_model`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from outrider import __version__
from outrider.api.answers import LiveRequests
from outrider.api.errors import ApiError, invalid
from outrider.api.keep_alive import KeepAlive, keep_alive_s
from outrider.api.operations.liveness import Liveness
from outrider.api.served_model import Entry, ExpectedModel, Models, RequestDefaults, RequestedModel
from outrider.api.settings import ServerSettings
from outrider.pool.errors import UnknownModel

FINGERPRINT = f"outrider-{__version__}"
LATEST = ":latest"  # Ollama's tag of a name without one


def same_names(name: str) -> tuple[str, ...]:
    """NAME:latest is the same as NAME: clients find the first in /api/tags, and use it on every route."""
    base = name.removesuffix(LATEST)
    return name, base, base + LATEST


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


@dataclass(frozen=True)
class ServerContext:
    models: Models
    settings: ServerSettings
    live: LiveRequests
    now_s: Callable[[], float] = time.time
    new_id: Callable[[str], str] = new_id
    liveness: Liveness | None = None
    adapters_folder: Path | None = None  # that POST /v1/adapters may load from; None: it is refused
    started_s: float = field(default_factory=time.time)
    expected: Mapping[str, ExpectedModel] = field(default_factory=dict)  # by the name of a model

    def fault(self) -> str | None:
        """Why an engine does not work; None if all do."""
        return None if self.liveness is None else self.liveness.fault()

    def find_model(
        self, requested: str | None, keep_alive: KeepAlive | None = None, adapter: str | None = None
    ) -> RequestedModel:
        """The model that a request names; without a name, the first one. A name may also be base:adapter.

        Raises a 404 for a name that no model has, unless the server takes any name.
        """
        entry, own_adapter = self._find(requested)
        name = entry.name if requested is None else requested
        if adapter is not None and own_adapter not in (None, adapter):
            raise invalid("adapter", f"{adapter[:64]!r} contradicts the model {name[:200]!r}")
        defaults, seconds = self.defaults_of(entry), keep_alive_s(keep_alive)
        return RequestedModel(name, entry, defaults, self.models, seconds, own_adapter or adapter)

    def _find(self, requested: str | None) -> tuple[Entry, str | None]:
        """The model, and the adapter of a name base:adapter. A name that a model has is not split."""
        try:
            return self._find_entry(requested), None
        except UnknownModel as error:
            base, _, adapter = (requested or "").rpartition(":")
            with suppress(UnknownModel):
                entry = self._find_entry(base)
                if adapter and self.adapters_of(entry) is not None:
                    return entry, adapter
            if not self.settings.any_model_name:
                raise ApiError(404, str(error), param="model", code="model_not_found") from None
            entry = self.models.default
            return entry, adapter if base and adapter in (self.adapters_of(entry) or ()) else None

    def _find_entry(self, requested: str | None) -> Entry:
        for name in same_names(requested) if requested is not None else ():
            with suppress(UnknownModel):
                return self.models.find(name)
        return self.models.find(requested)

    def adapters_of(self, entry: Entry) -> tuple[str, ...] | None:
        """The names of a model's adapters; before its load, of those that it is loaded with.

        None: the model takes no adapters.
        """
        if (model := entry.model) is not None:
            return None if model.adapters is None else tuple(model.adapters.adapters)
        expected = self.expected.get(entry.name)
        return None if expected is None else expected.adapters

    def defaults_of(self, entry: Entry) -> RequestDefaults:
        if entry.model is not None:
            return entry.model.defaults
        if (expected := self.expected.get(entry.name)) is not None:
            return expected.defaults
        return RequestDefaults(self.settings.max_tokens, self.settings.sampling)

    def expected_of(self, entry: Entry) -> ExpectedModel:
        """What is known of a model, loaded or not."""
        if (model := entry.model) is not None:
            facts = model.facts
            kind = None if model.embedder is None else model.embedder.facts.kind
            known = model.defaults, facts.max_context, facts.reads_images, model.card, facts
            return ExpectedModel(*known, kind=kind)
        return self.expected.get(entry.name) or ExpectedModel(self.defaults_of(entry))
