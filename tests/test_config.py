"""The operator's choices are checked before anything is built."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from outrider.config import CACHE_LAYOUTS, DRAFTERS, EngineConfig, InvalidConfig

REFUSED: dict[str, list[Any]] = {
    "max_rows": [0, -1, True, 1.5, "4", math.nan, [4]],
    "max_context": [1, 0, True, 1.5, "4096", math.inf],
    "memory_budget_bytes": [0, -1, True, 1e9, "1GB"],
    "prefill_step_size": [0, -1, True, 1.5, "512"],
    "max_stall_ms": [-1, True, None, 1.5, "200", math.nan],
    "kv_bits": [0, 3, 2, 64, True, 8.0, "8", math.nan],
    "drafter": [None, "", "MTP", "n-gram", True, 3, ["mtp"]],
    "cache_layout": [None, "", "paged", True, ["slots"]],
    "rank_head": [None, "", "half", True, 2, ["whole"]],
    "auto_depth": [-1, 9, True, None, 2.0, "2", "automatic", math.nan],
    "capacity_step": [15, 0, -16, True, None, 16.0, "256"],
    "image_cache_bytes": [0, -1, True, None, 1e9],
    "max_adapters": [-1, True, None, 1.5, "4"],
    "adapter_memory_bytes": [0, -1, True, None, 1e9],
    "prefix_cache_bytes": [-1, True, 1.5, "1GB"],
    "prefix_cache_dir": [3, True, Path("x")],
    "prefix_cache_disk_bytes": [0, -1, True, None, 1e9],
}

ACCEPTED: dict[str, list[Any]] = {
    "max_rows": [None, 1, 128],
    "max_context": [None, 2, 10**6],
    "memory_budget_bytes": [None, 1, 2**40],
    "prefill_step_size": [None, 1, 8192],
    "max_stall_ms": [0, 1, 200, 10_000],
    "kv_bits": [None, 4, 8, 16, 32],
    "drafter": list(DRAFTERS),
    "cache_layout": list(CACHE_LAYOUTS),
    "rank_head": ["auto", "whole", "divided"],
    "auto_depth": ["auto", 0, 8],
    "capacity_step": [16, 256, 1000],
    "image_cache_bytes": [1, 256 << 20],
    "max_adapters": [0, 1, 64],
    "adapter_memory_bytes": [1, 2**40],
    "prefix_cache_bytes": [None, 0, 2**40],
    "prefix_cache_dir": [None, "somewhere"],
    "prefix_cache_disk_bytes": [1, 2**40],
}


def cases(table: dict[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(name, value, id=f"{name}-{i}") for name in table for i, value in enumerate(table[name])
    ]


@pytest.mark.parametrize(("name", "value"), cases(REFUSED))
def test_refused_with_the_name_of_the_field(name: str, value: Any) -> None:
    with pytest.raises(InvalidConfig, match=name):
        EngineConfig(**{name: value})


@pytest.mark.parametrize(("name", "value"), cases(ACCEPTED))
def test_accepted_as_it_is(name: str, value: Any) -> None:
    assert getattr(EngineConfig(**{name: value}), name) == value


def test_a_folder_for_a_prefix_cache_that_is_off_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="prefix_cache_dir needs"):
        EngineConfig(prefix_cache_bytes=0, prefix_cache_dir="somewhere")


def test_the_tables_name_every_field() -> None:
    assert set(REFUSED) == set(ACCEPTED) == set(EngineConfig.__dataclass_fields__)
