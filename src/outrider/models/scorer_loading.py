"""Makes a loaded model ready to skip tokens of prompts (spec_prefill), and finds what scores the tokens."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import mlx.nn as nn

from outrider.config import InvalidConfig
from outrider.models import loader
from outrider.models.gap_rope import use_gap_ropes
from outrider.models.prompt_scorer import PromptScorer
from outrider.models.trunk import Trunk

OWN_LAYERS = "self"  # as the scoring model: the first layers of the served model


def allow_gaps(trunk: Trunk, head_layers: Iterable[nn.Module]) -> None:
    """Call it before the layers are swapped for speed. Raises InvalidConfig if the model cannot."""
    trunk.allow_gaps()
    for layer in head_layers:
        use_gap_ropes(layer)


def load_scorer(
    loaded: loader.LoadedModel, model: str | Path, num_layers: int | None, dtype: str
) -> PromptScorer:
    """Call it once the layers of `loaded` are those that serve. Raises InvalidConfig."""
    if model == OWN_LAYERS:
        return PromptScorer(loaded.trunk, num_layers)
    small = loader.load(model, dtype)
    if small.tokenizer.get_vocab() != loaded.tokenizer.get_vocab():
        raise InvalidConfig(
            f"spec_prefill_model {model}: its vocabulary is not that of {loaded.path}, so it cannot score "
            f"prompts. Name a model of the same family, or {OWN_LAYERS!r} for the model's own first layers."
        )
    small.trunk.prepare_for_serving()
    return PromptScorer(small.trunk, num_layers)
