"""Which vision families are served, and why the others are not: one table. Pure.

A family is a `model_type` of config.json. Its language part is one of mlx-lm's text families, which Outrider
runs as it runs any other; mlx-vlm brings the processor and the vision tower. Adding one is a row here and a
tiny checkpoint in tests/tiny_vision.py, whose media logits must equal mlx-vlm's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

PictureLayout = Literal["tiles", "grid"]


@dataclass(frozen=True)
class VisionFamily:
    package: str  # of mlx_vlm.models
    text: str  # mlx-lm's family of the language part
    pictures: PictureLayout  # how the processor cuts a picture, and so what the prompt says for it
    placeholder: str  # what chat templates write for a picture
    mrope: Literal["chunked", "interleaved"] | None = None  # three positions a token, in this layout


QWEN_PICTURE = "<|image_pad|>"

SUPPORTED: Mapping[str, VisionFamily] = {
    "idefics3": VisionFamily("idefics3", "llama", "tiles", "<image>"),
    "smolvlm": VisionFamily("smolvlm", "llama", "tiles", "<image>"),
    "qwen2_vl": VisionFamily("qwen2_vl", "qwen2", "grid", QWEN_PICTURE, "chunked"),
    "qwen2_5_vl": VisionFamily("qwen2_5_vl", "qwen2", "grid", QWEN_PICTURE, "chunked"),
    "qwen3_vl": VisionFamily("qwen3_vl", "qwen3", "grid", QWEN_PICTURE, "interleaved"),
    "qwen3_vl_moe": VisionFamily("qwen3_vl_moe", "qwen3_moe", "grid", QWEN_PICTURE, "interleaved"),
    "qwen3_5": VisionFamily("qwen3_5", "qwen3_5", "grid", QWEN_PICTURE, "interleaved"),
    "qwen3_5_moe": VisionFamily("qwen3_5_moe", "qwen3_5_moe", "grid", QWEN_PICTURE, "interleaved"),
}

BOTH_WAYS = "its picture tokens see each other both ways in the prompt, and prompts are read causally here"

REFUSED: Mapping[str, str] = {
    "gemma3": BOTH_WAYS,
    "gemma3n": BOTH_WAYS,
    "gemma4": BOTH_WAYS,
    "gemma4_unified": BOTH_WAYS,
    "paligemma": BOTH_WAYS,
}


def why_text_only(config: Mapping[str, Any]) -> str | None:
    """Why a vision model reads text only here; None for those that see, and for text models."""
    name = str(config.get("model_type"))
    if not config.get("vision_config") or name in SUPPORTED:
        return None
    return f"pictures are not read with {name}: {REFUSED.get(name, 'its tower has not been checked here')}"


def vision_family(config: Mapping[str, Any]) -> VisionFamily | None:
    """The family of a checkpoint that has a vision tower; None for text models."""
    if not config.get("vision_config"):
        return None
    return SUPPORTED.get(str(config.get("model_type")))
