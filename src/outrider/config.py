"""What the operator chooses: the shape of the engine. Frozen, validated, no MLX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeGuard

from outrider.request import MAX_DEPTH, DraftDepth

DrafterName = Literal["auto", "mtp", "ngram", "none"]
DRAFTERS: tuple[DrafterName, ...] = ("auto", "mtp", "ngram", "none")


DTYPES = ("auto", "float32", "bfloat16", "float16")  # of weights


class InvalidConfig(ValueError):
    """The engine cannot be built as asked; the message says why and what would do."""


@dataclass(frozen=True)
class EngineConfig:
    """Limits and policy of one engine. `None` means: work it out from the model and the machine."""

    max_rows: int = 16
    max_context: int | None = None  # tokens; None: the model's own limit
    memory_budget_bytes: int | None = None  # for caches; None: a share of what the machine has left
    prefill_step_size: int | None = None  # prompt tokens in one step, over all rows
    drafter: DrafterName = "auto"
    auto_depth: DraftDepth = "auto"  # what draft_depth="auto" means: the controller's choice, or a constant
    capacity_step: int = 256  # cells by which capacity grows
    prefix_cache_bytes: int | None = None  # beside the rows' budget; None: a share of the same; 0: off
    prefix_cache_dir: str | None = None  # where prefixes outlive the process; None: nowhere
    prefix_cache_disk_bytes: int = 16 << 30
    picture_cache_bytes: int = 256 << 20  # for embeddings of pictures, beside the caches

    def __post_init__(self) -> None:
        _at_least("max_rows", self.max_rows, 1)
        _at_least("capacity_step", self.capacity_step, 16)
        _at_least("picture_cache_bytes", self.picture_cache_bytes, 1)
        if self.prefill_step_size is not None:
            _at_least("prefill_step_size", self.prefill_step_size, 1)
        if self.max_context is not None:
            _at_least("max_context", self.max_context, 2)
        if self.memory_budget_bytes is not None:
            _at_least("memory_budget_bytes", self.memory_budget_bytes, 1)
        self._check_prefix_cache()
        is_constant = _is_int(self.auto_depth) and 0 <= self.auto_depth <= MAX_DEPTH
        if self.auto_depth != "auto" and not is_constant:
            raise InvalidConfig(f'auto_depth must be "auto" or 0..{MAX_DEPTH}, not {self.auto_depth!r}')
        if self.drafter not in DRAFTERS:
            raise InvalidConfig(f"drafter must be one of {', '.join(DRAFTERS)}, not {self.drafter!r}")

    def _check_prefix_cache(self) -> None:
        if self.prefix_cache_bytes is not None:
            _at_least("prefix_cache_bytes", self.prefix_cache_bytes, 0)
        if self.prefix_cache_dir is not None and not isinstance(self.prefix_cache_dir, str):
            raise InvalidConfig(f"prefix_cache_dir must be a path as text, not {self.prefix_cache_dir!r}")
        _at_least("prefix_cache_disk_bytes", self.prefix_cache_disk_bytes, 1)
        if self.prefix_cache_dir is not None and self.prefix_cache_bytes == 0:
            raise InvalidConfig(
                "prefix_cache_dir needs a prefix cache in memory, and prefix_cache_bytes is 0: drop either"
            )


@dataclass(frozen=True)
class CacheGeometry:
    """What the caches of a model weigh: a pure function from a shape to bytes, shared by scheduler and cache.

    Buffers have one cell more than `capacity`: the last one takes the writes of padding.
    """

    bytes_per_cell: int  # over all layers and the head, for one slot
    bytes_per_slot: int = 0  # state that does not grow with length
    capacity_step: int = 256

    def capacity_for(self, num_cells: int) -> int:
        """The smallest capacity of whole pages that holds `num_cells`."""
        return -(-num_cells // self.capacity_step) * self.capacity_step

    def num_bytes(self, num_slots: int, capacity: int) -> int:
        if num_slots == 0:
            return 0
        return num_slots * ((capacity + 1) * self.bytes_per_cell + self.bytes_per_slot)


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _at_least(name: str, value: object, least: int) -> None:
    if not _is_int(value) or value < least:
        raise InvalidConfig(f"{name} must be a whole number of at least {least}, not {value!r}")
