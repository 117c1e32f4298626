"""The MTP head in PyTorch: its start, its recursion over whole conversations, its file.

Parameters carry the names of the `mtp.*` layout that the engine reads, so a state dict is a head file.
Must not know about losses or optimisers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from trunk import Shape, repeat_kv_heads, rope_angles, rotate

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
    """The head's matrices in the dtype of a pass. Matrices with the same input are joined."""

    from_embedding: Tensor
    from_hidden: Tensor
    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor

    @classmethod
    def of(cls, head: Head, dtype: torch.dtype) -> Fused:
        attention, mlp = head.layers[0].self_attn, head.layers[0].mlp
        from_embedding, from_hidden = head.fc.weight.to(dtype).chunk(2, dim=1)
        return cls(
            from_embedding,
            from_hidden,
            torch.cat([attention[name].weight for name in ("q_proj", "k_proj", "v_proj")]).to(dtype),
            attention.o_proj.weight.to(dtype),
            torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).to(dtype),
            mlp.down_proj.weight.to(dtype),
        )


class Head(nn.Module):
    """x = fc(concat[norm(embedding), norm(h)]), one decoder layer, norm; fed back as h for the next depth."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.shape = shape
        self.pre_fc_norm_embedding = Norm(size, eps)
        self.pre_fc_norm_hidden = Norm(size, eps)
        self.fc = linear(2 * size, size)
        self.layers = nn.ModuleList([decoder_layer(shape)])
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
        layer, shape = self.layers[0], self.shape
        w = Fused.of(self, dtype)
        width = hidden.shape[1]
        of_token = F.linear(self.pre_fc_norm_embedding(embedded).to(dtype), w.from_embedding)
        angles = rope_angles(torch.arange(width + depths, device=hidden.device), shape)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outs: list[Tensor] = []
        for depth in range(1, depths + 1):
            of_hidden = F.linear(self.pre_fc_norm_hidden(hidden).to(dtype), w.from_hidden)
            x = F.pad(of_token[:, depth:], (0, 0, 0, depth)).float() + of_hidden
            cos, sin = (angle[depth - 1 : depth - 1 + width] for angle in angles)
            q, k, v = heads_of(F.linear(layer.input_layernorm(x).to(dtype), w.qkv), cos, sin, shape)
            keys.append(k)
            values.append(v)
            seen = attend(q, torch.cat(keys, dim=2), torch.cat(values, dim=2), depth)
            x = x + F.linear(seen.transpose(1, 2).flatten(2), w.o)
            gate, up = F.linear(layer.post_attention_layernorm(x).to(dtype), w.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, w.down)
            hidden = self.norm(x)
            outs.append(hidden)
        return outs

    @torch.no_grad()
    def start_from(self, weights: dict[str, Tensor], residual_rms: float) -> None:
        """Start with the trunk's last layer, whose input is the mean of embedding and hidden state.

        `residual_rms`: root mean square of the trunk's residual stream before that layer. The outputs that
        the layer adds are divided by it. The head's own stream then has a root mean square of about 1, which
        is safe in half precision.
        """
        last = f"model.layers.{self.shape.num_hidden_layers - 1}."
        layer = {name.removeprefix(last): w for name, w in weights.items() if name.startswith(last)}
        self.layers[0].load_state_dict(layer)
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


def load_head(file: Path, shape: Shape, device: torch.device | str) -> tuple[Head, Tensor | None]:
    """The head of a file in float32, and its draft vocabulary."""
    arrays = {name.removeprefix(PREFIX): array for name, array in load_file(file).items()}
    draft_ids = arrays.pop("draft_ids", None)
    head = Head(shape)
    head.load_state_dict({name: array.float() for name, array in arrays.items()})
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
