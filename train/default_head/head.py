"""The MTP head in PyTorch: where it starts from, its recursion over whole conversations, its file.

Parameters carry the names of the `mtp.*` layout that the engine reads, so a state dict is a head file.
Must not know about losses or optimisers.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from trunk import Shape, rope_angles, rotate, spread_heads

PREFIX = "mtp."


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, kv_width = (
            heads * shape.head_dim for heads in (shape.num_attention_heads, shape.num_key_value_heads)
        )
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)


class Head(nn.Module):
    """x = fc(concat[norm(embedding), norm(h)]), one decoder layer, norm; fed back as h for the next depth."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.shape = shape
        self.pre_fc_norm_embedding = Norm(size, eps)
        self.pre_fc_norm_hidden = Norm(size, eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(shape)])
        self.norm = Norm(size, eps)

    def forward(self, embedded: Tensor, hidden: Tensor, depths: int) -> list[Tensor]:
        """outs[d - 1][:, t] guesses token t + d + 1 from h_t and the tokens up to t + d.

        embedded, hidden [rows, T, H] are of tokens 0..T-1. The pair at t, depth 1, sits at position t. Depth d
        continues the chain that starts at t: it sits at t + d - 1, and sees the pairs 0..t of depth 1 and the
        cells of its own chain, nothing of other chains.

            keys:     depth 1: 0 1 2 ... t t+1 ...   depth 2: 0 ... t ...   depth 3: 0 ... t ...
            chain t:           x x x ... x                          x                      x
        """
        layer = self.layers[0]
        rows, width, size = hidden.shape
        from_embedding, from_hidden = self.fc.weight.split(size, dim=1)
        token_part = F.linear(self.pre_fc_norm_embedding(embedded), from_embedding)
        positions = torch.arange(width + depths, device=hidden.device)
        angles = rope_angles(positions, self.shape)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outs: list[Tensor] = []
        for depth in range(1, depths + 1):
            ahead = F.pad(token_part[:, depth:], (0, 0, 0, depth))
            x = ahead.float() + F.linear(self.pre_fc_norm_hidden(hidden), from_hidden)
            cos, sin = (angle[depth - 1 : depth - 1 + width] for angle in angles)
            q, k, v = self._project(layer.input_layernorm(x), cos, sin)
            keys.append(k)
            values.append(v)
            seen = self._attend(q, torch.cat(keys, dim=2), torch.cat(values, dim=2), depth)
            x = x + layer.self_attn.o_proj(seen.transpose(1, 2).reshape(rows, width, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            hidden = self.norm(x)
            outs.append(hidden)
        return outs

    def _project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [rows, heads, T, D]; key heads are repeated for the query heads that read them."""
        attention, shape = self.layers[0].self_attn, self.shape
        q, k = rotate(attention.q_proj(x), cos, sin), rotate(attention.k_proj(x), cos, sin)
        heads = (y.unflatten(-1, (-1, shape.head_dim)).transpose(1, 2) for y in (q, k, attention.v_proj(x)))
        q, k, v = heads
        return q, spread_heads(k, shape), spread_heads(v, shape)

    @staticmethod
    def _attend(q: Tensor, keys: Tensor, values: Tensor, depth: int) -> Tensor:
        if depth == 1:
            return F.scaled_dot_product_attention(q, keys, values, is_causal=True)
        mask = chain_mask(q.shape[2], depth, q.dtype, q.device)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)

    @torch.no_grad()
    def start_from(self, weights: dict[str, Tensor], residual_rms: float) -> None:
        """Begin near a copy of the trunk's last layer, fed with the mean of embedding and hidden state.

        `residual_rms` is the size of the trunk's residual stream before that layer. What the layer adds is
        divided by it, so that the head's own stream is about 1: half precision then has room to spare.
        """
        last = f"model.layers.{self.shape.num_hidden_layers - 1}."
        layer = {name.removeprefix(last): w for name, w in weights.items() if name.startswith(last)}
        self.layers[0].load_state_dict(layer)
        for linear in (self.layers[0].self_attn.o_proj, self.layers[0].mlp.down_proj):
            linear.weight /= residual_rms
        eye = torch.eye(self.shape.hidden_size)
        self.fc.weight.copy_(torch.cat([eye / 2, eye / 2], dim=1))
        final = weights["model.norm.weight"]
        typical = final.abs().median()
        self.pre_fc_norm_hidden.weight.copy_(typical / final.abs().clamp(min=typical / 8) * final.sign())
        self.norm.weight.copy_(final)

    @torch.no_grad()
    def shrink_residual(self, factor: float) -> None:
        """Divide the residual stream by `factor`; the function stays the same but for the norms' epsilon."""
        for linear in (self.fc, self.layers[0].self_attn.o_proj, self.layers[0].mlp.down_proj):
            linear.weight /= factor

    def save(self, file: Path, draft_ids: Tensor, metadata: dict[str, str]) -> None:
        """The head file: float16, with the draft vocabulary, most frequent ids first."""
        arrays = {PREFIX + name: p.detach().half().cpu().contiguous() for name, p in self.named_parameters()}
        if not all(bool(array.isfinite().all()) for array in arrays.values()):
            raise ValueError("the head does not fit into float16")
        arrays["mtp.draft_ids"] = draft_ids.int().cpu().contiguous()
        save_file(arrays, file, metadata={"format": "mtp", **metadata})


def load_head(file: Path, shape: Shape, device: torch.device | str) -> tuple[Head, Tensor | None]:
    """A head file as float32, and its draft vocabulary."""
    arrays = {name.removeprefix(PREFIX): array for name, array in load_file(file).items()}
    draft_ids = arrays.pop("draft_ids", None)
    head = Head(shape)
    head.load_state_dict({name: array.float() for name, array in arrays.items()})
    return head.to(device), None if draft_ids is None else draft_ids.long().to(device)


@lru_cache(maxsize=256)
def chain_mask(width: int, depth: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What a chain at `depth` does not see, as a bias: the causal block, then diagonals.  [T, depth * T]"""
    causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    own = torch.eye(width, dtype=torch.bool, device=device)
    seen = torch.cat([causal] + [own] * (depth - 1), dim=1)
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, float("-inf"))
