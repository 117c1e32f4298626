"""Writes one Qwen3.5 checkpoint in a folder that every server of the comparison can read.

    model.safetensors           language model and vision encoder in float32, by mlx-lm's and mlx-vlm's names
    mtp.safetensors             the head: mlx-vlm, Rapid-MLX, MTPLX, OptiQ
    mtp/weights.safetensors     the same head: vllm-mlx, Outrider
    mtp/manifest.json           tells vllm-mlx that the norms of the head have their 1

The head is not among the tensors of model.safetensors: mlx-lm takes a converted checkpoint with such tensors
for a published one, and adds 1 to all norms. The vision encoder has random weights, because `--mllm` needs
one. Text requests do not use it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from outrider.models.heads.head_files import find_head

Tensors = dict[str, mx.array]
MANIFEST = {"artifact_schema_version": 1, "rmsnorm_weight_format": "mlx_gamma"}
VISION_CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5",
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [],
}
IMAGE_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "size": {"shortest_edge": 64, "longest_edge": 1024},
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
SPECIAL_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


class CannotConvert(Exception):
    """The checkpoint has no layout that the servers read. The message says which part is missing."""


def write_common_folder(model: Path, folder: Path) -> Path:
    """Writes the checkpoint `model` into `folder`, which must not exist."""
    head, trunk = _converted_head(model), _converted_trunk(model)
    config = common_config(json.loads((model / "config.json").read_text()))
    folder.mkdir(parents=True)
    for file in model.iterdir():
        if file.is_file() and ".safetensors" not in file.name:
            shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    tokenizer["chat_template"] = taking_parts(tokenizer["chat_template"])
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2))
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGE_PROCESSOR, indent=2))
    _save(folder / "model.safetensors", trunk | _vision_encoder(config["vision_config"]))
    (folder / "mtp").mkdir()
    for name in ("mtp.safetensors", "mtp/weights.safetensors"):
        _save(folder / name, head)
    (folder / "mtp" / "manifest.json").write_text(json.dumps(MANIFEST))
    return folder


def common_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the entries that mlx-vlm needs: the vision encoder, its tokens, sections of positions.

    The ids of the image tokens are outside of the vocabulary, so no text contains them. Text has one position
    for each token, so the sections change nothing.
    """
    text = dict(config["text_config"])
    rope = dict(text["rope_parameters"])
    half = int(text["head_dim"] * rope["partial_rotary_factor"]) // 2
    third = half // 3
    rope |= {"type": "default", "mrope_section": [half - 2 * third, third, third]}
    tokens = {name: text["vocab_size"] + i for i, name in enumerate(SPECIAL_TOKENS)}
    vision = VISION_CONFIG | {"out_hidden_size": text["hidden_size"]}
    return {**config, **tokens, "text_config": text | {"rope_parameters": rope}, "vision_config": vision}


def taking_parts(template: str) -> str:
    """The chat template, for messages whose content is a text or a list of parts: mlx-vlm sends lists."""
    text = "{{ message.content }}"
    parts = "{% for part in message.content %}{{ part.text }}{% endfor %}"
    return template.replace(
        text, f"{{% if message.content is string %}}{text}{{% else %}}{parts}{{% endif %}}"
    )


def _converted_head(model: Path) -> Tensors:
    file = find_head(model)
    if file is None:
        raise CannotConvert(f"{model} has no MTP head in a file beside the model, such as mtp.safetensors")
    head = _float32(file, "mtp.")
    if not head:
        raise CannotConvert(f"{file} has no tensors whose names start with mtp.")
    return head


def _converted_trunk(model: Path) -> Tensors:
    found: Tensors = {}
    for file in sorted(model.glob("model*.safetensors")):
        found |= _float32(file, "language_model.")
    if not found:
        raise CannotConvert(f"{model} has no tensors whose names start with language_model.")
    if any(name.endswith(".scales") for name in found):
        raise CannotConvert(f"{model} is quantised: give a model that is not")
    return found


def _float32(file: Path, prefix: str) -> Tensors:
    """The tensors whose names have the prefix. The file must be converted: published norms lack their 1."""
    stored, metadata = mx.load(str(file), return_metadata=True)
    assert isinstance(stored, dict)
    assert isinstance(metadata, dict)
    if metadata.get("format") != "mlx":
        raise CannotConvert(f"{file} is not marked as MLX's format, so its norms may lack their 1")
    return {name: array.astype(mx.float32) for name, array in stored.items() if name.startswith(prefix)}


def _vision_encoder(config: Mapping[str, Any]) -> Tensors:
    from mlx_vlm.models.qwen3_5 import VisionConfig, VisionModel

    mx.random.seed(0)
    encoder = VisionModel(VisionConfig.from_dict(dict(config)))
    parameters: Tensors = dict(tree_flatten(encoder.parameters()))
    return {f"vision_tower.{name}": array for name, array in parameters.items()}


def _save(file: Path, tensors: Tensors) -> None:
    mx.save_safetensors(str(file), tensors, metadata={"format": "mlx"})
