"""Which vision families are served, and why the others are not: one table. Pure.

A family is a `model_type` of config.json. Its language part is one of mlx-lm's text families and runs like
any text model; the processor and the vision encoder come from mlx-vlm. To add a family, add a row here and a
tiny checkpoint in tests/tiny_vision.py, whose logits for prompts with images must equal mlx-vlm's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

ImageLayout = Literal["tiles", "grid", "spans", "squares"]
# How a model learns when the frames of a video are: their positions count frame groups, or time by the
# config's tokens_per_second, or each group has its seconds as text before it.
FrameTimes = Literal["groups", "seconds", "text"]


@dataclass(frozen=True)
class VisionFamily:
    package: str  # the module in mlx_vlm.models
    text: str  # mlx-lm's family of the language part
    images: ImageLayout  # how the processor cuts an image, and so which tokens the prompt has for it
    placeholder: str  # the text that chat templates write for an image
    mrope: Literal["chunked", "interleaved"] | None = None  # three positions for each token, in this layout
    videos: FrameTimes | None = None  # None: a video is read as separate images
    # The language model multiplies all embeddings, also of images, by the root of its width in this dtype.
    scales_embeddings: Literal["float32", "bfloat16"] | None = None


QWEN_IMAGE = "<|image_pad|>"

SUPPORTED: Mapping[str, VisionFamily] = {
    "idefics3": VisionFamily("idefics3", "llama", "tiles", "<image>"),
    "smolvlm": VisionFamily("smolvlm", "llama", "tiles", "<image>"),
    "qwen2_vl": VisionFamily("qwen2_vl", "qwen2", "grid", QWEN_IMAGE, "chunked", "groups"),
    "qwen2_5_vl": VisionFamily("qwen2_5_vl", "qwen2", "grid", QWEN_IMAGE, "chunked", "seconds"),
    "qwen3_vl": VisionFamily("qwen3_vl", "qwen3", "grid", QWEN_IMAGE, "interleaved", "text"),
    "qwen3_vl_moe": VisionFamily("qwen3_vl_moe", "qwen3_moe", "grid", QWEN_IMAGE, "interleaved", "text"),
    "qwen3_5": VisionFamily("qwen3_5", "qwen3_5", "grid", QWEN_IMAGE, "interleaved", "text"),
    "qwen3_5_moe": VisionFamily("qwen3_5_moe", "qwen3_5_moe", "grid", QWEN_IMAGE, "interleaved", "text"),
    "gemma4": VisionFamily("gemma4", "gemma4", "spans", "<|image|>", scales_embeddings="float32"),
    "gemma3": VisionFamily("gemma3", "gemma3", "squares", "<start_of_image>", scales_embeddings="bfloat16"),
}

BIDIRECTIONAL = (
    "its image tokens attend to each other in both directions, which is checked for gemma3 and gemma4 only"
)

REFUSED: Mapping[str, str] = {
    "gemma3n": BIDIRECTIONAL,
    "gemma4_unified": BIDIRECTIONAL,
    "paligemma": BIDIRECTIONAL,
}


def why_text_only(config: Mapping[str, Any]) -> str | None:
    """Why Outrider reads only text with a vision model; None for supported families and for text models."""
    name = str(config.get("model_type"))
    if not config.get("vision_config") or name in SUPPORTED:
        return None
    return f"images are not read with {name}: {REFUSED.get(name, 'its vision encoder has not been checked')}"


def why_no_audio(config: Mapping[str, Any]) -> str:
    """Why Outrider reads no audio with a model. mlx-vlm has audio encoders for some families."""
    name = str(config.get("model_type"))
    if not config.get("audio_config"):
        return f"{name} has no audio encoder"
    return f"the audio encoder of {name} is left out, because it has not been checked"


def vision_family(config: Mapping[str, Any]) -> VisionFamily | None:
    """The family of a vision checkpoint; None for text models and for families that are not supported."""
    if not config.get("vision_config"):
        return None
    return SUPPORTED.get(str(config.get("model_type")))
