"""Runs all checks of `outrider doctor` in their order. An error is a failed check."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from outrider.bench.environment import environment
from outrider.cli.doctor.invariance import Comparison, compare
from outrider.cli.doctor.random_model import RandomModel, random_model
from outrider.cli.doctor.report import Outcome, Report
from outrider.cli.doctor.step_times import StepTimes, step_times
from outrider.config import EngineConfig
from outrider.cpu import extension
from outrider.engine.memory_plan import plan_memory
from outrider.models import cgroup, machine
from outrider.models.kernel_checks import Check, all_checks

Tell = Callable[[str], None]  # what is done next


@dataclass(frozen=True)
class Effort:
    """How much is checked."""

    models: tuple[tuple[str, int | None], ...]  # kind and bits
    num_tokens: int  # of each answer
    timed: tuple[str, int | None]  # the model whose steps are timed
    rows: tuple[int, ...]
    widths: tuple[int, ...]


FULL = Effort(
    models=(("dense", 4), ("hybrid", 4), ("hybrid", None)),
    num_tokens=48,
    timed=("larger", 4),
    rows=(1, 4, 16),
    widths=(1, 2, 5, 9),
)
QUICK = Effort(models=(("hybrid", 4),), num_tokens=12, timed=("dense", 4), rows=(1, 4), widths=(1, 5))


def examine(effort: Effort, tell: Tell) -> Report:
    started_s = time.perf_counter()
    machine.settle()
    outcomes = [_checked(check, tell) for check in all_checks()]
    for kind, bits in effort.models:
        outcomes += _compared(kind, bits, effort.num_tokens, tell)
    timed, times = _timed(effort, tell)
    return Report(
        environment=environment(),
        device=_device(),
        memory=_memory(),
        outcomes=(*outcomes, timed),
        step_times=times,
        seconds=time.perf_counter() - started_s,
    )


def num_stages(effort: Effort) -> int:
    """Calls of `tell`, if no check raises an error."""
    num_shapes = len(effort.rows) * len(effort.widths)
    num_checks = sum(check.applies() for check in all_checks())
    return num_checks + len(effort.models) * (1 + NUM_COMPARISONS) + 1 + num_shapes


NUM_COMPARISONS = 5  # of a model


def _checked(check: Check, tell: Tell) -> Outcome:
    if not check.applies():
        return Outcome(check.name, "skipped", "not for this device")
    tell(check.name)
    try:
        if check.run():
            return Outcome(check.name, "ok")
    except Exception as error:
        return Outcome(check.name, "failed", _text(error))
    fallback = check.fallback()
    if fallback is None:
        return Outcome(check.name, "off", "it disagrees with the portable form")
    return Outcome(check.name, "off", f"{fallback.reason}. Used instead: {fallback.instead}")


def _compared(kind: str, bits: int | None, num_tokens: int, tell: Tell) -> Iterator[Outcome]:
    name = f"drafter invariance, {kind}{'' if bits is None else f', {bits} bits'}"
    tell(name)
    try:
        model = random_model(kind, bits)
        for comparison in compare(model, num_tokens):
            found = _outcome(comparison)
            tell(found.name)
            yield found
    except Exception as error:
        yield Outcome(name, "failed", _text(error))


def _outcome(comparison: Comparison) -> Outcome:
    name = f"drafter invariance, {comparison.model}: {comparison.name}"
    if comparison.problem is not None:
        return Outcome(name, "failed", f"{comparison.problem} ({comparison.summary})")
    return Outcome(name, "ok", comparison.summary)


def _timed(effort: Effort, tell: Tell) -> tuple[Outcome, StepTimes | None]:
    tell("step times")
    try:
        model: RandomModel = random_model(*effort.timed)
        times = step_times(model, effort.rows, effort.widths, lambda: tell("step times"))
    except Exception as error:
        return Outcome("step times", "failed", _text(error)), None
    return Outcome("step times", "ok"), times


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _device() -> dict[str, Any]:
    info = {} if machine.is_cpu() else dict(mx.device_info())
    compilers = [path for path in map(shutil.which, extension.COMPILERS) if path]
    return {
        "name": machine.device_name(),
        "platform": platform.platform(),
        "metal": mx.metal.is_available(),
        "cuda": mx.cuda.is_available(),
        "compiler": compilers[0] if compilers else None,
        "instructions": extension.instructions(),  # of the native extension
        "load": round(os.getloadavg()[0], 1),  # of other processes: step times are longer then
        **info,
    }


def _memory() -> dict[str, int | None]:
    """Bytes: what is free now, and what a server without a model would give to its caches."""
    free = machine.free_bytes()
    plan = plan_memory(EngineConfig(), free, 0, reads_images=False)
    return {
        "free": free,
        "free_in_container": cgroup.free_bytes(),
        "for_rows": plan.rows,
        "for_prefixes": plan.prefixes,
    }
