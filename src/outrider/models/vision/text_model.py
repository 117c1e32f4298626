"""The language part of a vision checkpoint, loaded as mlx-lm's text model: its config and its weight names.

mlx-lm loads Qwen's vision checkpoints itself. This module translates those of idefics3 and smolvlm.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from outrider.models.vision.families import VisionFamily
from outrider.models.vision.mrope import MRopeSections

# The names of Hugging Face, old and new, and of mlx-vlm's conversions.
IDEFICS_TEXT = re.compile(r"^(?:model\.text_model|text_model|language_model)\.")
IDEFICS_VISION = re.compile(r"^(?:model\.)?(?:vision_model|connector)\.")
OUTPUT = re.compile(r"^(?:language_model\.)?lm_head\.")
ROPE_THETA = 10000.0  # Hugging Face's default for configs without rope_theta


def text_classes(family: VisionFamily, path: Path) -> Any:
    """The `get_model_classes` for `mlx_lm.utils.load_model`; None where mlx-lm knows the checkpoint."""
    if family.images != "tiles":
        return None
    names = {str(name) for file in path.glob("model*.safetensors") for name in mx.load(str(file))}
    return _idefics_classes(any(OUTPUT.match(name) for name in names))


def mrope_sections(family: VisionFamily, config: Mapping[str, Any]) -> MRopeSections | None:
    if family.mrope is None:
        return None
    text = config.get("text_config") or config
    scaling = text.get("rope_parameters") or text.get("rope_scaling") or config.get("rope_scaling") or {}
    return MRopeSections(tuple(scaling["mrope_section"]), family.mrope)


def _idefics_classes(has_output: bool) -> Any:
    """A llama in an idefics3 or smolvlm checkpoint."""

    def classes(config: Mapping[str, Any]) -> tuple[type[nn.Module], type]:
        from mlx_lm.models import llama

        class LanguagePart(llama.Model):
            def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
                own = (item for item in weights.items() if not IDEFICS_VISION.match(item[0]))
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
    """The config of the llama in it. transformers 5 writes rope_theta into `rope_parameters`."""
    nested = text.get("rope_parameters") or {}
    theta = text.get("rope_theta") or nested.get("rope_theta") or ROPE_THETA
    return {**text, "model_type": "llama", "rope_theta": theta, "tie_word_embeddings": tied}
