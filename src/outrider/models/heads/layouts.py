"""Which tensors of a checkpoint are an MTP head, by their names alone: one `Layout` for each naming scheme.

A rule maps a checkpoint's tensor name to a parameter of MTPHead (whose block is `layers.0.`), and back for
error messages. `{i}` is the depth, `{b}` a block within one depth. A rule without `{i}` holds for all depths.
A rule to None names a tensor that is not needed, such as a copy of the trunk's embeddings. Names are compared
without the prefix of a wrapper model (`model.`, `language_model.`, `model.language_model.`).

Pure Python: tensor names and a config are enough, so a checkpoint can be inspected before it is downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

BLOCK = "layers.0."
EMBEDDING_NORM, HIDDEN_NORM = "pre_fc_norm_embedding.", "pre_fc_norm_hidden."
WRAPPER = re.compile(r"^(?:model\.)?(?:language_model\.)?(?:model\.)?")
Rules = tuple[tuple[str, str | None], ...]


@dataclass(frozen=True)
class HeadSpec:
    """How a family builds its head."""

    embedding_first: bool = True
    recurse_after_norm: bool = True  # the next depth's h is `out`; False: the block's output before the norm
    is_chained: bool = True  # with a layer for each depth: h is the previous depth's; False: the trunk's
    has_norm: bool = True  # False: the head uses the trunk's final norm


@dataclass(frozen=True)
class Layout:
    name: str
    marker: re.Pattern[str]  # matches names that only this layout has
    rules: Rules  # the first match holds
    families: frozenset[str]  # mlx-lm's families with such heads; empty: any family
    spec: HeadSpec = field(default_factory=HeadSpec)
    follows_trunk: bool = False  # depth 0 is numbered after the trunk's last layer


@dataclass(frozen=True)
class HeadTensors:
    """The tensors of a head."""

    layout: Layout
    targets: Mapping[str, tuple[int | None, str]]  # checkpoint name -> depth (None: all), MTPHead's name
    unused: tuple[str, ...]  # tensors of the head that only copy the trunk's
    wrapper: str  # the prefix before the layout's own names
    first: int  # the number of depth 0 in the checkpoint

    def __contains__(self, name: str) -> bool:
        return name in self.targets or name in self.unused

    @property
    def num_depths(self) -> int:
        return max((depth + 1 for depth, _ in self.targets.values() if depth is not None), default=1)

    def original(self, depth: int, ours: str) -> str:
        """The name that a parameter of MTPHead would have in this checkpoint."""
        for theirs, target in self.layout.rules:
            if target is None:
                continue
            match = re.fullmatch(_pattern(target), ours)
            if match:
                parts = {"i": str(depth + self.first), **match.groupdict()}
                return self.wrapper + _filled(theirs, parts) + parts["rest"]
        return ours


QWEN = Layout(
    "qwen",
    re.compile(r"mtp\.(fc|norm|pre_fc_norm_embedding|pre_fc_norm_hidden|layers\.\d+)\."),
    (
        ("mtp.fc.", "fc."),
        ("mtp.norm.", "norm."),
        ("mtp.pre_fc_norm_embedding.", EMBEDDING_NORM),
        ("mtp.pre_fc_norm_hidden.", HIDDEN_NORM),
        ("mtp.layers.{i}.", BLOCK),
        ("mtp.embed_tokens.", None),
        ("mtp.lm_head.", None),
        ("mtp.", ""),  # the draft vocabulary; loading refuses all other names
    ),
    frozenset(),
)
NEXTN = Layout(
    "nextn",
    re.compile(r"layers\.\d+\.(eh_proj|enorm|hnorm|shared_head)\."),
    (
        ("layers.{i}.enorm.", EMBEDDING_NORM),
        ("layers.{i}.hnorm.", HIDDEN_NORM),
        ("layers.{i}.eh_proj.", "fc."),
        ("layers.{i}.shared_head.norm.", "norm."),
        ("layers.{i}.shared_head.head.", None),
        ("layers.{i}.embed_tokens.", None),
        ("layers.{i}.self_attn.rotary_emb.", None),
        ("layers.{i}.", BLOCK),
    ),
    frozenset({"deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite"}),
    follows_trunk=True,
)
MIMO = Layout(
    "mimo",
    re.compile(r"mtp_layers\.\d+\."),
    (
        ("mtp_layers.{i}.token_layernorm.", EMBEDDING_NORM),
        ("mtp_layers.{i}.hidden_layernorm.", HIDDEN_NORM),
        ("mtp_layers.{i}.input_proj.", "fc."),
        ("mtp_layers.{i}.final_layernorm.", "norm."),
        ("mtp_layers.{i}.self_attn.rotary_emb.", None),
        ("mtp_layers.{i}.", BLOCK),
    ),
    frozenset({"mimo"}),
    HeadSpec(embedding_first=False),
)
MIMO_V2 = Layout(
    "mimo_v2",
    re.compile(r"mtp\.layers\.\d+\.(enorm|hnorm|eh_proj|final_layernorm|pre_mlp_layernorm)\."),
    (
        ("mtp.layers.{i}.enorm.", EMBEDDING_NORM),
        ("mtp.layers.{i}.hnorm.", HIDDEN_NORM),
        ("mtp.layers.{i}.eh_proj.", "fc."),
        ("mtp.layers.{i}.final_layernorm.", "norm."),
        ("mtp.layers.{i}.pre_mlp_layernorm.", BLOCK + "post_attention_layernorm."),
        ("mtp.layers.{i}.", BLOCK),
    ),
    frozenset({"mimo_v2_flash"}),
    HeadSpec(is_chained=False),
)
ERNIE = Layout(
    "ernie",
    re.compile(r"mtp_(emb_norm|hidden_norm|linear_proj|block)\.\d+\."),
    (
        ("mtp_emb_norm.{i}.", EMBEDDING_NORM),
        ("mtp_hidden_norm.{i}.", HIDDEN_NORM),
        ("mtp_linear_proj.{i}.", "fc."),
        ("mtp_block.{i}.", BLOCK),
    ),
    frozenset({"ernie4_5", "ernie4_5_moe"}),
    HeadSpec(has_norm=False),
)
LONGCAT = Layout(
    "longcat",
    re.compile(r"mtp\.layers\.\d+\.(enorm\.m|hnorm\.m|transformer_layer)\."),
    (
        ("mtp.layers.{i}.enorm.m.", EMBEDDING_NORM),
        ("mtp.layers.{i}.hnorm.m.", HIDDEN_NORM),
        ("mtp.layers.{i}.eh_proj.", "fc."),
        ("mtp.norm.", "norm."),
        ("mtp.embed_tokens.", None),
        ("mtp.layers.{i}.transformer_layer.mlp.", BLOCK + "mlp."),
        ("mtp.layers.{i}.", BLOCK),
    ),
    frozenset({"longcat_flash"}),
)
NEMOTRON_H = Layout(
    "nemotron_h",
    re.compile(r"mtp\.layers\.\d+\.mixer\."),
    (
        ("mtp.layers.0.enorm.", EMBEDDING_NORM),
        ("mtp.layers.0.hnorm.", HIDDEN_NORM),
        ("mtp.layers.0.eh_proj.", "fc."),
        ("mtp.layers.{b}.final_layernorm.", "norm."),
        ("mtp.layers.{b}.", BLOCK + "blocks.{b}."),
    ),
    frozenset({"nemotron_h"}),
)
LAYOUTS = (LONGCAT, NEMOTRON_H, MIMO_V2, MIMO, ERNIE, NEXTN, QWEN)  # the first whose marker matches

DEPTH_KEYS = (
    "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "mtp_num_layers",
    "multi_token_pred_depth",
)  # fmt: skip
UNDECLARED_DEPTHS = {"qwen3_next": 1, "mimo_v2_flash": 3, "longcat_flash": 1}  # the config has no key for it


def expected(config: Mapping[str, Any]) -> int:
    """How many MTP layers the original checkpoint of this config has; 0: none, as far as is known."""
    for part in (config, config.get("text_config") or {}):
        for key in DEPTH_KEYS:
            if isinstance(part.get(key), int):
                return int(part[key])
    return UNDECLARED_DEPTHS.get(str(config.get("model_type")), 0)


def recognise(names: Iterable[str], config: Mapping[str, Any] | None = None) -> HeadTensors | None:
    """The head among these tensors, complete or not; None: there is none."""
    bare = {name: WRAPPER.sub("", name) for name in names}
    if any(name.startswith("pre_fc_norm_") for name in bare.values()):  # a checkpoint that is only a head
        bare = {name: f"mtp.{own}" for name, own in bare.items() if not own.startswith("lm_head.")}
    for layout in LAYOUTS:
        if any(layout.marker.match(own) for own in bare.values()):
            return _tensors(layout, bare, config or {})
    return None


def _tensors(layout: Layout, bare: Mapping[str, str], config: Mapping[str, Any]) -> HeadTensors:
    first = _first_depth(layout, bare.values(), config) if layout.follows_trunk else 0
    targets: dict[str, tuple[int | None, str]] = {}
    unused, wrapper = [], ""
    for name, own in bare.items():
        for theirs, ours in layout.rules:
            match = re.fullmatch(_pattern(theirs), own)
            if match is None:
                continue
            parts = match.groupdict()
            depth = int(parts["i"]) - first if "i" in parts else None
            if depth is not None and depth < 0:
                break  # a layer of the trunk
            wrapper = name.removesuffix(own) if name.endswith(own) else ""
            if ours is None:
                unused.append(name)
            else:
                targets[name] = depth, _filled(ours, parts) + parts["rest"]
            break
    return HeadTensors(layout, targets, tuple(unused), wrapper, first)


def _first_depth(layout: Layout, names: Iterable[str], config: Mapping[str, Any]) -> int:
    """The number of the trunk's layers; the head's first number in files that number the head from 0."""
    numbers = {int(name.split(".")[1]) for name in names if layout.marker.match(name)}
    for part in (config, config.get("text_config") or {}):
        size = part.get("num_hidden_layers")
        if isinstance(size, int) and max(numbers) >= size:
            return size
    return min(numbers)


def _pattern(rule: str) -> str:
    escaped = re.escape(rule).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{b\}", r"(?P<b>\d+)")
    return escaped + "(?P<rest>.*)"


def _filled(rule: str, parts: Mapping[str, str]) -> str:
    return rule.replace("{i}", parts.get("i", "")).replace("{b}", parts.get("b", "N"))
