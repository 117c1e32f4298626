"""What an engine on several ranks needs: a configuration that ranks support, and what ranks must agree on."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import replace

from outrider import __version__
from outrider.config import EngineConfig, InvalidConfig
from outrider.models import loader
from outrider.step import step_message
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


def facts_of_rank(loaded: loader.LoadedModel, config: EngineConfig, block_size: int | None) -> str:
    """What has to be the same on all ranks."""
    files = sorted((file.name, file.stat().st_size) for file in loaded.path.glob("*.safetensors"))
    versions = __version__, importlib.metadata.version("mlx"), importlib.metadata.version("mlx-lm")
    return repr((versions, step_message.VERSION, loaded.config, files, block_size, config.kv_bits))
