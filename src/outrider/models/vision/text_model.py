"""The language part of a vision checkpoint, as mlx-lm's own text model: its config and its weights' names.

mlx-lm knows some vision checkpoints by itself (Qwen's); the rest are told here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from outrider.models.vision.families import VisionFamily
from outrider.models.vision.mrope import use_sections

# Hugging Face's names, old and new, and those of mlx-vlm's conversions.
IDEFICS_TEXT = re.compile(r"^(?:model\.text_model|text_model|language_model)\.")
IDEFICS_TOWER = re.compile(r"^(?:model\.)?(?:vision_model|connector)\.")
OUTPUT = re.compile(r"^(?:language_model\.)?lm_head\.")
ROPE_THETA = 10000.0  # Hugging Face's, where a config does not say


def text_classes(family: VisionFamily, path: Path) -> Any:
    """For `mlx_lm.utils.load_model(get_model_classes=...)`, where mlx-lm does not know the checkpoint."""
    if family.pictures != "tiles":
        return None
    names = {str(name) for file in path.glob("model*.safetensors") for name in mx.load(str(file))}
    return _idefics_classes(any(OUTPUT.match(name) for name in names))


def prepare_rope(network: nn.Module, family: VisionFamily, config: Mapping[str, Any]) -> None:
    """Give the text model the rope that its pictures need."""
    if family.mrope is not None:
        text = config.get("text_config") or config
        scaling = text.get("rope_parameters") or text.get("rope_scaling") or config.get("rope_scaling") or {}
        use_sections(network, scaling["mrope_section"], family.mrope)


def _idefics_classes(has_output: bool) -> Any:
    """A llama in an idefics3 or smolvlm checkpoint."""

    def classes(config: Mapping[str, Any]) -> tuple[type[nn.Module], type]:
        from mlx_lm.models import llama

        class LanguagePart(llama.Model):
            def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
                own = (item for item in weights.items() if not IDEFICS_TOWER.match(item[0]))
                named: dict[str, mx.array] = super().sanitize({_text_name(name): w for name, w in own})
                return named

        class LanguageArgs(llama.ModelArgs):
            @classmethod
            def from_dict(cls, params: Mapping[str, Any]) -> Any:
                tied = bool(params.get("tie_word_embeddings")) or not has_output
                return llama.ModelArgs.from_dict(_llama_config(params["text_config"], tied))

        return LanguagePart, LanguageArgs

    return classes


def _text_name(name: str) -> str:
    if OUTPUT.match(name):
        return OUTPUT.sub("lm_head.", name)
    return IDEFICS_TEXT.sub("model.", name)


def _llama_config(text: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    """transformers 5 keeps rope's base one level down."""
    nested = text.get("rope_parameters") or {}
    theta = text.get("rope_theta") or nested.get("rope_theta") or ROPE_THETA
    return {**text, "model_type": "llama", "rope_theta": theta, "tie_word_embeddings": tied}
