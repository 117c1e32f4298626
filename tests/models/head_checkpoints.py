"""Tiny heads of every family as their publishers store them, and as MLX's converters do.

A head is made once, in the publisher's form; the converted form is worked out from it here, by hand.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from outrider.models.trunk import Trunk
from tiny_models import NUM_LAYERS, tiny_config, tiny_model

Array = np.ndarray
Tensors = dict[str, Array]

CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"rope_scaling": None},
    "exaone_moe": {"mtp_layer_types": ["full_attention"]},
}
LIKE = {  # the trunk's layer whose tensors the head's block has
    "qwen3_5": 2, "qwen3_5_moe": 2, "qwen3_next": 2, "deepseek_v3": 2, "deepseek_v32": 2, "glm4_moe": 2,
    "glm4_moe_lite": 2, "mimo": 0, "mimo_v2_flash": 0, "ernie4_5": 0, "ernie4_5_moe": 0, "exaone_moe": 0,
}  # fmt: skip
FAMILIES = [*LIKE, "longcat_flash", "nemotron_h"]
QWENS = ["qwen3_5", "qwen3_5_moe", "qwen3_next"]

MTP = {
    "embedding_norm": "mtp.pre_fc_norm_embedding.weight",
    "hidden_norm": "mtp.pre_fc_norm_hidden.weight",
    "fc": "mtp.fc.weight",
    "norm": "mtp.norm.weight",
    "block.": "mtp.layers.{i}.",
}
NEXTN = {
    "embedding_norm": "model.layers.{n}.enorm.weight",
    "hidden_norm": "model.layers.{n}.hnorm.weight",
    "fc": "model.layers.{n}.eh_proj.weight",
    "norm": "model.layers.{n}.shared_head.norm.weight",
    "block.": "model.layers.{n}.",
}
ERNIE = {
    "embedding_norm": "model.mtp_emb_norm.{i}.weight",
    "hidden_norm": "model.mtp_hidden_norm.{i}.weight",
    "fc": "model.mtp_linear_proj.{i}.weight",
    "block.": "model.mtp_block.{i}.",
}
NAMES: dict[str, dict[str, str]] = {
    **dict.fromkeys((*QWENS, "exaone_moe"), MTP),
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite"), NEXTN),
    "mimo": {
        "embedding_norm": "model.mtp_layers.{i}.token_layernorm.weight",
        "hidden_norm": "model.mtp_layers.{i}.hidden_layernorm.weight",
        "fc": "model.mtp_layers.{i}.input_proj.weight",
        "norm": "model.mtp_layers.{i}.final_layernorm.weight",
        "block.": "model.mtp_layers.{i}.",
    },
    "mimo_v2_flash": {
        "embedding_norm": "model.mtp.layers.{i}.enorm.weight",
        "hidden_norm": "model.mtp.layers.{i}.hnorm.weight",
        "fc": "model.mtp.layers.{i}.eh_proj.weight",
        "norm": "model.mtp.layers.{i}.final_layernorm.weight",
        "block.post_attention_layernorm.": "model.mtp.layers.{i}.pre_mlp_layernorm.",
        "block.": "model.mtp.layers.{i}.",
    },
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe"), ERNIE),
    "longcat_flash": {
        "embedding_norm": "model.mtp.layers.{i}.enorm.m.weight",
        "hidden_norm": "model.mtp.layers.{i}.hnorm.m.weight",
        "fc": "model.mtp.layers.{i}.eh_proj.weight",
        "norm": "model.mtp.norm.weight",
        "block.mlp.": "model.mtp.layers.{i}.transformer_layer.mlp.",
        "block.": "model.mtp.layers.{i}.",
    },
    "nemotron_h": {
        "embedding_norm": "mtp.layers.0.enorm.weight",
        "hidden_norm": "mtp.layers.0.hnorm.weight",
        "fc": "mtp.layers.0.eh_proj.weight",
        "norm": "mtp.layers.1.final_layernorm.weight",
        "block.blocks.": "mtp.layers.",
    },
}


@dataclass(frozen=True)
class TinyHead:
    family: str
    config: dict[str, Any]
    model: nn.Module
    trunk: Trunk
    depths: list[Tensors]  # each in the publisher's form: embedding_norm, hidden_norm, fc, norm, block.*

    def published(self) -> dict[str, mx.array]:
        """Under the publisher's names."""
        depths = [_fused(depth) for depth in self.depths] if self.family == "qwen3_5_moe" else self.depths
        return self._named(depths)

    def converted(self) -> dict[str, mx.array]:
        """As MLX has them: experts stacked, latent attention split, norms with their 1, the same names."""
        return self._named([_converted(self.family, depth) for depth in self.depths])

    def _named(self, depths: list[Tensors]) -> dict[str, mx.array]:
        names = NAMES[self.family]
        found: dict[str, mx.array] = {}
        for number, depth in enumerate(depths):
            for name, array in depth.items():
                part = next(part for part in names if name.startswith(part))
                theirs = names[part].replace("{i}", str(number)).replace("{n}", str(number + NUM_LAYERS))
                found[theirs + name.removeprefix(part)] = mx.array(array)
        return found


def tiny_head(family: str, num_depths: int = 1, **changes: Any) -> TinyHead:
    changes = CHANGES.get(family, {}) | changes
    config = tiny_config(family) | changes
    model = tiny_model(family, **changes)
    trunk = Trunk(model, max_context=256)
    rng = np.random.default_rng(zlib.crc32(family.encode()))
    depths = [_depth(family, model, rng) for _ in range(num_depths)]
    if NAMES[family] is MTP:  # one projection and one last norm for all depths
        shared = {name: depths[0][name] for name in ("embedding_norm", "hidden_norm", "fc", "norm")}
        depths = [depth | shared for depth in depths]
    return TinyHead(family, config, model, trunk, depths)


def projection(trunk: Trunk) -> Array:
    output = getattr(trunk.model, "lm_head", None) or trunk.embedding
    return np.array(output.weight, np.float64)


def final_norm(trunk: Trunk) -> Array:
    norm = getattr(trunk.inner, "norm", None)
    return np.array(norm.weight, np.float64) if norm is not None else np.ones(64)


def wide(tensors: Tensors) -> Tensors:
    return {name: array.astype(np.float64) for name, array in tensors.items()}


def write(file: Path, tensors: dict[str, mx.array], metadata: dict[str, str] | None = None) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(file), tensors, metadata)
    return file


def packed(tensors: dict[str, mx.array], how: Callable[[str], tuple[int, int]]) -> dict[str, mx.array]:
    """The tensors as a converter quantises them; `how` gives the bits and the group size of a tensor."""
    stored = dict(tensors)
    for name, array in tensors.items():
        bits, group_size = how(name)
        if array.ndim >= 2 and array.shape[-1] % group_size == 0 and not name.endswith("gate.weight"):
            path = name.removesuffix(".weight")
            parts = mx.quantize(array, group_size, bits)
            stored |= dict(zip((name, f"{path}.scales", f"{path}.biases"), parts, strict=True))
    return stored


def _depth(family: str, model: nn.Module, rng: np.random.Generator) -> Tensors:
    shapes = _block_shapes(family, model) | {
        "embedding_norm": (64,), "hidden_norm": (64,), "fc": (64, 128), "norm": (64,),
    }  # fmt: skip
    if family.startswith("ernie"):
        del shapes["norm"]
    filled = {name: _filled(family, name, shape, rng) for name, shape in shapes.items()}
    return _published(family, filled)


def _block_shapes(family: str, model: nn.Module) -> dict[str, tuple[int, ...]]:
    if family == "longcat_flash":
        layer = dict(tree_flatten(model.layers[0].parameters()))
        dense = {
            name: array for name, array in layer.items() if not name.startswith("mlp.") and ".1." not in name
        }
        parts = {name.replace("mlps.0.", "mlp.").replace(".0.", "."): a for name, a in dense.items()}
    elif family == "nemotron_h":
        layers = [dict(tree_flatten(model.layers[i].parameters())) for i in (1, 3)]
        parts = {f"blocks.{i}.{name}": a for i, layer in enumerate(layers) for name, a in layer.items()}
    else:
        parts = dict(tree_flatten(model.layers[LIKE[family]].parameters()))
    return {f"block.{name}": tuple(array.shape) for name, array in parts.items()}


def _filled(family: str, name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    noise = rng.standard_normal(shape).astype(np.float32)
    if len(shape) > 1:
        return noise * np.float32(1.4 / shape[-1] ** 0.5)
    is_gain = "norm" in name and not family.startswith("qwen")  # Qwen's are about 0
    return np.float32(is_gain) + np.float32(0.1) * noise


def _published(family: str, tensors: Tensors) -> Tensors:
    """Experts one by one, keys' and values' up-projection in one."""
    found = dict(tensors)
    for name, array in tensors.items():
        if ".switch_mlp." not in name:
            continue
        del found[name]
        single = name.replace(".switch_mlp.fc1.", ".switch_mlp.up_proj.").replace(".fc2.", ".down_proj.")
        for number, expert in enumerate(array):
            found[single.replace("switch_mlp", f"experts.{number}")] = expert
    if "block.self_attn.embed_q.weight" in found:
        keys = found.pop("block.self_attn.embed_q.weight").swapaxes(1, 2)  # [heads, nope, rank]
        values = found.pop("block.self_attn.unembed_out.weight")
        found["block.self_attn.kv_b_proj.weight"] = np.concatenate([keys, values], axis=1).reshape(-1, 16)
    return found


def _fused(tensors: Tensors) -> Tensors:
    """All experts in two tensors, gate and up in one."""
    found = {name: array for name, array in tensors.items() if ".experts." not in name}
    every = [
        {p: tensors[f"block.mlp.experts.{i}.{p}_proj.weight"] for p in ("gate", "up", "down")}
        for i in range(4)
    ]
    found["block.mlp.experts.gate_up_proj"] = np.stack([np.concatenate([e["gate"], e["up"]]) for e in every])
    found["block.mlp.experts.down_proj"] = np.stack([e["down"] for e in every])
    return found


def _converted(family: str, tensors: Tensors) -> Tensors:
    found = dict(tensors)
    for name in tensors:
        if ".experts.0." in name:
            every = [found.pop(name.replace("experts.0", f"experts.{i}")) for i in range(4)]
            stacked = name.replace("experts.0", "switch_mlp")
            if family == "nemotron_h":
                stacked = stacked.replace("up_proj", "fc1").replace("down_proj", "fc2")
            found[stacked] = np.stack(every)
        elif name.endswith("kv_b_proj.weight"):
            both = found.pop(name).reshape(4, 32, 16)
            found["block.self_attn.embed_q.weight"] = both[:, :16].swapaxes(1, 2)
            found["block.self_attn.unembed_out.weight"] = both[:, 16:]
        elif family in QWENS and "norm" in name:
            found[name] = found[name] + 1
    return found
