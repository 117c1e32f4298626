"""The frozen trunk of the default model, over sequences in which image embeddings replace some tokens.

Computes gradients through the trunk to the image embeddings. The weights come from ../default_head/trunk.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.append(str(Path(__file__).parent.parent / "default_head"))

from trunk import Shape, Trunk, load_trunk, rope_angles

__all__ = ["FrozenTrunk", "random_trunk"]


class FrozenTrunk:
    def __init__(self, trunk: Trunk, compiled: bool) -> None:
        self._trunk = trunk
        self._output = trunk.embedding.float()  # bfloat16 logits are too coarse for a loss
        shape = trunk.shape
        self._block: Callable[..., Tensor] = _block
        self._numbers = (
            shape.head_dim,
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.rms_norm_eps,
        )
        if compiled:
            self._block = torch.compile(_block, dynamic=False)

    @classmethod
    def load(cls, folder: Path, device: str, compiled: bool) -> FrozenTrunk:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        return cls(load_trunk(folder, device, dtype), compiled)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._trunk.embedding[token_ids].float()

    def hidden(self, x: Tensor, positions: Tensor, sees: Tensor) -> Tensor:
        """Embeddings to hidden states after the final norm.  float32 [rows, T, H] -> [rows, T, H]

        positions [rows, T]; sees bool [rows, T, T]: True if the token of the row attends to the token of the
        column.
        """
        trunk = self._trunk
        angles = rope_angles(positions.flatten(), trunk.shape)
        cos, sin = (part[:, 0].view(len(x), 1, x.shape[1], -1) for part in angles)  # [rows, 1, T, D / 2]
        for layer in trunk.layers:
            x = self._block(
                x,
                layer.input_norm,
                layer.qkv,
                layer.o,
                layer.post_norm,
                layer.gate_up,
                layer.down,
                cos,
                sin,
                sees,
                self._numbers,
            )
        norm = trunk.final_norm
        return F.rms_norm(x, norm.shape, norm, trunk.shape.rms_norm_eps).to(trunk.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, H] -> float32 [N, V]"""
        return F.linear(hidden.float(), self._output)


def _block(
    x: Tensor,
    input_norm: Tensor,
    qkv: Tensor,
    o: Tensor,
    post_norm: Tensor,
    gate_up: Tensor,
    down: Tensor,
    cos: Tensor,
    sin: Tensor,
    sees: Tensor,
    numbers: tuple[int, int, int, float],
) -> Tensor:
    head_dim, heads, kv_heads, eps = numbers
    normed = F.rms_norm(x, input_norm.shape, input_norm, eps).to(qkv.dtype)
    parts = F.linear(normed, qkv).unflatten(-1, (-1, head_dim)).transpose(1, 2)  # [rows, heads, T, D]
    q, k, v = parts.split([heads, kv_heads, kv_heads], dim=1)
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    x = x + F.linear(_attend(q, k, v, sees).transpose(1, 2).flatten(2), o)
    normed = F.rms_norm(x, post_norm.shape, post_norm, eps).to(qkv.dtype)
    gate, up = F.linear(normed, gate_up).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, down)


def _attend(q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
    """Attention by two plain products. q [rows, heads, T, D], k and v [rows, kv heads, T, D]."""
    rows, heads, width, head_dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(rows, kv_heads, -1, head_dim)  # heads with the same keys, one after the other
    scores = grouped @ k.transpose(-1, -2)
    scores = scores.view(rows, kv_heads, heads // kv_heads, width, width).float() * head_dim**-0.5
    shares = scores.masked_fill(~sees[:, None, None], -torch.inf).softmax(-1).to(v.dtype)
    return (shares.view(rows, kv_heads, -1, width) @ v).view(q.shape)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rope on [rows, heads, T, D]; the halves rotate against each other. cos, sin: [rows, 1, T, D / 2]"""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def random_trunk(device: str, compiled: bool) -> FrozenTrunk:
    """A trunk of the default model's size with random weights, for timing without the model's file."""
    shape = Shape(576, 1536, 30, 9, 3, 64, 49152, 1e-5, 100000.0)
    size, kv = shape.hidden_size, shape.num_key_value_heads * shape.head_dim
    sizes = {
        "self_attn.q_proj": (size, size),
        "self_attn.k_proj": (kv, size),
        "self_attn.v_proj": (kv, size),
        "self_attn.o_proj": (size, size),
        "mlp.gate_proj": (shape.intermediate_size, size),
        "mlp.up_proj": (shape.intermediate_size, size),
        "mlp.down_proj": (size, shape.intermediate_size),
    }
    weights = {"model.embed_tokens.weight": torch.randn(shape.vocab_size, size, device=device) * 0.1}
    weights["model.norm.weight"] = torch.ones(size, device=device)
    for index in range(shape.num_hidden_layers):
        for name, (rows, columns) in sizes.items():
            weight = torch.randn(rows, columns, device=device) * 0.3 * columns**-0.5
            weights[f"model.layers.{index}.{name}.weight"] = weight
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{index}.{name}.weight"] = torch.ones(size, device=device)
    return FrozenTrunk(Trunk(shape, weights, torch.bfloat16 if device == "cuda" else torch.float32), compiled)
