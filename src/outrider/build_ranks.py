"""What an engine on several ranks needs: a configuration that ranks support, and what ranks must agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.config import EngineConfig, InvalidConfig
from outrider.models import loader
from outrider.models.files.weights_digest import weights_digest
from outrider.step.ranks import Ranks


def checked_for_ranks(config: EngineConfig, beyond: Sequence[str], ranks: Ranks | None) -> EngineConfig:
    """The configuration, without adapters on several ranks. Raises InvalidConfig.

    `beyond`: what the model is to have and several ranks cannot have.
    """
    if ranks is None:
        return config
    if beyond:
        raise InvalidConfig(f"{' and '.join(beyond)} cannot be used on several ranks yet: leave that out")
    return replace(config, max_adapters=0)


def facts_of_rank(loaded: loader.LoadedModel, config: EngineConfig, block_size: int | None) -> dict[str, str]:
    """What has to be the same on all ranks, beside the versions. (Only rank 0 has an MTP head.)"""
    return {
        "weight files": weights_digest(loaded.path),
        "model config": repr(loaded.config),
        "--dtype": str(loaded.trunk.dtype),
        "--kv-bits": str(config.kv_bits),
        "cache layout": "slots" if block_size is None else f"blocks of {block_size}",
    }
