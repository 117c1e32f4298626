"""Builds an engine from a model and a configuration: the one module that knows all parts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from outrider.build_adapters import FusedAdapter, fuse_adapter, load_adapters, use_for_all
from outrider.build_caches import block_size_of, name_of_cells, prefix_disk
from outrider.build_controller import fingerprint, measured_prompts, stored_controller
from outrider.build_head import HeadCandidates, HeadSource, choose, load_candidates
from outrider.build_ranks import adapters_of_ranks, config_for_ranks, facts_of_rank, free_bytes_of_ranks
from outrider.config import (
    GENERATION_CONFIGS,
    EngineConfig,
    GenerationConfigSource,
    InvalidConfig,
)
from outrider.cpu.quantized import quantized_layers
from outrider.engine.engine import Engine
from outrider.engine.memory_plan import (
    MAX_CPU_ROWS,
    MAX_ROWS,
    MemoryPlan,
    default_max_rows,
    plan_memory,
    plan_share,
)
from outrider.engine.parts import EngineObserver, EngineParts
from outrider.engine.validation import ModelFacts
from outrider.engine_place import ALONE, EnginePlace
from outrider.grammar.backend import tokenizer_source
from outrider.grammar.compiler import GrammarCompiler
from outrider.models import loader, machine
from outrider.models.copied_weights import copied_bytes
from outrider.models.draft_model import DraftModel, load_draft_model
from outrider.models.files.weight_size import loaded_bytes
from outrider.models.prompt_scorer import PromptScorer
from outrider.models.scorer_loading import allow_gaps, load_scorer
from outrider.models.trunk import Trunk
from outrider.models.vision.families import why_no_audio
from outrider.speculate import cost_store
from outrider.speculate.controller import DepthController
from outrider.speculate.per_draft import new_controller
from outrider.step.device_drafter import LoadedDrafter
from outrider.step.follower import follow
from outrider.step.rank_disk import FollowerDisk
from outrider.step.ranks import Ranks
from outrider.step.runner import Runner
from outrider.text.detokenizer import answer_texts, token_texts

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelChoice:
    """Which files to load."""

    model: str | Path
    head: str | Path | None = None  # None: a head beside the model or in its checkpoint, if there is one
    draft_vocabulary: int | None = None  # draft from this many most frequent tokens only
    dtype: str = "auto"
    revision: str | None = None  # commit, tag or branch of a Hugging Face id; None: its main branch
    generation_config: GenerationConfigSource = "auto"  # "none": no sampling values of the model
    adapter: str | Path | None = None  # LoRA or DoRA adapter that all requests are answered with
    adapters: Mapping[str, str | Path] = field(default_factory=dict)  # those that requests can name
    draft_model: str | Path | None = None  # a smaller model that drafts, in the place of a head
    spec_prefill_model: str | Path | None = None  # scores prompts (spec_prefill); "self": its own layers
    spec_prefill_layers: int | None = None  # of it that score; None: half of them

    def __post_init__(self) -> None:
        if self.draft_model is not None and (self.head is not None or self.draft_vocabulary is not None):
            head, vocabulary = "an MTP head (--head)", "a draft vocabulary (--draft-vocabulary)"
            given = vocabulary if self.head is None else head
            raise InvalidConfig(
                f"{given} and a draft model (--draft-model) cannot be combined: give one of the two"
            )
        if self.generation_config not in GENERATION_CONFIGS:
            names = ", ".join(GENERATION_CONFIGS)
            raise InvalidConfig(f"generation_config must be one of {names}, not {self.generation_config!r}")
        if self.adapter is not None and self.adapters:
            raise InvalidConfig(
                "an adapter for all requests (--adapter) and adapters that requests name (--adapters) cannot "
                "be combined: give one of the two"
            )
        if self.spec_prefill_layers is not None and self.spec_prefill_model is None:
            raise InvalidConfig(
                "spec_prefill_layers (--spec-prefill-layers) needs spec_prefill_model (--spec-prefill-model)"
            )


def build_engine(
    choice: ModelChoice,
    config: EngineConfig,
    observer: EngineObserver | None = None,
    notify: Callable[[str], None] = lambda line: None,
    place: EnginePlace = ALONE,
) -> tuple[Engine, Any]:
    """A running engine and its tokenizer. The engine's thread calls `notify` with a line before long work."""
    config = config_for_ranks(config, len(choice.adapters), place.ranks)
    _check_drafter(choice, config)
    tokenizers: list[Any] = []

    def build() -> EngineParts:
        machine.settle()
        loaded = _load(choice, place.ranks, place.check_wanted)
        place.check_wanted()
        tokenizers.append(loaded.tokenizer)
        fused = None if choice.adapter is None else fuse_adapter(loaded, choice.adapter)
        return _parts(loaded, choice, config, fused, notify, place)

    return Engine(config, build, observer, place.turns, place.is_outlived), tokenizers[0]


def follow_rank_0(choice: ModelChoice, config: EngineConfig, ranks: Ranks) -> None:
    """Run this rank's part of the model until rank 0 stops."""
    config = config_for_ranks(config, len(choice.adapters), ranks)
    machine.settle()
    loaded = _load(choice, ranks)
    trunk = loaded.trunk
    _use_kv_bits(trunk, config)
    candidates = load_candidates(loaded, _head_source(choice, config), config.rank_head, ranks)
    names = _names_of_cells(loaded, None, candidates, config)
    trunk.prepare_for_serving()
    candidates.prepare_for_serving(trunk)
    block_size = block_size_of(trunk, config.cache_layout)
    ranks.check_same(facts_of_rank(loaded, block_size))
    chosen = choose(candidates, trunk, config.rank_head, ranks)
    del candidates
    tier = prefix_disk(names[chosen.is_divided], config, ranks)
    disk = None if tier is None else FollowerDisk(tier)
    runner = Runner(
        trunk,
        chosen.head,
        write_block=None if tier is None else tier.write,
        block_size=block_size,
        ranks=ranks,
        read_block=None if disk is None else disk.read,
    )
    free_bytes = free_bytes_of_ranks(machine.free_bytes(), ranks)
    plan = plan_memory(config, free_bytes, machine.held_bytes()["arrays"], reads_images=False)
    machine.limit_buffers(plan.steps)
    load_adapters(trunk, choice.adapters, config)
    adapters_of_ranks(trunk.adapters, ranks)
    follow(ranks, runner, disk)
    if tier is not None:
        tier.close()


def _check_drafter(choice: ModelChoice, config: EngineConfig) -> None:
    if choice.draft_model is not None and config.drafter != "auto":
        raise InvalidConfig(
            f'drafter="{config.drafter}" (--drafter) and a draft model (--draft-model) contradict each '
            "other: give only one of them"
        )


def _use_kv_bits(trunk: Trunk, config: EngineConfig) -> None:
    trunk.use_kv_bits(trunk.default_kv_bits() if config.kv_bits is None else config.kv_bits)


def _head_source(choice: ModelChoice, config: EngineConfig) -> HeadSource:
    return HeadSource(choice.head, choice.draft_vocabulary, choice.dtype, config.drafter)


def _names_of_cells(
    loaded: loader.LoadedModel,
    draft_model: DraftModel | None,
    candidates: HeadCandidates,
    config: EngineConfig,
) -> tuple[str, str]:
    """With a whole head, another drafter or none; with a divided head."""
    whole = name_of_cells(loaded, draft_model or candidates.whole, config)
    if candidates.divided is None:
        return whole, ""
    return whole, name_of_cells(loaded, candidates.divided, config)


def _load(
    choice: ModelChoice, ranks: Ranks | None, check_wanted: Callable[[], None] = lambda: None
) -> loader.LoadedModel:
    group = None if ranks is None else ranks.group
    files = choice.model, choice.dtype, choice.revision, choice.generation_config
    return loader.load(*files, group=group, check_wanted=check_wanted)


def _parts(
    loaded: loader.LoadedModel,
    choice: ModelChoice,
    config: EngineConfig,
    fused: FusedAdapter | None,
    notify: Callable[[str], None],
    place: EnginePlace,
) -> EngineParts:
    from mlx_lm.utils import get_total_parameters

    _use_kv_bits(loaded.trunk, config)
    draft_model: DraftModel | None = None
    candidates = HeadCandidates()
    if choice.draft_model is not None:
        draft_model = load_draft_model(choice.draft_model, loaded, choice.dtype, loaded.trunk.kv_bits)
    else:
        candidates = load_candidates(loaded, _head_source(choice, config), config.rank_head, place.ranks)
    names = _names_of_cells(loaded, draft_model, candidates, config)
    trunk, vision = loaded.trunk, loaded.vision
    num_parameters = get_total_parameters(trunk.model)
    if choice.spec_prefill_model is not None:
        allow_gaps(trunk, candidates.whole.layers if candidates.whole is not None else ())
    trunk.prepare_for_serving()
    candidates.prepare_for_serving(trunk)
    if draft_model is not None:
        draft_model.prepare_for_serving(trunk)
    ranks, block_size = place.ranks, block_size_of(trunk, config.cache_layout)
    if ranks is not None:
        ranks.check_same(facts_of_rank(loaded, block_size))
    chosen = choose(candidates, trunk, config.rank_head, ranks)
    del candidates
    head = chosen.head
    device_drafter = draft_model or head
    drafter: str = config.drafter
    if drafter == "auto":
        drafter = "model" if draft_model is not None else "mtp" if head is not None else "none"
    disk = prefix_disk(names[chosen.is_divided], config, ranks)
    if fused is not None and fused.terms:
        use_for_all(trunk, fused)
    # On a device that outruns its host, decode passes are traced in few shapes, steps are overlapped, and an
    # MTP head is never paused. (A draft model is: feeding it costs more than a pass that is not traced.) On
    # several ranks every step is read before the next one is sent.
    outruns = machine.outruns_host() and ranks is None
    vision_encoder = vision.encoder if vision is not None else None
    write_block = None if disk is None else disk.write
    scorer = None
    if choice.spec_prefill_model is not None:
        layers = choice.spec_prefill_layers
        scorer = load_scorer(loaded, choice.spec_prefill_model, layers, choice.dtype)
    runner = Runner(
        trunk,
        device_drafter,
        write_block,
        vision_encoder,
        config.image_cache_bytes,
        compiles=outruns,
        block_size=block_size,
        ranks=ranks,
        scorer=scorer,
    )
    facts = ModelFacts(
        name=str(choice.model),
        vocab_size=trunk.vocab_size,
        max_context=min(trunk.max_context, config.max_context or trunk.max_context),
        eos_ids=loaded.eos_ids,
        drafter=drafter,
        head=head.source if head is not None else None,
        head_layers=len(head.layers) if head is not None else 0,
        rank_head=chosen.rank_head,
        rank_head_reason=chosen.reason,
        # A step in which a head catches up is neither traced nor overlapped.
        can_pause_head=not outruns if draft_model is None else draft_model.can_be_paused,
        # A row that loads the prefix of a row without drafts feeds its head while it reads its prompt.
        can_store_head_inputs=draft_model is None or draft_model.can_be_paused,
        draft_model=None if draft_model is None else str(choice.draft_model),
        draft_context=None if draft_model is None else draft_model.max_context,
        dtype=str(trunk.dtype).removeprefix("mlx.core."),
        weight_bits=tuple(sorted({layer.bits for _, layer in quantized_layers(trunk.model)})),
        kv_bits=trunk.kv_bits,
        device=machine.device_name(),
        reads_images=vision is not None,
        no_images_reason=loaded.no_images_reason,
        no_audio_reason=why_no_audio(loaded.config),
        sampling=loaded.sampling,
        family=loaded.family,
        num_parameters=num_parameters,
        hidden_size=trunk.hidden_size,
        scorer_context=0 if scorer is None else scorer.max_context,
        no_gaps_reason=trunk.no_gaps_reason,
        copied_bytes=copied_bytes(trunk, device_drafter),
    )
    memory = _memory_plan(loaded, device_drafter, config, place, scorer)
    load_adapters(trunk, choice.adapters, config)
    adapters = adapters_of_ranks(trunk.adapters, ranks)
    if ranks is not None:
        ranks.rest()
    geometry, most_rows = runner.geometry(config.capacity_step), MAX_ROWS if outruns else MAX_CPU_ROWS
    max_rows = config.max_rows or default_max_rows(geometry, memory.rows, most_rows)
    tokenizer, eos_ids, vocab_size = loaded.tokenizer, loaded.eos_ids, trunk.vocab_size
    # The lambda outlives the engine's parts, so it must not hold the trunk.
    grammars = GrammarCompiler(lambda: tokenizer_source(tokenizer, vocab_size, eos_ids))
    timing = place.timing(runner)
    if config.auto_depth == "auto":
        name = fingerprint(loaded, device_drafter, choice.draft_vocabulary, facts, max_rows, fused, ranks)
        controller = stored_controller(name, timing, facts, max_rows, memory.rows, notify)
    else:
        name = None
        prompts = measured_prompts(timing, facts, memory.rows)
        controller = new_controller(None, None, outruns, prompts, facts.copied_bytes)
    return EngineParts(
        runner,
        facts,
        memory.rows,
        answer_texts(tokenizer, trunk.vocab_size),
        grammars,
        controller,
        partial(_at_end, name, controller, None if ranks is None else runner),
        memory.prefixes,
        disk,
        vision.reader if vision is not None else None,
        max_rows=max_rows,
        memory=memory,
        held_bytes=machine.held_bytes,
        release_buffers=machine.release_buffers,
        overlaps_steps=outruns,
        token_text=token_texts(tokenizer, trunk.vocab_size),
        adapters=adapters,
    )


def _at_end(name: str | None, controller: DepthController, followed: Runner | None, has_failed: bool) -> None:
    """`followed`: the runner, if other ranks follow it."""
    if followed is not None:
        followed.stop_followers(has_failed)
    if name is not None:
        cost_store.save(name, controller.costs, controller.acceptance, controller.prompt_costs.measured)


def _memory_plan(
    loaded: loader.LoadedModel,
    drafter: LoadedDrafter | None,
    config: EngineConfig,
    place: EnginePlace,
    scorer: PromptScorer | None,
) -> MemoryPlan:
    """Call it once the weights are loaded."""
    reads_images, share = loaded.vision is not None, place.memory
    free_bytes = free_bytes_of_ranks(machine.free_bytes(), place.ranks)
    if share is not None:
        layers = drafter.modules if drafter is not None else ()
        encoder = () if loaded.vision is None else (loaded.vision.encoder.model,)
        scoring = () if scorer is None else (scorer.model,)
        weight_bytes = loaded_bytes([loaded.trunk.model, *layers, *encoder, *scoring])
        plan = plan_share(config, share, weight_bytes, reads_images)
    else:
        plan = plan_memory(config, free_bytes, machine.held_bytes()["arrays"], reads_images)
    if plan.excess:
        log.warning(
            "weights (%.2f GB), --memory-budget (%.2f), cached prefixes (%.2f), images (%.2f) and adapters "
            "(%.2f) exceed the memory of %.2f GB that this process may take: the system may end it. Give "
            "smaller budgets.",
            *(part / 1e9 for part in (plan.weights, plan.rows, plan.prefixes, plan.images, plan.adapters)),
            plan.limit / 1e9,
        )
    machine.limit_buffers(plan.steps)
    return plan
