"""How `outrider serve` loads one of its models: files, engine, chat service. Called on worker threads."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from outrider.api.logprobs import TokenText
from outrider.api.model_card import NO_CARD, model_card
from outrider.api.operations.metrics import Metrics
from outrider.api.served_model import ExpectedModel, RequestDefaults, ServedModel
from outrider.build import ModelChoice, build_engine
from outrider.chat.renderer import ChatRenderer
from outrider.chat.service import ChatService
from outrider.chat.thinking import check_most, check_parser
from outrider.cli.adapters import max_adapters, named_adapters
from outrider.cli.embedder_source import check_options, load_embedder, served_embedder
from outrider.cli.engine_options import (
    check_drafter,
    engine_config,
    media_limits,
    sampling_defaults,
    tool_format,
)
from outrider.cli.loading import loading_bar, watch_loaded_bytes
from outrider.cli.model_specs import ModelSpec
from outrider.cli.watchdog import watch_loading
from outrider.config import InvalidConfig
from outrider.embed.engine import EmbeddingEngine
from outrider.embed.service import EmbeddingService
from outrider.engine.async_engine import AsyncEngine
from outrider.engine.device_turns import DeviceTurns
from outrider.engine.engine import Engine
from outrider.engine.memory_plan import MemoryShare, share_need
from outrider.engine_place import EnginePlace
from outrider.llm import default_model
from outrider.media.loader import MediaLoader
from outrider.models import loader
from outrider.models.encoders.loading import kind_in
from outrider.models.errors import ModelUnavailable
from outrider.models.files import generation_config
from outrider.models.files.default_model import NAME as DEFAULT_NAME
from outrider.models.files.weight_size import estimated_bytes
from outrider.models.vision.encoder import has_extra
from outrider.pool.model_entry import MemoryNeed, ModelEntry, ModelLoad, NoteStage
from outrider.step.ranks import Ranks

log = logging.getLogger(__name__)


@dataclass
class SharedParts:
    """What all models of the server share."""

    metrics: Metrics
    num_models: int = 1
    limit_bytes: int | None = None  # of all models, without their steps; None: one model, no limit
    step_bytes: int = 0
    ranks: Ranks | None = None  # that run the one model together
    turns: DeviceTurns = field(default_factory=DeviceTurns)
    engines: dict[str, Engine | EmbeddingEngine] = field(default_factory=dict)  # of loaded models, by name
    weights: dict[str, int] = field(default_factory=dict)  # by name: bytes, as far as they are known
    expected: dict[str, ExpectedModel] = field(default_factory=dict)  # by name
    is_starting: bool = True  # before the server is ready: a bar on the terminal shows loads
    is_stopping: bool = False


def model_choice(spec: ModelSpec) -> ModelChoice:
    options = spec.options
    return ModelChoice(
        default_model() if spec.model is None else spec.model,
        options["head"],
        options["draft_vocabulary"],
        options["dtype"],
        options["revision"],
        options["generation_config"],
        options["adapter"],
        named_adapters(options),
        options["draft_model"],
        options["spec_prefill_model"],
        options["spec_prefill_layers"],
    )


class ServedModelSource:
    def __init__(self, spec: ModelSpec, shared: SharedParts) -> None:
        self._spec = spec
        self._shared = shared
        self._folder: Path | None = None
        self.is_idle: Callable[[], bool] = lambda: False  # True: no request uses the model

    def entry(self) -> ModelEntry[ServedModel]:
        spec = self._spec
        path = "" if spec.model is None else str(spec.model)
        names = spec.name, self, path, spec.aliases, spec.hidden_names
        entry: ModelEntry[ServedModel] = ModelEntry(
            *names,
            is_pinned=spec.is_pinned or self._shared.ranks is not None,  # other ranks are not started again
            idle_unload_s=spec.idle_unload_s,
        )
        self.is_idle = lambda: entry.num_leases == 0
        return entry

    def look_at_files(self) -> None:
        """Note what is known before a load: defaults, context, size of the weights. No network is used."""
        options, model = self._spec.options, self._spec.model
        folder = loader.local_folder(DEFAULT_NAME if model is None else model, options["revision"])
        sampling, max_context, reads_images, card = sampling_defaults(options), None, False, NO_CARD
        kind = None
        if folder is not None:
            try:
                config = loader.read_config(folder)
                card, kind = model_card(folder), kind_in(folder)
                if self._shared.limit_bytes is not None:
                    weights = estimated_bytes(folder, config, options["dtype"])
                    draft_model = options["draft_model"]
                    drafts = None if draft_model is None else loader.local_folder(draft_model)
                    self._shared.weights[self._spec.name] = weights + self._draft_bytes(drafts)
                max_context = loader.max_context(config)
                reads_images = "vision_config" in config and has_extra()
                if options["generation_config"] == "auto":
                    sampling = sampling.over(generation_config.sampling_defaults(folder))
            except ModelUnavailable as error:  # told in full when the model is loaded
                log.debug("%s: %s", self._spec.name, error)
        if max_context is not None and options["max_context"] is not None:
            max_context = min(max_context, options["max_context"])
        defaults = RequestDefaults(options["max_tokens"], sampling)
        self._shared.expected[self._spec.name] = ExpectedModel(
            defaults, max_context, reads_images, card, adapters=self._adapter_names, kind=kind
        )

    def measure(self, load: ModelLoad) -> MemoryNeed:
        spec, shared = self._spec, self._shared
        load.note("finding its files", None)
        with self._without_path():
            self._folder = folder = self._find_folder()
            if shared.limit_bytes is None:
                return MemoryNeed(0, 0)
            config = loader.read_config(folder)
            weights = estimated_bytes(folder, config, spec.options["dtype"])
            if (draft_model := spec.options["draft_model"]) is not None:
                weights += self._draft_bytes(loader.find_folder(draft_model))
        shared.weights[spec.name] = weights
        unknown = [0] * (shared.num_models - len(shared.weights))
        all_weights = [*shared.weights.values(), *unknown]
        engine, reads_images = engine_config(spec.options), "vision_config" in config
        return MemoryNeed(*share_need(engine, weights, reads_images, shared.limit_bytes, all_weights))

    def load(self, num_bytes: int | None, load: ModelLoad) -> ServedModel:
        started_s, is_loaded = time.monotonic(), threading.Event()
        watch_loading(is_loaded, self._spec.options["load_timeout"])
        try:
            with self._without_path(), self._progress(load.note) as notify:
                served = self._load(num_bytes, notify, load.check_wanted)
        except BaseException:
            _free_buffers()
            raise
        finally:
            is_loaded.set()
        log.info("%s is loaded: %.1f s", self._spec.name, time.monotonic() - started_s)
        return served

    # -- files -------------------------------------------------------------------------------------------

    @property
    def _model(self) -> str | Path:
        return default_model() if self._spec.model is None else self._spec.model

    def _find_folder(self) -> Path:
        return loader.find_folder(self._model, self._spec.options["revision"])

    def _draft_bytes(self, folder: Path | None) -> int:
        """What the weights of the draft model will take; 0 if there is none, or its files are not here."""
        if folder is None:
            return 0
        return estimated_bytes(folder, loader.read_config(folder), self._spec.options["dtype"])

    @contextmanager
    def _without_path(self) -> Iterator[None]:
        """Clients see the messages of failed loads: they learn the model's name, not where it lies."""
        try:
            yield
        except (ModelUnavailable, InvalidConfig) as error:
            if self._shared.is_starting:
                raise
            log.error("%s: %s", self._spec.name, str(error))
            message = str(error)
            for path, name in sorted(self._names_by_path().items(), key=lambda item: -len(item[0])):
                message = message.replace(path, name)
            raise type(error)(message) from error

    def _names_by_path(self) -> dict[str, str]:
        """What clients read instead of the paths of the model and its adapters."""
        spec = self._spec
        adapters = {str(path): name for name, path in named_adapters(spec.options).items()}
        if spec.options["adapter"] is not None:
            adapters[str(spec.options["adapter"])] = "its adapter"
        named = self._folder, spec.model, spec.options["draft_model"]
        return adapters | {str(place): spec.name for place in named if place is not None}

    # -- loading -----------------------------------------------------------------------------------------

    @contextmanager
    def _progress(self, note: NoteStage) -> Iterator[Callable[[str], None]]:
        assert self._folder is not None
        if self._shared.is_starting:
            with loading_bar(self._folder, self._spec.name) as show_line:
                yield show_line
            return
        total_bytes = self._shared.weights.get(self._spec.name, 0) or 1
        note("loading the weights", 0.0)
        is_measuring = threading.Event()

        def show(num_bytes: int) -> None:
            if not is_measuring.is_set():
                note("loading the weights", min(1.0, num_bytes / total_bytes))

        def notify(line: str) -> None:
            is_measuring.set()
            note(line, None)

        with watch_loaded_bytes(show):
            yield notify

    def _load(
        self, num_bytes: int | None, notify: Callable[[str], None], check_wanted: Callable[[], None]
    ) -> ServedModel:
        spec, shared, options = self._spec, self._shared, self._spec.options
        assert self._folder is not None
        if kind_in(self._folder) is not None:
            return self._load_embedder(self._folder, num_bytes, check_wanted)
        check_parser(options["reasoning_parser"])
        check_most(options["max_thinking_tokens"])
        share = None
        if num_bytes is not None:
            share = MemoryShare(num_bytes, shared.step_bytes, shared.weights[spec.name])
        place = EnginePlace(shared.turns.join(), share, not shared.is_starting, shared.ranks, check_wanted)
        steps = shared.metrics.steps.of_model(spec.name, self.is_idle)
        engine, tokenizer = build_engine(model_choice(spec), engine_config(options), steps, notify, place)
        try:
            check_drafter(options, engine)
            served = self._served(engine, tokenizer)
        except BaseException:
            engine.close()
            raise
        engine.is_outlived = True
        shared.engines[spec.name] = engine
        return served

    def _load_embedder(
        self, folder: Path, num_bytes: int | None, check_wanted: Callable[[], None]
    ) -> ServedModel:
        spec, shared = self._spec, self._shared
        if shared.ranks is not None:
            raise InvalidConfig(
                f"{spec.name} makes embeddings, and such a model runs on one rank: start it without "
                "--tensor-parallel and mlx.launch"
            )
        if shared.limit_bytes is None:  # a single model; beside others, the options are those of the others
            check_options(spec.options, spec.name)
        is_outlived = not shared.is_starting
        cache_bytes = None if num_bytes is None else max(0, num_bytes - shared.weights[spec.name])
        place = shared.turns.join(), is_outlived, check_wanted, cache_bytes
        embedder = load_embedder(folder, str(self._model), spec.options, *place)
        embedder.engine.is_outlived = True
        shared.engines[spec.name] = embedder.engine
        served = served_embedder(embedder, spec.name)
        kind = embedder.engine.facts.kind
        shared.expected[spec.name] = ExpectedModel(served.defaults, served.facts.max_context, kind=kind)
        return replace(served, on_close=lambda: self._close(embedder.engine, embedder.service))

    @property
    def _adapter_names(self) -> tuple[str, ...] | None:
        """Of the adapters that the model is loaded with; None: it takes none."""
        return tuple(named_adapters(self._spec.options)) if max_adapters(self._spec.options) else None

    def _served(self, engine: Engine, tokenizer: Any) -> ServedModel:
        options, facts, reader = self._spec.options, engine.facts, engine.reader
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
            no_audio_reason=facts.no_audio_reason,
        )
        media = None
        if reader is not None:
            limits, videos = media_limits(options), renderer.video_reader
            media = MediaLoader(limits, reader.read, videos, facts.max_context)
        service = ChatService(AsyncEngine(engine), renderer, media)
        sampling = sampling_defaults(options).over(facts.sampling)
        defaults = RequestDefaults(options["max_tokens"], sampling)
        assert self._folder is not None
        card = model_card(self._folder, renderer.template, renderer.thinks)
        expected = ExpectedModel(
            defaults, facts.max_context, facts.reads_images, card, facts, self._adapter_names
        )
        self._shared.expected[self._spec.name] = expected
        return ServedModel(
            service,
            facts,
            TokenText(tokenizer),
            defaults,
            engine.max_rows,
            engine.budget_bytes,
            prefix_cache=engine,
            memory=engine,
            card=card,
            adapters=engine if max_adapters(options) else None,
            on_close=lambda: self._close(engine, service),
        )

    def _close(self, engine: Engine | EmbeddingEngine, service: ChatService | EmbeddingService) -> None:
        shared, name = self._shared, self._spec.name
        engine.is_outlived = not shared.is_stopping
        engine.close()
        service.close()
        if shared.is_stopping:
            return  # the engines are asked once more why they ended
        del shared.engines[name]
        del engine, service
        _free_buffers()
        log.info("%s is unloaded", name)


def _free_buffers() -> None:
    """Give the memory of arrays that nobody holds back to the system."""
    gc.unfreeze()  # a model that was loaded before the server was ready is frozen (see serve.py)
    gc.collect()
    gc.freeze()
    mx.clear_cache()
