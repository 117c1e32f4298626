"""Who keeps cells by blocks, and who by slots."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from outrider import build_caches
from outrider.build_caches import block_size_of
from outrider.cache.ragged_kv import KVSpec
from outrider.config import CacheLayout, InvalidConfig
from outrider.plan import BLOCK_SIZE


def on(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA has tensor cores for heads of 128 elements."""
    monkeypatch.setattr(build_caches.machine, "is_cpu", lambda: device == "CPU")
    monkeypatch.setattr(
        build_caches.cuda_attention, "supports", lambda dim, dtype: device == "CUDA" and dim == 128
    )


def trunk(dims: tuple[int, ...] = (128, 128), kv_bits: int | None = None, reads_blocks: bool = True) -> Any:
    specs = [KVSpec(2, dim, dim, mx.bfloat16) for dim in dims]
    return SimpleNamespace(kv_specs=specs, kv_bits=kv_bits, reads_blocks=reads_blocks)


@pytest.mark.parametrize(
    ("device", "model", "layout", "has_blocks"),
    [
        ("CPU", trunk(), "auto", True),
        ("CPU", trunk(reads_blocks=False), "auto", False),
        ("CUDA", trunk(), "auto", True),
        ("CUDA", trunk(), "slots", False),
        ("CUDA", trunk(reads_blocks=False), "auto", False),
        ("CUDA", trunk((128, 96)), "auto", False),
        ("CUDA", trunk((128, 96)), "blocks", True),
        ("CUDA", trunk((96,), kv_bits=8), "auto", True),
        ("CUDA", trunk(()), "auto", False),
        ("Metal", trunk(), "auto", False),
        ("Metal", trunk(), "blocks", True),
        ("Metal", trunk(kv_bits=8), "auto", True),
    ],
)
def test_blocks_are_used_where_they_are_as_fast_as_slots(
    monkeypatch: pytest.MonkeyPatch, device: str, model: Any, layout: CacheLayout, has_blocks: bool
) -> None:
    on(device, monkeypatch)
    assert block_size_of(model, layout) == (BLOCK_SIZE if has_blocks else None)


def test_blocks_that_attention_would_copy_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on("CUDA", monkeypatch)
    with pytest.raises(InvalidConfig, match="reads blocks in place"):
        block_size_of(trunk(reads_blocks=False), "blocks")
