"""What an engine on several ranks needs: its configuration, and what ranks must agree on.

cli/tensor_parallel.py refuses the options that several ranks do not have.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outrider.config import EngineConfig, InvalidConfig
from outrider.cpu.quantized import is_kept, quantized_layers
from outrider.engine.adapters import AdapterConflict, AdapterRefused, AdapterStore
from outrider.models import loader
from outrider.models.adapters.store import TrunkAdapters
from outrider.models.files.weights_digest import weights_digest
from outrider.plan import AdapterInfo
from outrider.step.ranks import Ranks


def config_for_ranks(config: EngineConfig, num_adapters: int, ranks: Ranks | None) -> EngineConfig:
    """Several ranks load no more adapters than `num_adapters`, at the start.

    Raises InvalidConfig for an option that needs several ranks.
    """
    if ranks is None and config.rank_head != "auto":
        raise InvalidConfig(
            f'rank_head="{config.rank_head}" (--rank-head) is for a model on several ranks, and this is one: '
            "leave it out"
        )
    if ranks is None or num_adapters > config.max_adapters:  # too many are refused when they are loaded
        return config
    return replace(config, max_adapters=num_adapters)


def facts_of_rank(loaded: loader.LoadedModel, block_size: int | None) -> dict[str, str]:
    """What has to be the same on all ranks, beside the versions and the head (build_head.py)."""
    layers = quantized_layers(loaded.trunk.model)
    return {
        "weight files": weights_digest(loaded.path),
        "model config": repr(loaded.config),
        "--dtype": str(loaded.trunk.dtype),
        "--kv-bits": str(loaded.trunk.kv_bits),
        "cache layout": "slots" if block_size is None else f"blocks of {block_size}",
        "native operations on CPUs": str(any(is_kept(layer) for _, layer in layers)),
    }


def free_bytes_of_ranks(free_bytes: int, ranks: Ranks | None) -> int:
    """Memory that each rank can take, whatever its machine is; `free_bytes`: of this one's.

    All ranks hold caches of the same size. Those that share a machine or a device share its memory. Call it
    when all ranks have loaded their weights.
    """
    if ranks is None:
        return free_bytes
    places = ranks.digests(f"{platform.node()} {os.environ.get('CUDA_VISIBLE_DEVICES')}")
    return ranks.smallest(free_bytes // places.count(places[ranks.rank]))


def adapters_of_ranks(adapters: TrunkAdapters, ranks: Ranks | None) -> AdapterStore:
    """What the engine may do with its adapters. Raises RanksDiffer if other ranks have loaded other ones."""
    if ranks is None:
        return adapters
    loaded = [(own.id, own.name, own.fingerprint) for own in adapters.loaded.values()]
    ranks.check_same({"adapters": repr(loaded)})
    return _AdaptersOfStart(adapters)


class _AdaptersOfStart:
    """The adapters of an engine on several ranks: each rank has loaded its part of them at the start.

    Implements `AdapterStore` of engine/adapters.py.
    """

    def __init__(self, adapters: TrunkAdapters) -> None:
        self.loaded: Mapping[str, AdapterInfo] = adapters.loaded
        self.for_all: AdapterInfo | None = None
        self.num_bytes = adapters.num_bytes
        self.reader = adapters.reader

    def load(self, name: str, files: Any) -> AdapterInfo:
        raise AdapterRefused(
            f"the adapter {name} cannot be loaded: on several ranks adapters are loaded at the start only. "
            "Name it in --adapters."
        )

    def unload(self, name: str) -> None:
        raise AdapterConflict(f"the adapter {name} stays loaded: on several ranks adapters are not unloaded.")
