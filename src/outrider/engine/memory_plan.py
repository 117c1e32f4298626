"""What each part of the server may take of the memory, and how many rows that allows by default. Pure data.

limit     of the device, the machine or the container
  weights     loaded already, with whatever else the process holds by then
  rows        KV caches of running requests (engine/row_caches.py)
  prefixes    cached prefixes (engine/prefix/)
  images      cached embeddings of images
  steps       the rest: the arrays that a step computes with, and buffers that MLX keeps for the next step
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.config import EngineConfig
from outrider.plan import CacheGeometry

CACHE_SHARE = 0.6  # of the memory that is free after the weights are loaded, for rows and prefixes; by hand
PREFIX_SHARE = 0.25  # of the memory for caches is for cached prefixes; chosen by hand
MIN_CACHE_BYTES = 64 << 20  # for caches, however little is free; chosen by hand
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

    @property
    def excess(self) -> int:
        """By how much the parts exceed the limit."""
        return max(0, self.weights + self.rows + self.prefixes + self.images + self.steps - self.limit)


@dataclass(frozen=True)
class MemoryUse:
    """What the parts take now. "steps" is all that the other parts do not explain."""

    plan: MemoryPlan
    rows: int
    prefixes: int
    images: int
    held: int  # of all arrays and buffers of MLX

    @property
    def limit_bytes(self) -> int:
        return self.plan.limit

    @property
    def used(self) -> dict[str, int]:
        weights, rows, prefixes, images = self.plan.weights, self.rows, self.prefixes, self.images
        steps = max(0, self.held - weights - rows - prefixes - images)
        return _by_part(weights, rows, prefixes, images, steps)

    @property
    def budgets(self) -> dict[str, int]:
        plan = self.plan
        return _by_part(plan.weights, plan.rows, plan.prefixes, plan.images, plan.steps)


def _by_part(weights: int, rows: int, prefixes: int, images: int, steps: int) -> dict[str, int]:
    return {"weights": weights, "rows": rows, "prefixes": prefixes, "images": images, "steps": steps}


def plan_memory(config: EngineConfig, free_bytes: int, weight_bytes: int, reads_images: bool) -> MemoryPlan:
    """Settings that are None get a part of the memory that is free once the weights are loaded."""
    images = config.image_cache_bytes if reads_images else 0
    rows, prefixes = config.memory_budget_bytes, config.prefix_cache_bytes
    if rows is None:
        left = free_bytes - images
        share = max(MIN_CACHE_BYTES, int(CACHE_SHARE * left))
        prefixes = int(share * PREFIX_SHARE) if prefixes is None else prefixes
        rows = max(share - prefixes, share // 4)
    elif prefixes is None:
        prefixes = int(rows * PREFIX_SHARE)
    steps = max(MIN_STEP_BYTES, free_bytes - rows - prefixes - images)
    return MemoryPlan(free_bytes + weight_bytes, weight_bytes, rows, prefixes, images, steps)


def default_max_rows(geometry: CacheGeometry, row_bytes: int, most: int = MAX_ROWS) -> int:
    """As many rows of a modest length as the memory for rows holds, within bounds."""
    one = geometry.num_bytes(1, geometry.capacity_for(ROW_TOKENS))
    return min(most, max(MIN_ROWS, row_bytes // max(1, one)))
