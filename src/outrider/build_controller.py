"""The controller of an engine's drafts: with what this machine has stored of the model, or measured now.

Costs and acceptance rates are stored under a fingerprint of the model, the machine and the settings.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable

from outrider import __version__
from outrider.build_adapters import FusedAdapter
from outrider.cpu import blas, extension
from outrider.engine.validation import ModelFacts
from outrider.engine_place import Timing
from outrider.models import loader
from outrider.speculate import calibration, cost_store
from outrider.speculate.acceptance import ModelAcceptance
from outrider.speculate.controller import DepthController
from outrider.speculate.costs import CostTable
from outrider.speculate.per_draft import new_controller
from outrider.speculate.prompt_calibration import measure_prompts
from outrider.speculate.prompt_costs import MeasuredPromptCosts
from outrider.step.device_drafter import LoadedDrafter
from outrider.step.ranks import Ranks


def stored_controller(
    name: str,
    timing: Timing,
    facts: ModelFacts,
    max_rows: int,
    budget_bytes: int,
    notify: Callable[[str], None],
) -> DepthController:
    """A controller with the stored costs and acceptance rates. Invalid or missing costs are measured now."""
    runner, clock = timing.runner, timing.clock
    few = runner.compiles
    found = cost_store.load(name)
    if found is not None and calibration.is_still_valid(
        runner, facts.vocab_size, found.measured, facts.drafted_context, budget_bytes, clock=clock
    ):
        costs = CostTable(found.measured, found.corrections)
        return new_controller(costs, found.acceptance, few, found.prompts, facts.copied_bytes)
    notify("Measuring what drafts and prompts cost on this machine, once for this model")
    acceptance = found.acceptance if found is not None else ModelAcceptance()
    measured = calibration.measure(
        runner, facts.vocab_size, max_rows, facts.drafted_context, budget_bytes, clock=clock
    )
    prompts = measured_prompts(timing, facts, budget_bytes)
    if measured is None:
        return new_controller(None, acceptance, few, prompts, facts.copied_bytes)
    controller = new_controller(CostTable(measured), acceptance, few, prompts, facts.copied_bytes)
    cost_store.save(name, controller.costs, acceptance, prompts)
    return controller


def measured_prompts(timing: Timing, facts: ModelFacts, budget_bytes: int) -> MeasuredPromptCosts | None:
    return measure_prompts(
        timing.runner,
        facts.vocab_size,
        facts.drafted_context,
        budget_bytes,
        clock=timing.clock,
        extra_bytes=timing.extra_bytes,
    )


def fingerprint(
    loaded: loader.LoadedModel,
    drafter: LoadedDrafter | None,
    draft_vocabulary: int | None,
    facts: ModelFacts,
    max_rows: int,
    fused: FusedAdapter | None,
    ranks: Ranks | None,
) -> str:
    """Identifies everything that the costs and the acceptance rates of a model depend on."""
    files = [*sorted(loaded.path.glob("*.safetensors")), *([] if drafter is None else drafter.weight_files)]
    multiplies = blas.report()
    return cost_store.fingerprint(
        {
            "version": __version__,
            "mlx": importlib.metadata.version("mlx"),
            "config": loaded.config,
            "files": [(file.name, file.stat().st_size) for file in files if file.is_file()],
            "draft_vocabulary": draft_vocabulary,
            "device": facts.device,
            "dtype": facts.dtype,
            "weight_bits": facts.weight_bits,
            "kv_bits": facts.kv_bits,
            "drafter": facts.drafter,
            "rows": calibration.max_measured_rows(max_rows),
            "machine": (platform.machine(), os.cpu_count(), multiplies.name, multiplies.threads),
            "kernel": multiplies.kernel,
            "native": extension.build_name(),
            "instructions": extension.instructions(),
            **({} if fused is None else {"adapter": fused.files.fingerprint}),
            **({} if facts.draft_model is None else {"draft_model": facts.draft_model}),
            **({} if ranks is None else {"ranks": ranks.size, "rank_head": facts.rank_head}),
        }
    )
