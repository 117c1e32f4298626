"""LLM inference on MLX in which every request accepts and rolls back its own drafts, in one shared step."""

from typing import TYPE_CHECKING, Any

from outrider import mlx_settings
from outrider.config import EngineConfig, InvalidConfig
from outrider.cpu import blas
from outrider.request import InvalidRequest, SamplingParams, SpecPrefill

if TYPE_CHECKING:
    from outrider.llm import LLM, Completion

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Completion",
    "EngineConfig",
    "InvalidConfig",
    "InvalidRequest",
    "SamplingParams",
    "SpecPrefill",
]

# Both must come before anything imports mlx.core.
mlx_settings.activate()
blas.activate()


def __getattr__(name: str) -> Any:
    if name in ("LLM", "Completion"):
        from outrider import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'outrider' has no attribute {name!r}")
