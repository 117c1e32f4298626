"""The models of `outrider serve` as a pool: which are loaded at the start, and the memory that they share."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from outrider.api.operations.metrics import Metrics
from outrider.api.served_model import Models, ServedModel
from outrider.api.settings import ServerSettings
from outrider.cli.model_source import ServedModelSource, SharedParts
from outrider.cli.model_specs import ModelSpec
from outrider.cli.watchdog import watch_loading
from outrider.config import InvalidConfig
from outrider.engine.engine import Engine
from outrider.engine.memory_plan import MIN_ROWS, step_reserve
from outrider.models import machine
from outrider.models.errors import ModelUnavailable
from outrider.pool.errors import PoolError
from outrider.pool.model_entry import ModelEntry
from outrider.pool.model_pool import ModelPool
from outrider.step.ranks import Ranks

log = logging.getLogger(__name__)


class ServedPool:
    def __init__(
        self,
        specs: Sequence[ModelSpec],
        memory_limit: int | None,
        metrics: Metrics,
        ranks: Ranks | None = None,
    ) -> None:
        """One model without a limit takes what it needs, as if there was no pool. `ranks`: that run it."""
        self.shared = shared = SharedParts(metrics, len(specs), ranks=ranks)
        if len(specs) > 1 or memory_limit is not None:
            limit = memory_limit or machine.free_bytes()
            shared.step_bytes = step_reserve(limit)
            shared.limit_bytes = max(0, limit - shared.step_bytes)
        sources = [ServedModelSource(spec, shared) for spec in specs]
        entries: list[ModelEntry[ServedModel]] = [source.entry() for source in sources]
        self.models: Models = ModelPool(entries, shared.limit_bytes)
        self._specs = specs
        has_looked = threading.Event()
        watch_loading(has_looked, specs[0].options["load_timeout"])  # a network file system may hang
        for source in sources:
            source.look_at_files()
        has_looked.set()

    @property
    def names(self) -> tuple[str, ...]:
        return self._specs[0].name, *self._specs[0].aliases

    @property
    def first_options(self) -> dict[str, Any]:
        return self._specs[0].options

    def load_at_start(self) -> None:
        """A single model, which has to load; of several, those that are pinned: one that fails is logged."""
        if len(self.models.entries) == 1:
            try:
                self.models.load_now(self.models.default)
            except PoolError as error:
                raise InvalidConfig(str(error)) from None
        else:
            for entry in self.models.entries:
                if entry.is_pinned:
                    self._load_pinned(entry)
        self.shared.is_starting = False

    def _load_pinned(self, entry: ModelEntry[ServedModel]) -> None:
        try:
            self.models.load_now(entry)
        except (ModelUnavailable, InvalidConfig, PoolError) as error:
            log.error("%s is pinned and could not be loaded: %s", entry.name, error)
            entry.state, entry.reserved_bytes = "failed", 0
            entry.error = error if isinstance(error, PoolError) else PoolError(str(error))

    def settings(self, given: ServerSettings) -> ServerSettings:
        """The server's settings, with those that depend on the models."""
        model = self.models.default.model
        if len(self._specs) == 1 and model is not None:
            return replace(given, sampling=model.defaults.sampling, max_rows=model.max_rows)
        rows = [spec.options["max_rows"] or MIN_ROWS for spec in self._specs]
        return replace(given, max_rows=sum(rows))

    def abandon(self, reason: str) -> None:
        """End all requests with an error: another rank is gone, and this process ends soon."""
        for engine in self.shared.engines.values():
            if isinstance(engine, Engine):
                engine.abandon(reason)

    async def close(self) -> None:
        self.shared.is_stopping = True
        await self.models.close()

    def stop(self) -> None:
        """Close what is still open after the event loop has ended."""
        self.shared.is_stopping = True
        for engine in self.shared.engines.values():
            engine.is_outlived = False
            engine.close()
