"""What each part of the server may take of the memory, and how many rows that allows by default. Pure data.

limit     of the device, the machine or the container
  weights     loaded already, with whatever else the process holds by then
  rows        KV caches of running requests (engine/row_caches.py)
  prefixes    cached prefixes (engine/prefix/)
  images      cached embeddings of images
  adapters    LoRA and DoRA adapters that requests can name
  steps       the rest: the arrays that a step computes with, and buffers that MLX keeps for the next step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.config import EngineConfig, InvalidConfig
from outrider.plan import CacheGeometry

CACHE_SHARE = 0.6  # of the memory that is free after the weights are loaded, for rows and prefixes; by hand
PREFIX_SHARE = 0.25  # of the memory for caches is for cached prefixes; chosen by hand
MIN_CACHE_BYTES = 64 << 20  # for caches, however little is free; chosen by hand
STEP_SHARE = 0.1  # of the memory for several models is for their steps; chosen by hand
MIN_STEP_BYTES = 64 << 20  # for steps, however little is free; chosen by hand

ROW_TOKENS = 2048  # tokens of a row by which the default number of rows is counted; chosen by hand
MIN_ROWS = 16  # default number of rows, at least; chosen by hand
# At most, on GPUs and on CPUs. On two cores 64 rows were half as fast as 16 rows and a queue (docs/LOG.md,
# "Sixty-four rows on a CPU").
MAX_ROWS, MAX_CPU_ROWS = 64, 16


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes. The parts add up to the limit, unless the operator's settings exceed it."""

    limit: int
    weights: int
    rows: int
    prefixes: int
    images: int
    steps: int
    adapters: int = 0

    @property
    def excess(self) -> int:
        """By how much the parts exceed the limit."""
        caches = self.rows + self.prefixes + self.images + self.adapters
        return max(0, self.weights + caches + self.steps - self.limit)


@dataclass(frozen=True)
class MemoryUse:
    """What the parts take now. "steps" is all that the other parts do not explain."""

    plan: MemoryPlan
    rows: int
    prefixes: int
    images: int
    held: int  # of all arrays and buffers of MLX
    adapters: int = 0

    @property
    def limit_bytes(self) -> int:
        return self.plan.limit

    @property
    def used(self) -> dict[str, int]:
        weights, rows, prefixes, images = self.plan.weights, self.rows, self.prefixes, self.images
        steps = max(0, self.held - weights - rows - prefixes - images - self.adapters)
        return _by_part(weights, rows, prefixes, images, self.adapters, steps)

    @property
    def budgets(self) -> dict[str, int]:
        plan = self.plan
        return _by_part(plan.weights, plan.rows, plan.prefixes, plan.images, plan.adapters, plan.steps)


def _by_part(
    weights: int, rows: int, prefixes: int, images: int, adapters: int, steps: int
) -> dict[str, int]:
    caches = {"rows": rows, "prefixes": prefixes, "images": images, "adapters": adapters}
    return {"weights": weights, **caches, "steps": steps}


def adapter_bytes(config: EngineConfig) -> int:
    """Memory for adapters that requests can name."""
    return config.adapter_memory_bytes if config.max_adapters else 0


def plan_memory(config: EngineConfig, free_bytes: int, weight_bytes: int, reads_images: bool) -> MemoryPlan:
    """Settings that are None get a part of the memory that is free once the weights are loaded."""
    images = config.image_cache_bytes if reads_images else 0
    adapters = adapter_bytes(config)
    rows, prefixes = config.memory_budget_bytes, config.prefix_cache_bytes
    if rows is None:
        left = free_bytes - images - adapters
        share = max(MIN_CACHE_BYTES, int(CACHE_SHARE * left))
        prefixes = int(share * PREFIX_SHARE) if prefixes is None else prefixes
        rows = max(share - prefixes, share // 4)
    elif prefixes is None:
        prefixes = int(rows * PREFIX_SHARE)
    steps = max(MIN_STEP_BYTES, free_bytes - rows - prefixes - images - adapters)
    return MemoryPlan(free_bytes + weight_bytes, weight_bytes, rows, prefixes, images, steps, adapters)


@dataclass(frozen=True)
class MemoryShare:
    """What one of several models may take."""

    num_bytes: int  # weights, rows, prefixes, images and adapters
    step_bytes: int  # for steps of all models: they take turns
    weight_bytes: int = 0  # as the files tell; the loaded weights may take more


def step_reserve(limit_bytes: int) -> int:
    """Memory for the steps of several models, which take turns."""
    return max(MIN_STEP_BYTES, int(STEP_SHARE * limit_bytes))


def share_need(
    config: EngineConfig, weight_bytes: int, reads_images: bool, limit_bytes: int, all_weights: Sequence[int]
) -> tuple[int, int]:
    """(least, usual) bytes of one of several models. `limit_bytes`: of all models, without their steps.

    `all_weights`: of all models that are served. If all of them fit together, what they leave is divided
    evenly. Otherwise a model takes half of what it leaves itself.
    """
    fixed = weight_bytes + (config.image_cache_bytes if reads_images else 0) + adapter_bytes(config)
    rows, prefixes = config.memory_budget_bytes, config.prefix_cache_bytes
    if rows is not None:
        caches = rows + (int(rows * PREFIX_SHARE) if prefixes is None else prefixes)
        return fixed + caches, fixed + caches
    least = MIN_CACHE_BYTES + (prefixes or 0)
    left = limit_bytes - sum(all_weights)
    part = left // len(all_weights) if left >= len(all_weights) * least else (limit_bytes - fixed) // 2
    return fixed + least, fixed + max(least, part)


def plan_share(config: EngineConfig, share: MemoryShare, weight_bytes: int, reads_images: bool) -> MemoryPlan:
    """The plan of one of several models. Raises InvalidConfig if its weights leave no room for caches."""
    weights = max(weight_bytes, share.weight_bytes)
    images, adapters = config.image_cache_bytes if reads_images else 0, adapter_bytes(config)
    caches = share.num_bytes - weights - images - adapters
    rows, prefixes = config.memory_budget_bytes, config.prefix_cache_bytes
    if prefixes is None:
        prefixes = int((caches if rows is None else rows) * PREFIX_SHARE)
    rows = caches - prefixes if rows is None else rows
    if rows <= 0 or rows + prefixes > caches:
        raise InvalidConfig(
            f"its weights take {weights / 1e9:.2f} GB, and {caches / 1e9:.2f} GB of the "
            f"{share.num_bytes / 1e9:.2f} GB that it may take are left for caches: give a larger "
            "--memory-limit, or smaller budgets"
        )
    limit = share.num_bytes + share.step_bytes
    return MemoryPlan(limit, weights, rows, prefixes, images, share.step_bytes, adapters)


def default_max_rows(geometry: CacheGeometry, row_bytes: int, most: int = MAX_ROWS) -> int:
    """As many rows of a modest length as the memory for rows holds, within bounds."""
    one = geometry.num_bytes(1, geometry.capacity_for(ROW_TOKENS))
    return min(most, max(MIN_ROWS, row_bytes // max(1, one)))
