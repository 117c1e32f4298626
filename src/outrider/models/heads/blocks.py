"""The decoder block of a head, built from the trunk's own classes.

most families  like the trunk's last attention layer that has experts if the head has, and none if it has none
exaone_moe     attention of the kind in the config's mtp_layer_types, and a dense MLP
mimo_v2        sliding-window attention and a dense MLP
longcat        one attention and one dense MLP (the trunk's layers have two attentions, and experts)
nemotron_h     a stack of the trunk's blocks, which have one mixer each
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache, make_prompt_cache

from outrider.models.heads.errors import HeadError
from outrider.models.trunk import Trunk

EXPERTS = re.compile(r"(^|\.)(experts|switch_mlp)\.")
EPS_NAMES = {"mimo_v2_flash": "layernorm_epsilon", "nemotron_h": "layer_norm_epsilon"}  # others: rms_norm_eps


@dataclass(frozen=True)
class Block:
    module: nn.Module
    new_cache: Callable[[], Any]  # makes mlx-lm's cache for one row
    aliases: tuple[tuple[str, str], ...]  # (prefix here, prefix that the family's sanitize expects)


@dataclass(frozen=True)
class BlockHints:
    """What is known about a head before its block is built."""

    names: Collection[str] = ()  # the block's tensors in the file; empty for a new head that is to be trained
    config: Mapping[str, Any] | None = None
    depth: int = 0

    @property
    def has_experts(self) -> bool | None:
        if not self.names:
            return None
        return any(EXPERTS.search(name) for name in self.names)


def model_args(model: nn.Module) -> Any:
    return getattr(model, "args", None) or model.config


def norm_eps(model: nn.Module) -> float:
    name = next((EPS_NAMES[family] for family in families(model) if family in EPS_NAMES), "rms_norm_eps")
    eps = getattr(model_args(model), name, None)
    if eps is None:
        raise HeadError("this family's config has no rms_norm_eps, which an MTP head needs.")
    return float(eps)


def families(model: nn.Module) -> set[str]:
    """mlx-lm's names of the model's family and of the families whose classes it inherits from."""
    return {kind.__module__.rpartition(".")[2] for kind in type(model).__mro__}


def new_block(trunk: Trunk, hints: BlockHints) -> Block:
    """A block with random weights."""
    model = trunk.model
    build = next((BUILDERS[name] for name in families(model) if name in BUILDERS), _like_trunk_layer)
    try:
        return build(model, model_args(model), hints)
    except TypeError as error:
        kind = type(model.layers[-1]).__name__
        raise HeadError(f"a {kind} cannot be the layer of an MTP head: {error}") from error


def _like_trunk_layer(model: nn.Module, args: Any, hints: BlockHints) -> Block:
    caches = make_prompt_cache(model)
    number = _matching_layer(model, caches, hints.has_experts)
    kind = type(model.layers[number])
    takes_index = "layer_idx" in inspect.signature(kind.__init__).parameters
    module = kind(args, **({"layer_idx": number} if takes_index else {}))
    cache = caches[number] if len(caches) == len(model.layers) else None
    num_parts = len(cache.caches) if isinstance(cache, CacheList) else 0
    return Block(module, _full_cache(num_parts), (("", _path(model, number)),))


def _matching_layer(model: nn.Module, caches: list[Any], has_experts: bool | None) -> int:
    """The number of the trunk's last attention layer with experts (True), without (False), or any (None)."""
    for number in reversed(range(len(model.layers))):
        layer = model.layers[number]
        cache = caches[number] if len(caches) == len(model.layers) else KVCache()
        parts = getattr(cache, "caches", (cache,))
        is_attention = all(isinstance(part, KVCache | RotatingKVCache) for part in parts)
        layer_has_experts = any(EXPERTS.search(f"{path}.") for path, _ in layer.named_modules())
        if is_attention and has_experts in (None, layer_has_experts):
            return number
    kind = "with experts" if has_experts else "without experts"
    raise HeadError(f"a head for another model: its block is {kind}, and this model has no such layer.")


def _full_cache(num_parts: int) -> Callable[[], Any]:
    """A cache without a window: a head attends to its whole text, except in some families."""
    return (lambda: CacheList(*(KVCache() for _ in range(num_parts)))) if num_parts else KVCache


def _path(model: nn.Module, number: int) -> str:
    """The prefix of the tensor names of one of the trunk's layers."""
    layer = model.layers[number]
    return next(path for path, module in model.named_modules() if module is layer) + "."


def _exaone(model: nn.Module, args: Any, hints: BlockHints) -> Block:
    config = hints.config or {}
    kinds = config.get("mtp_layer_types") or ["full_attention"]
    kind = kinds[min(hints.depth, len(kinds) - 1)]
    number = len(args.layer_types)
    own = replace(
        args,
        layer_types=[*args.layer_types, kind],
        is_moe_layer=[*args.is_moe_layer, bool(hints.has_experts)],
    )
    module = type(model.layers[0])(own, number)
    windows = config.get("mtp_sliding_windows") or [args.sliding_window]
    window = windows[min(hints.depth, len(windows) - 1)]
    new_cache = (lambda: RotatingKVCache(max_size=window)) if kind == "sliding_attention" else KVCache
    like = next((i for i, is_moe in enumerate(args.is_moe_layer) if is_moe), 0)
    return Block(module, new_cache, (("", _path(model, like)),))


def _mimo_v2(model: nn.Module, args: Any, hints: BlockHints) -> Block:
    module = type(model.layers[0])(args, is_moe=False, is_sliding_window=True)
    window = args.sliding_window_size
    return Block(module, lambda: RotatingKVCache(max_size=window), (("", _path(model, 0)),))


class LatentBlock(nn.Module):
    """Latent attention and a dense MLP, from the classes of a trunk whose layers are built differently."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = nn.RMSNorm(hidden_size, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden_size, eps=eps)

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), mask=mask, cache=cache)
        return x + self.mlp(self.post_attention_layernorm(x))


def _longcat(model: nn.Module, args: Any, hints: BlockHints) -> Block:
    layer = model.layers[0]
    attention, mlp = type(layer.self_attn[0])(args), type(layer.mlps[0])(args, False)
    module = LatentBlock(attention, mlp, args.hidden_size, norm_eps(model))
    path = _path(model, 0)
    return Block(module, KVCache, (("self_attn.", f"{path}self_attn.0."), ("", path)))


class BlockStack(nn.Module):
    """Blocks in sequence. Each attention block has its own part of the cache."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = blocks

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        num_attention = 0
        for block in self.blocks:
            if block.block_type == "*":
                x = block(x, mask=mask, cache=cache[num_attention])
                num_attention += 1
            else:
                x = block(x)
        return x


def _nemotron_h(model: nn.Module, args: Any, hints: BlockHints) -> Block:
    numbers = [int(name.split(".")[1]) for name in hints.names if name.startswith("blocks.")]
    kinds = [_mixer_kind(hints.names, n) for n in range(max(numbers, default=-1) + 1)] or ["*", "-"]
    if "*" not in kinds:
        raise HeadError("the head has no attention block: mtp.layers.N.mixer.q_proj.weight is missing.")
    module = BlockStack([type(model.layers[0])(args, kind) for kind in kinds])
    aliases = tuple((f"blocks.{number}.", _path(model, number)) for number in range(len(kinds)))
    return Block(module, _full_cache(kinds.count("*")), aliases)


def _mixer_kind(names: Collection[str], number: int) -> str:
    """mlx-lm's letter for the kind of block: * attention, E experts, - MLP."""
    mixer = f"blocks.{number}.mixer."
    if any(name.startswith(f"{mixer}q_proj.") for name in names):
        return "*"
    return "E" if any(name.startswith(f"{mixer}gate.") for name in names) else "-"


BUILDERS: Mapping[str, Callable[[nn.Module, Any, BlockHints], Block]] = {
    "exaone_moe": _exaone,
    "mimo_v2_flash": _mimo_v2,
    "longcat_flash": _longcat,
    "nemotron_h": _nemotron_h,
}
