"""The frozen trunk in PyTorch: a llama model read from a converted model folder, weights dequantised.

Computes whole conversations (`Trunk.hidden`) or one token per row (`Decoder`). Must not know about
conversations or heads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from kernels import decode_attention
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# cuDNN's attention would build a plan for every new shape, which costs more than it saves here.
ANY_SHAPE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # (layer, q, k, v) -> attention output


@dataclass(frozen=True)
class Shape:
    """The sizes of the trunk, from config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float

    @classmethod
    def read(cls, folder: Path) -> Shape:
        config = json.loads((folder / "config.json").read_text())
        return cls(**{name: config[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class Layer:
    """One decoder layer; matrices are stored [out, in]."""

    input_norm: Tensor  # [H]
    post_norm: Tensor  # [H]
    qkv: Tensor  # [(heads + 2 kv heads) * head_dim, H]
    o: Tensor
    gate_up: Tensor  # [2 * intermediate, H]
    down: Tensor


class Trunk:
    """The model without its head. The residual stream is float32, products are in `dtype`."""

    def __init__(self, shape: Shape, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype
        self.embedding = weights["model.embed_tokens.weight"].to(dtype)  # [V, H], also the output projection
        self.final_norm = weights["model.norm.weight"].float()
        self.layers = [self._layer(weights, index) for index in range(shape.num_hidden_layers)]

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def _layer(self, weights: dict[str, Tensor], index: int) -> Layer:
        def get(*names: str) -> Tensor:
            return torch.cat([weights[f"model.layers.{index}.{name}.weight"] for name in names])

        return Layer(
            input_norm=get("input_layernorm").float(),
            post_norm=get("post_attention_layernorm").float(),
            qkv=get("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj").to(self.dtype),
            o=get("self_attn.o_proj").to(self.dtype),
            gate_up=get("mlp.gate_proj", "mlp.up_proj").to(self.dtype),
            down=get("mlp.down_proj").to(self.dtype),
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, H] -> float32 [N, V]"""
        if hidden.is_cuda and self.dtype != torch.float32:
            return torch.mm(hidden, self.embedding.T, out_dtype=torch.float32)
        return (hidden @ self.embedding.T).float()

    @torch.no_grad()
    def hidden(self, token_ids: Tensor) -> Tensor:
        """Hidden states after the final norm.  [rows, T] -> [rows, T, H]; rows are padded on the right."""
        rows, width = token_ids.shape
        shape = self.shape

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.view(rows, width, -1, shape.head_dim).transpose(1, 2) for x in (q, k, v))
            k, v = (repeat_kv_heads(x, shape) for x in (k, v))
            with sdpa_kernel(ANY_SHAPE):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return out.transpose(1, 2).reshape(rows * width, -1)

        positions = torch.arange(width, device=self.device).repeat(rows)
        return self.run(token_ids.flatten(), positions, attend).view(rows, width, -1)

    def run(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """All layers over [N] tokens at [N] positions. `attend` decides which token attends to which."""
        shape = self.shape
        kv_width = shape.num_key_value_heads * shape.head_dim
        widths = [shape.num_attention_heads * shape.head_dim, kv_width, kv_width]
        cos, sin = rope_angles(positions, shape)
        x = self.embedding[token_ids].float()
        for index, layer in enumerate(self.layers):
            q, k, v = F.linear(self._norm(x, layer.input_norm), layer.qkv).split(widths, dim=-1)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            x = x + F.linear(attend(index, q, k, v), layer.o)
            gate, up = F.linear(self._norm(x, layer.post_norm), layer.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return self._norm(x, self.final_norm)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.shape.rms_norm_eps).to(self.dtype)


class Decoder:
    """Decodes one token per row, each at its own position. The buffers never move: CUDA graphs need that."""

    def __init__(self, trunk: Trunk, rows: int, capacity: int) -> None:
        shape = trunk.shape
        cells = (shape.num_hidden_layers, rows, shape.num_key_value_heads, capacity, shape.head_dim)
        self.trunk = trunk
        self._keys = torch.zeros(cells, dtype=trunk.dtype, device=trunk.device)
        self._values = torch.zeros_like(self._keys)
        self._rows = torch.arange(rows, device=trunk.device)

    @torch.no_grad()
    def step(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Feed [rows] tokens at [rows] positions. Returns hidden states after the final norm [rows, H]."""
        head_dim = self.trunk.shape.head_dim

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.reshape(len(x), -1, head_dim) for x in (q, k, v))
            keys, values = self._keys[layer], self._values[layer]
            keys[self._rows, :, positions] = k
            values[self._rows, :, positions] = v
            return decode_attention(q, keys, values, positions + 1).flatten(1)

        return self.trunk.run(token_ids, positions, attend)


def load_trunk(folder: Path, device: torch.device | str, dtype: torch.dtype) -> Trunk:
    """The trunk of a model folder that `outrider models pull` made."""
    stored = load_file(folder / "model.safetensors", device=str(device))
    quantisation = json.loads((folder / "config.json").read_text()).get("quantization", {})
    return Trunk(Shape.read(folder), dequantised(stored, quantisation), dtype)


def dequantised(stored: dict[str, Tensor], quantisation: dict[str, Any]) -> dict[str, Tensor]:
    """NAME.weight of every module in float32. Quantised weights are dequantised."""
    weights = {}
    for name in (name for name in stored if name.endswith(".weight")):
        module = name.removesuffix(".weight")
        if f"{module}.scales" not in stored:
            weights[name] = stored[name].float()
            continue
        bits = quantisation.get(module, quantisation)["bits"]
        scales, biases = (stored[f"{module}.{part}"].float()[..., None] for part in ("scales", "biases"))
        codes = unpack(stored[name], bits).unflatten(-1, (scales.shape[-2], -1)).float()
        weights[name] = (codes * scales + biases).flatten(-2)
    return weights


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Codes of `bits` bits (4 or 8). The first code is in the lowest bits of a 32-bit word."""
    shifts = torch.arange(0, 32, bits, device=packed.device, dtype=torch.int32)
    words = packed.view(torch.int32)[..., None]
    return ((words >> shifts) & ((1 << bits) - 1)).flatten(-2)


def rope_angles(positions: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """cos and sin of every position.  [N] -> [N, 1, head_dim / 2] each"""
    exponents = (
        torch.arange(0, shape.head_dim, 2, device=positions.device, dtype=torch.float32) / shape.head_dim
    )
    angles = positions.float()[:, None, None] * shape.rope_theta**-exponents
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rope on [N, heads * head_dim]. The two halves of a head are rotated against each other."""
    first, second = x.unflatten(-1, (-1, 2, cos.shape[-1])).unbind(-2)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.flatten(-2).to(x.dtype)


def repeat_kv_heads(x: Tensor, shape: Shape) -> Tensor:
    """[rows, kv heads, T, D] -> [rows, heads, T, D]: each key head once per query head of its group."""
    return x.repeat_interleave(shape.num_attention_heads // shape.num_key_value_heads, dim=1)
