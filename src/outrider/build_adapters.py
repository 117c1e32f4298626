"""Builds an engine's adapters: one that all requests are answered with, or those that requests name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from outrider.config import EngineConfig, InvalidConfig
from outrider.models import loader
from outrider.models.adapters.files import AdapterError, AdapterFiles, read_adapter
from outrider.models.adapters.fit import LayerTerms
from outrider.models.adapters.fuse import fuse
from outrider.models.trunk import Trunk


@dataclass(frozen=True)
class FusedAdapter:
    """The adapter of all requests, and its terms that could not be fused into the weights."""

    files: AdapterFiles
    terms: dict[str, LayerTerms]


def fuse_adapter(loaded: loader.LoadedModel, path: str | Path) -> FusedAdapter:
    """Fuse the adapter into the weights that are not quantised. Raises InvalidConfig."""
    try:
        files = read_adapter(path)
        return FusedAdapter(files, fuse(files, loaded.trunk.model))
    except AdapterError as error:
        raise InvalidConfig(f"the adapter cannot be used: {error}") from error


def use_for_all(trunk: Trunk, fused: FusedAdapter) -> None:
    """Every row computes with the terms that could not be fused. Raises InvalidConfig."""
    try:
        trunk.adapters.load_for_all(fused.files, fused.terms)
    except AdapterError as error:
        raise InvalidConfig(f"the adapter cannot be used: {error}") from error


def load_adapters(trunk: Trunk, adapters: Mapping[str, str | Path], config: EngineConfig) -> None:
    """Load the adapters that requests can name. Call it once the layers are those that serve."""
    if len(adapters) > config.max_adapters:
        raise InvalidConfig(
            f"{len(adapters)} adapters, and max_adapters (--max-adapters) allows {config.max_adapters}"
        )
    trunk.adapters.allow(config.max_adapters, config.adapter_memory_bytes)
    for name, path in adapters.items():
        try:
            trunk.adapters.load(name, trunk.adapters.reader(str(path)))
        except AdapterError as error:
            raise InvalidConfig(f"the adapter {name} cannot be loaded: {error}") from error
