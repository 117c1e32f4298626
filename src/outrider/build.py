"""Builds an engine from a model and a configuration: the one module that knows all parts."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from outrider import __version__
from outrider.cache.block_folder import BlockFolder
from outrider.cache.disk_tier import DiskTier
from outrider.config import GENERATION_CONFIGS, EngineConfig, GenerationConfigSource, InvalidConfig
from outrider.cpu import blas
from outrider.cpu.quantized import quantized_layers
from outrider.engine.engine import Engine
from outrider.engine.memory_plan import MAX_CPU_ROWS, MAX_ROWS, MemoryPlan, default_max_rows, plan_memory
from outrider.engine.parts import EngineObserver, EngineParts
from outrider.engine.validation import ModelFacts
from outrider.grammar.backend import tokenizer_source
from outrider.grammar.compiler import GrammarCompiler
from outrider.models import dtypes, heads, loader, machine
from outrider.models.files.fingerprint import fingerprint
from outrider.models.files.shipped_head import shipped_head
from outrider.plan import BLOCK_SIZE
from outrider.speculate import calibration, cost_store
from outrider.speculate.acceptance import ModelAcceptance
from outrider.speculate.controller import DepthController
from outrider.speculate.costs import CostTable
from outrider.speculate.per_draft import new_controller
from outrider.speculate.prompt_calibration import measure_prompts
from outrider.speculate.prompt_costs import MeasuredPromptCosts
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

    def __post_init__(self) -> None:
        if self.generation_config not in GENERATION_CONFIGS:
            names = ", ".join(GENERATION_CONFIGS)
            raise InvalidConfig(f"generation_config must be one of {names}, not {self.generation_config!r}")


def build_engine(
    choice: ModelChoice,
    config: EngineConfig,
    observer: EngineObserver | None = None,
    notify: Callable[[str], None] = lambda line: None,
) -> tuple[Engine, Any]:
    """A running engine and its tokenizer. The engine's thread calls `notify` with a line before long work."""
    tokenizers: list[Any] = []

    def build() -> EngineParts:
        machine.settle()
        loaded = loader.load(choice.model, choice.dtype, choice.revision, choice.generation_config)
        tokenizers.append(loaded.tokenizer)
        return _parts(loaded, choice, config, notify)

    return Engine(config, build, observer), tokenizers[0]


def _parts(
    loaded: loader.LoadedModel, choice: ModelChoice, config: EngineConfig, notify: Callable[[str], None]
) -> EngineParts:
    head = _load_head(loaded, choice, config)
    drafter: str = config.drafter
    if drafter == "auto":
        drafter = "mtp" if head is not None else "none"
    disk = _prefix_disk(loaded, head, config)
    trunk, vision = loaded.trunk, loaded.vision
    trunk.prepare_for_serving()
    if head is not None:
        head.prepare_for_serving(trunk)
    # On a device that outruns its host, decode passes are traced in few shapes, steps are overlapped, and the
    # head is never paused.
    outruns = machine.outruns_host()
    vision_encoder = vision.encoder if vision is not None else None
    write_block = None if disk is None else disk.write
    # Where attention reads blocks in place, rows keep their cells by blocks, so that each costs what it
    # holds. Elsewhere it would have to copy them: there every slot is as long as the longest row's.
    runner = Runner(
        trunk,
        head,
        write_block,
        vision_encoder,
        config.image_cache_bytes,
        compiles=outruns,
        block_size=BLOCK_SIZE if trunk.reads_blocks else None,
    )
    facts = ModelFacts(
        name=str(choice.model),
        vocab_size=trunk.vocab_size,
        max_context=min(trunk.max_context, config.max_context or trunk.max_context),
        eos_ids=loaded.eos_ids,
        drafter=drafter,
        head=head.source if head is not None else None,
        head_layers=len(head.layers) if head is not None else 0,
        can_pause_head=not outruns,  # a step in which a head catches up is neither traced nor overlapped
        dtype=str(trunk.dtype).removeprefix("mlx.core."),
        weight_bits=tuple(sorted({layer.bits for _, layer in quantized_layers(trunk.model)})),
        device=machine.device_name(),
        reads_images=vision is not None,
        no_images_reason=loaded.no_images_reason,
        sampling=loaded.sampling,
    )
    memory = _memory_plan(config, vision is not None)
    geometry, most_rows = runner.geometry(config.capacity_step), MAX_ROWS if outruns else MAX_CPU_ROWS
    max_rows = config.max_rows or default_max_rows(geometry, memory.rows, most_rows)
    tokenizer, eos_ids, vocab_size = loaded.tokenizer, loaded.eos_ids, trunk.vocab_size
    # The lambda outlives the engine's parts, so it must not hold the trunk.
    grammars = GrammarCompiler(lambda: tokenizer_source(tokenizer, vocab_size, eos_ids))
    if config.auto_depth == "auto":
        name = _fingerprint(loaded, head, choice, facts, max_rows)
        controller = _controller(name, runner, facts, max_rows, memory.rows, notify)
    else:
        name = None
        controller = new_controller(None, None, outruns, _measured_prompts(runner, facts, memory.rows))
    return EngineParts(
        runner,
        facts,
        memory.rows,
        answer_texts(tokenizer, trunk.vocab_size),
        grammars,
        controller,
        partial(_save_measurements, name, controller),
        memory.prefixes,
        disk,
        vision.reader if vision is not None else None,
        max_rows=max_rows,
        memory=memory,
        held_bytes=machine.held_bytes,
        overlaps_steps=outruns,
        token_text=token_texts(tokenizer, trunk.vocab_size),
    )


def _controller(
    name: str,
    runner: Runner,
    facts: ModelFacts,
    max_rows: int,
    budget_bytes: int,
    notify: Callable[[str], None],
) -> DepthController:
    """A controller with the stored costs and acceptance rates. Invalid or missing costs are measured now."""
    few = runner.compiles
    found = cost_store.load(name)
    clock = machine.step_clock()
    if found is not None and calibration.is_still_valid(
        runner, facts.vocab_size, found.measured, clock=clock
    ):
        costs = CostTable(found.measured, found.corrections)
        return new_controller(costs, found.acceptance, few, found.prompts)
    notify("Measuring what drafts and prompts cost on this machine, once for this model")
    acceptance = found.acceptance if found is not None else ModelAcceptance()
    measured = calibration.measure(
        runner, facts.vocab_size, max_rows, facts.max_context, budget_bytes, clock=clock
    )
    prompts = _measured_prompts(runner, facts, budget_bytes)
    if measured is None:
        return new_controller(None, acceptance, few, prompts)
    controller = new_controller(CostTable(measured), acceptance, few, prompts)
    cost_store.save(name, controller.costs, acceptance, prompts)
    return controller


def _measured_prompts(runner: Runner, facts: ModelFacts, budget_bytes: int) -> MeasuredPromptCosts | None:
    return measure_prompts(
        runner,
        facts.vocab_size,
        facts.max_context,
        budget_bytes,
        clock=machine.step_clock(),
        extra_bytes=machine.extra_bytes,
    )


def _save_measurements(name: str | None, controller: DepthController) -> None:
    if name is not None:
        cost_store.save(name, controller.costs, controller.acceptance, controller.prompt_costs.measured)


def _fingerprint(
    loaded: loader.LoadedModel,
    head: heads.LoadedHead | None,
    choice: ModelChoice,
    facts: ModelFacts,
    max_rows: int,
) -> str:
    """Identifies everything that the costs and the acceptance rates of a model depend on."""
    files = [*sorted(loaded.path.glob("*.safetensors")), *([Path(head.source)] if head is not None else [])]
    multiplies = blas.report()
    return cost_store.fingerprint(
        {
            "version": __version__,
            "mlx": importlib.metadata.version("mlx"),
            "config": loaded.config,
            "files": [(file.name, file.stat().st_size) for file in files if file.is_file()],
            "draft_vocabulary": choice.draft_vocabulary,
            "device": facts.device,
            "dtype": facts.dtype,
            "weight_bits": facts.weight_bits,
            "drafter": facts.drafter,
            "rows": calibration.max_measured_rows(max_rows),
            "machine": (platform.machine(), os.cpu_count(), multiplies.name, multiplies.threads),
            "kernel": multiplies.kernel,
        }
    )


def _memory_plan(config: EngineConfig, reads_images: bool) -> MemoryPlan:
    """Call it once the weights are loaded."""
    plan = plan_memory(config, machine.free_bytes(), machine.held_bytes()["arrays"], reads_images)
    if plan.excess:
        log.warning(
            "weights (%.2f GB), --memory-budget (%.2f), cached prefixes (%.2f) and images (%.2f) exceed the "
            "memory of %.2f GB that this process may take: the system may end it. Give smaller budgets.",
            *(part / 1e9 for part in (plan.weights, plan.rows, plan.prefixes, plan.images, plan.limit)),
        )
    machine.limit_buffers(plan.steps)
    return plan


def _prefix_disk(
    loaded: loader.LoadedModel, head: heads.LoadedHead | None, config: EngineConfig
) -> DiskTier | None:
    if config.prefix_cache_dir is None:
        return None
    layers = head.layers if head is not None else ()
    spec = head.spec if head is not None else None
    facts = loaded.trunk.layout, spec, loaded.config, BLOCK_SIZE, dtypes.arithmetic(loaded.trunk.model)
    name = fingerprint([loaded.trunk.model, *layers], *facts)
    try:
        folder = BlockFolder(Path(config.prefix_cache_dir).expanduser(), name, config.prefix_cache_disk_bytes)
    except OSError as error:
        raise InvalidConfig(
            f"the prefix cache cannot use the folder {config.prefix_cache_dir}: {error.strerror}. "
            "Mend that, or name another folder."
        ) from error
    return DiskTier(folder)


def _load_head(
    loaded: loader.LoadedModel, choice: ModelChoice, config: EngineConfig
) -> heads.LoadedHead | None:
    """The head that the user names, or one beside the model, in its checkpoint, or shipped with Outrider."""
    if config.drafter in ("ngram", "none"):
        return None
    source: Path | heads.HeadFiles | None
    try:
        if choice.head is not None:
            source = Path(choice.head)
        else:
            source = heads.locate(loaded.path) or shipped_head(loaded.path)
        if source is not None:
            return heads.load_head(source, loaded.trunk, choice.draft_vocabulary, loaded.config, choice.dtype)
    except heads.HeadError as error:  # the head is unknown, incomplete or damaged
        if choice.head is not None or config.drafter == "mtp":
            raise
        log.warning("%s Answering without drafts: %s.", error, _ways_to_a_head(loaded))
        return None
    if config.drafter == "mtp":
        raise InvalidConfig(_no_head(loaded))
    if heads.expected(loaded.config):
        log.warning("%s Answering without drafts.", _no_head(loaded))
    return None


def _ways_to_a_head(loaded: loader.LoadedModel) -> str:
    path = loaded.path
    return (
        f"take a head out of the original checkpoint (outrider mtp extract ORIGINAL --into {path}), or "
        f"train one (outrider mtp train {path})"
    )


def _no_head(loaded: loader.LoadedModel) -> str:
    train = f"train one (outrider mtp train {loaded.path})"
    if heads.expected(loaded.config):
        return (
            f"{loaded.path} was converted without its MTP head. Take it out of the original "
            f"(outrider mtp extract ORIGINAL --into {loaded.path}), or {train}."
        )
    return (
        'drafter="mtp" needs an MTP head, and there is none beside this model or in its checkpoint: '
        f"{train}, "
        'pass head=FILE, or use drafter="ngram" or "auto".'
    )
