"""The MTP head in PyTorch: its start, its recursion over whole conversations, its file.

Parameters carry the names of the `mtp.*` layout that the engine reads, so a state dict is a head file.
Must not know about losses or optimisers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from trunk import Shape, dequantised, repeat_kv_heads, rope_angles, rotate

PREFIX = "mtp."


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


def linear(num_in: int, num_out: int) -> nn.Linear:
    return nn.Linear(num_in, num_out, bias=False)


def decoder_layer(shape: Shape) -> nn.Module:
    """The parameters of a llama layer by their usual names. `Head.forward` does the arithmetic."""
    size, eps = shape.hidden_size, shape.rms_norm_eps
    width, kv_width = (n * shape.head_dim for n in (shape.num_attention_heads, shape.num_key_value_heads))
    attention = {
        "q_proj": linear(size, width),
        "k_proj": linear(size, kv_width),
        "v_proj": linear(size, kv_width),
        "o_proj": linear(width, size),
    }
    mlp = {
        "gate_proj": linear(size, shape.intermediate_size),
        "up_proj": linear(size, shape.intermediate_size),
        "down_proj": linear(shape.intermediate_size, size),
    }
    parts = {
        "self_attn": nn.ModuleDict(attention),
        "mlp": nn.ModuleDict(mlp),
        "input_layernorm": Norm(size, eps),
        "post_attention_layernorm": Norm(size, eps),
    }
    return nn.ModuleDict(parts)


@dataclass(frozen=True)
class Fused:
    """The matrices of one decoder layer in the dtype of a pass. Matrices with the same input are joined."""

    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor

    @classmethod
    def of(cls, layer: nn.Module, dtype: torch.dtype) -> Fused:
        attention, mlp = layer.self_attn, layer.mlp
        return cls(
            torch.cat([attention[name].weight for name in ("q_proj", "k_proj", "v_proj")]).to(dtype),
            attention.o_proj.weight.to(dtype),
            torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).to(dtype),
            mlp.down_proj.weight.to(dtype),
        )


class Chains:
    """One decoder layer over the chains of all starts: keeps the cells of the depths that were computed."""

    def __init__(self, layer: nn.Module, shape: Shape, dtype: torch.dtype) -> None:
        self._layer, self._shape, self._dtype = layer, shape, dtype
        self._weights = Fused.of(layer, dtype)
        self._keys: list[Tensor] = []  # by depth
        self._values: list[Tensor] = []

    def next_depth(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        layer, dtype, w = self._layer, self._dtype, self._weights
        q, k, v = heads_of(F.linear(layer.input_layernorm(x).to(dtype), w.qkv), cos, sin, self._shape)
        self._keys.append(k)
        self._values.append(v)
        seen = attend(q, torch.cat(self._keys, dim=2), torch.cat(self._values, dim=2), len(self._keys))
        x = x + F.linear(seen.transpose(1, 2).flatten(2), w.o)
        gate, up = F.linear(layer.post_attention_layernorm(x).to(dtype), w.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, w.down)


class Head(nn.Module):
    """x = fc(concat[norm(embedding), norm(h)]), decoder layers, norm; fed back as h for the next depth."""

    def __init__(self, shape: Shape, num_layers: int = 1) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.shape = shape
        self.pre_fc_norm_embedding = Norm(size, eps)
        self.pre_fc_norm_hidden = Norm(size, eps)
        self.fc = linear(2 * size, size)
        self.layers = nn.ModuleList([decoder_layer(shape) for _ in range(num_layers)])
        self.norm = Norm(size, eps)

    def forward(
        self, embedded: Tensor, hidden: Tensor, depths: int, dtype: torch.dtype = torch.float32
    ) -> list[Tensor]:
        """outs[d - 1][:, t] guesses token t + d + 1 from h_t and the tokens up to t + d.

        embedded, hidden [rows, T, H]: embeddings and hidden states of tokens 0..T-1. The pair at t, depth 1,
        has position t. Depth d continues the chain that starts at t: its position is t + d - 1. It attends to
        the pairs 0..t of depth 1 and to the cells of its own chain, not to other chains.

            keys:     depth 1: 0 1 2 ... t t+1 ...   depth 2: 0 ... t ...   depth 3: 0 ... t ...
            chain t:           x x x ... x                          x                      x

        Products are in `dtype`, the residual stream and the norms are float32.
        """
        from_embedding, from_hidden = self.fc.weight.to(dtype).chunk(2, dim=1)
        layers = [Chains(layer, self.shape, dtype) for layer in self.layers]
        width = hidden.shape[1]
        of_token = F.linear(self.pre_fc_norm_embedding(embedded).to(dtype), from_embedding)
        angles = rope_angles(torch.arange(width + depths, device=hidden.device), self.shape)
        outs: list[Tensor] = []
        for depth in range(1, depths + 1):
            of_hidden = F.linear(self.pre_fc_norm_hidden(hidden).to(dtype), from_hidden)
            x = F.pad(of_token[:, depth:], (0, 0, 0, depth)).float() + of_hidden
            cos, sin = (angle[depth - 1 : depth - 1 + width] for angle in angles)
            for layer in layers:
                x = layer.next_depth(x, cos, sin)
            hidden = self.norm(x)
            outs.append(hidden)
        return outs

    @torch.no_grad()
    def add_layer(self, weights: dict[str, Tensor]) -> None:
        """Append the trunk's last layer with outputs of zero: the head's result is the same as before."""
        layer = decoder_layer(self.shape)
        layer.load_state_dict(last_layer(weights, self.shape))
        for output in (layer.self_attn.o_proj, layer.mlp.down_proj):
            output.weight.zero_()
        self.layers.append(layer.to(self.fc.weight.device))

    @torch.no_grad()
    def start_from(self, weights: dict[str, Tensor], residual_rms: float) -> None:
        """Start with the trunk's last layer, whose input is the mean of embedding and hidden state.

        `residual_rms`: root mean square of the trunk's residual stream before that layer. The outputs that
        the layer adds are divided by it. The head's own stream then has a root mean square of about 1, which
        is safe in half precision.
        """
        self.layers[0].load_state_dict(last_layer(weights, self.shape))
        for output in (self.layers[0].self_attn.o_proj, self.layers[0].mlp.down_proj):
            output.weight /= residual_rms
        identity = torch.eye(self.shape.hidden_size)
        self.fc.weight.copy_(torch.cat([identity / 2, identity / 2], dim=1))
        final = weights["model.norm.weight"]
        typical = final.abs().median()
        self.pre_fc_norm_hidden.weight.copy_(typical / final.abs().clamp(min=typical / 8) * final.sign())
        self.norm.weight.copy_(final)

    def save(self, file: Path, draft_ids: Tensor, metadata: dict[str, str]) -> None:
        """Write the head file: float16 weights, and the draft vocabulary with the most frequent ids first."""
        arrays = {PREFIX + name: p.detach().half().cpu().contiguous() for name, p in self.named_parameters()}
        if not all(bool(array.isfinite().all()) for array in arrays.values()):
            raise ValueError("the head does not fit into float16")
        arrays["mtp.draft_ids"] = draft_ids.int().cpu().contiguous()
        save_file(arrays, file, metadata={"format": "mtp", **metadata})


def last_layer(weights: dict[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    prefix = f"model.layers.{shape.num_hidden_layers - 1}."
    return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}


def load_head(file: Path, shape: Shape, device: torch.device | str) -> tuple[Head, Tensor | None]:
    """The head of a file in float32, and its draft vocabulary. Quantised weights are dequantised."""
    arrays = {name.removeprefix(PREFIX): array for name, array in load_file(file).items()}
    with safe_open(file, "pt") as opened:
        quantisation = json.loads((opened.metadata() or {}).get("head_quantization", "{}"))
    draft_ids = arrays.pop("draft_ids", None)
    weights = dequantised(arrays, quantisation)
    num_layers = len({name.split(".")[1] for name in weights if name.startswith("layers.")})
    head = Head(shape, num_layers)
    head.load_state_dict(weights)
    return head.to(device), None if draft_ids is None else draft_ids.long().to(device)


def heads_of(qkv: Tensor, cos: Tensor, sin: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """[rows, T, all heads] -> q, k, v [rows, heads, T, D]; k and v are repeated for the heads of q."""
    num_q, num_kv = shape.num_attention_heads, shape.num_key_value_heads
    qk, v = qkv.split([(num_q + num_kv) * shape.head_dim, num_kv * shape.head_dim], dim=-1)
    qk, v = (x.unflatten(-1, (-1, shape.head_dim)).transpose(1, 2) for x in (rotate(qk, cos, sin), v))
    q, k = qk.split([num_q, num_kv], dim=1)
    return q, repeat_kv_heads(k, shape), repeat_kv_heads(v, shape)


def attend(q: Tensor, keys: Tensor, values: Tensor, depth: int) -> Tensor:
    if depth == 1:
        return F.scaled_dot_product_attention(q, keys, values, is_causal=True)
    mask = chain_mask(q.shape[2], depth, q.dtype, q.device)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


@lru_cache(maxsize=256)
def chain_mask(width: int, depth: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The attention bias of a chain at `depth`: a causal block, then diagonals.  [T, depth * T]"""
    causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    own = torch.eye(width, dtype=torch.bool, device=device)
    seen = torch.cat([causal] + [own] * (depth - 1), dim=1)
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, float("-inf"))
