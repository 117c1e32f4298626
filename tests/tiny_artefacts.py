"""Tiny Qwen3.5 folders that hold language model, vision encoder and MTP head, in the forms that people have.

    published     the maker's names: model.language_model.*, model.visual.*, mtp.*; norms minus 1, PyTorch's
                  convolutions, fused experts, shards with an index
    mlx_vlm       mlx-vlm's conversion: its own `sanitize` and quantisation; the head is dropped
    mlx_lm        mlx-lm's conversion: the vision encoder is dropped too
    with_head     mlx-vlm's conversion with a converted head among its shards

Weights are random, but the next token depends mostly on the last one, and the head's layer is a copy of the
trunk's last one: so many drafts are right, and pictures still change answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from tiny_models import SPECIAL_TOKENS, write_tokenizer
from tiny_vision import GRID_TEMPLATE, GRID_TOKENS, vision_config, vision_model

Tensors = dict[str, mx.array]
DENSE, MOE = "qwen3_5", "qwen3_5_moe"
GROUP_SIZE = 32
EMBEDDING_SCALE, LAYER_SCALE = 24.0, 0.5
LAST_ATTENTION = "language_model.model.layers.3."
ZERO_CENTRED = ("layernorm.weight", "q_norm.weight", "k_norm.weight", "model.norm.weight")
SPLIT_NAMES = ("gate_proj", "up_proj")
IMAGE_PROCESSOR = {  # the form of Qwen3.5's own file
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "size": {"shortest_edge": 64, "longest_edge": 1024},
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def predictable_model(family: str) -> nn.Module:
    """mlx-vlm's model with large embeddings and small layers."""
    model = vision_model(family)
    changed = []
    for name, array in tree_flatten(model.language_model.parameters()):
        if name.endswith("embed_tokens.weight"):
            array = array * EMBEDDING_SCALE
        elif name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            array = array * LAYER_SCALE
        changed.append((name, array))
    model.language_model.update(tree_unflatten(changed))
    return model


def converted_head(model: nn.Module) -> Tensors:
    """A head that passes on the embedding of the last token: by mtp.* names, norms with their 1."""
    trunk: Tensors = dict(tree_flatten(model.parameters()))
    size = trunk["language_model.model.norm.weight"].shape[0]
    block = {
        f"mtp.layers.0.{name.removeprefix(LAST_ATTENTION)}": array
        for name, array in trunk.items()
        if name.startswith(LAST_ATTENTION)
    }
    rms = float(mx.sqrt(mx.mean(mx.square(trunk["language_model.model.embed_tokens.weight"]))))
    return block | {
        "mtp.fc.weight": mx.concatenate([rms * mx.eye(size), 0.01 * mx.eye(size)], axis=1),
        "mtp.pre_fc_norm_embedding.weight": mx.full(size, 1.05),
        "mtp.pre_fc_norm_hidden.weight": mx.full(size, 0.95),
        "mtp.norm.weight": trunk["language_model.model.norm.weight"],
    }


def published_tensors(tensors: Mapping[str, mx.array]) -> Tensors:
    """The maker's names and forms, of converted tensors."""
    found: Tensors = {}
    for name, array in tensors.items():
        if name.endswith("conv1d.weight"):
            array = array.moveaxis(2, 1)
        elif name.endswith("patch_embed.proj.weight"):
            array = array.transpose(0, 4, 1, 2, 3)
        elif _is_zero_centred(name):
            array = array - 1
        found[_published_name(name)] = array
    return _fused(found)


def _is_zero_centred(name: str) -> bool:
    in_head = name.startswith("mtp.") and "norm" in name
    return in_head or (name.startswith("language_model.") and name.endswith(ZERO_CENTRED))


def _published_name(name: str) -> str:
    for ours, theirs in (
        ("language_model.model.", "model.language_model."),
        ("language_model.lm_head.", "lm_head."),
        ("vision_tower.", "model.visual."),
    ):
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def _fused(tensors: Tensors) -> Tensors:
    """Experts as Qwen3.5 and later are published: gate and up in one tensor."""
    found = {name: array for name, array in tensors.items() if ".switch_mlp." not in name}
    for name, array in tensors.items():
        if name.endswith("switch_mlp.down_proj.weight"):
            mlp = name.removesuffix("switch_mlp.down_proj.weight")
            both = [tensors[f"{mlp}switch_mlp.{part}.weight"] for part in SPLIT_NAMES]
            found[f"{mlp}experts.gate_up_proj"] = mx.concatenate(both, axis=1)
            found[f"{mlp}experts.down_proj"] = array
    return found


def write_shards(folder: Path, tensors: Tensors, format: str, pattern: str, num_shards: int = 3) -> None:
    names = sorted(tensors)
    places: dict[str, str] = {}
    for number in range(num_shards):
        file = pattern.format(number + 1, num_shards)
        own = names[number::num_shards]
        places |= dict.fromkeys(own, file)
        mx.save_safetensors(str(folder / file), {name: tensors[name] for name in own}, {"format": format})
    total = sum(array.nbytes for array in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def artefact_config(family: str) -> dict[str, Any]:
    config = vision_config(family)
    config["architectures"] = ["Qwen3_5ForConditionalGeneration"]
    config["text_config"] |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    rope = config["text_config"]["rope_parameters"]
    rope |= {"rope_type": rope.pop("type"), "mrope_interleaved": True}
    return config


def write_published(folder: Path, family: str, dtype: mx.Dtype = mx.bfloat16, has_head: bool = True) -> Path:
    """The folder of the model's maker."""
    folder.mkdir(parents=True, exist_ok=True)
    model = predictable_model(family)
    tensors = dict(tree_flatten(model.parameters())) | (converted_head(model) if has_head else {})
    stored = {
        name: array.astype(mx.float32 if name.endswith("A_log") else dtype)
        for name, array in published_tensors(tensors).items()
    }
    write_shards(folder, stored, "pt", "model.safetensors-{:05d}-of-{:05d}.safetensors")
    config = artefact_config(family)
    config["text_config"]["dtype"] = str(dtype).removeprefix("mlx.core.")
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    write_processor(folder)
    return folder


def write_processor(folder: Path) -> None:
    write_tokenizer(folder, (*SPECIAL_TOKENS, *GRID_TOKENS), GRID_TEMPLATE)
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGE_PROCESSOR))


def convert_with_mlx_vlm(original: Path, folder: Path, bits: int | None) -> Path:
    """What `mlx_vlm convert` writes, by its own functions: the head is dropped."""
    from mlx_vlm.quant_utils import quantize_model
    from mlx_vlm.utils import load_config, load_model, save_config, save_weights, skip_multimodal_module

    model, config = load_model(original), load_config(original)
    rule = model.quant_predicate or (lambda path, module: True)
    if bits is not None:
        model, config = quantize_model(
            model,
            config,
            GROUP_SIZE,
            bits,
            quant_predicate=lambda path, module: not skip_multimodal_module(path) and rule(path, module),
        )
    save_weights(folder, model)
    save_config(config, folder / "config.json")
    write_processor(folder)
    return folder


def convert_with_mlx_lm(original: Path, folder: Path, bits: int | None) -> Path:
    """What `mlx_lm convert` writes, by its own functions: head and vision encoder are dropped."""
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    model, config = load_model(original)
    if bits is not None:
        model, config = quantize_model(model, config, GROUP_SIZE, bits)
    save_model(folder, model)
    save_config(config, folder / "config.json")
    write_processor(folder)
    return folder


def add_head(
    original: Path, folder: Path, bits: int | None, prefix: str = "language_model.", dtype: Any = mx.bfloat16
) -> Path:
    """Put a converted head among the shards of a conversion, quantised or in 16 bits."""
    stored: Tensors = {}
    for file in sorted(folder.glob("model*.safetensors")):
        stored |= {name: mx.array(array) for name, array in mx.load(str(file)).items()}  # type: ignore[union-attr]
        mx.eval(stored)
        file.unlink()
    for name, array in head_as_converted(original).items():
        stored |= {
            f"{prefix}{part}": value for part, value in _packed(name, array.astype(dtype), bits).items()
        }
    write_shards(folder, stored, "mlx", "model-{:05d}-of-{:05d}.safetensors")
    return folder


def head_as_converted(original: Path) -> Tensors:
    """The head of a published folder with its 1 in the norms and its experts stacked."""
    found: Tensors = {}
    for file in sorted(original.glob("model*.safetensors")):
        for name, array in mx.load(str(file)).items():  # type: ignore[union-attr]
            if not name.startswith("mtp."):
                continue
            if name.endswith("experts.gate_up_proj"):
                base = name.removesuffix("experts.gate_up_proj")
                for part, half in zip(SPLIT_NAMES, mx.split(array, 2, axis=1), strict=True):
                    found[f"{base}switch_mlp.{part}.weight"] = half
            elif name.endswith("experts.down_proj"):
                found[name.replace("experts.down_proj", "switch_mlp.down_proj.weight")] = array
            else:
                found[name] = array + 1 if "norm" in name else array
    mx.eval(found)
    return found


def _packed(name: str, array: mx.array, bits: int | None) -> Tensors:
    if bits is None or array.ndim < 2 or array.shape[-1] % GROUP_SIZE or name.endswith("mlp.gate.weight"):
        return {name: array}
    path = name.removesuffix(".weight")
    codes, scales, biases = mx.quantize(array, GROUP_SIZE, bits)
    return {name: codes, f"{path}.scales": scales, f"{path}.biases": biases}
