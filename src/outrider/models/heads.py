"""MTP heads: the module that guesses the token after next, its spec, and how it is read from files.

    x    = fc(concat[norm(embed(x_(t+1))), norm(h_t)])       h_t after the trunk's final norm
    x    = one decoder layer of the trunk's kind, over its own pairs
    out  = norm(x);  logits = the trunk's projection(out)     guesses x_(t+2); deeper, `out` is fed back as h

What differs between families (concat order, what recursion feeds back) is data: a HeadSpec.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from outrider.cache.ragged_kv import KVSpec, LayerView
from outrider.models.errors import ModelUnavailable
from outrider.models.trunk import Trunk

HEAD_FILES = ("mtp/weights.safetensors", "mtp.safetensors")


class HeadError(ModelUnavailable):
    """A head cannot be used with this model; the message names the tensor and the remedy."""


@dataclass(frozen=True)
class HeadSpec:
    """How a family builds its head."""

    embedding_first: bool = True
    recurse_after_norm: bool = True  # the next depth's h is `out`; False: the layer's output before the norm


class MTPHead(nn.Module):
    """The head's parameters and its forward pass; embeddings and projection are the trunk's."""

    def __init__(self, spec: HeadSpec, hidden_size: int, eps: float, layer: nn.Module) -> None:
        super().__init__()
        self.spec = spec
        self.pre_fc_norm_embedding = nn.RMSNorm(hidden_size, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(hidden_size, eps=eps)
        self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layers = [layer]
        self.norm = nn.RMSNorm(hidden_size, eps=eps)

    def __call__(self, hidden: mx.array, embedded: mx.array, view: Any) -> tuple[mx.array, mx.array]:
        """(out, what recursion feeds back), both [rows, width, hidden]."""
        parts = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        if not self.spec.embedding_first:
            parts.reverse()
        x = self.fc(mx.concatenate(parts, axis=-1))
        mask = view.make_mask(x.shape[1]) if isinstance(view, LayerView) else None
        x = self.layers[0](x, mask=mask, cache=view)  # by name: in some families the second is not the mask
        out = self.norm(x)
        return out, out if self.spec.recurse_after_norm else x


@dataclass(frozen=True)
class LoadedHead:
    module: MTPHead
    kv_spec: KVSpec
    source: str
    draft_ids: mx.array | None  # the reduced draft vocabulary, if the head has one


def find_head(model_folder: Path) -> Path | None:
    """The file of a head that lies beside a model, if there is one."""
    return next((model_folder / name for name in HEAD_FILES if (model_folder / name).is_file()), None)


def load_head(file: Path, trunk: Trunk, draft_vocabulary: int | None = None) -> LoadedHead:
    """Read a head in the `mtp.*` layout; `draft_vocabulary` limits drafts to that many most frequent ids."""
    if not file.is_file():
        raise HeadError(f"{file}: no such head file.")
    try:
        weights: dict[str, mx.array] = mx.load(str(file))  # type: ignore[assignment]
    except RuntimeError as error:
        raise HeadError(f"{file} cannot be read as safetensors: {error}") from error
    weights = {name.removeprefix("mtp."): array for name, array in weights.items() if name.startswith("mtp.")}
    if not weights:
        raise HeadError(f"{file} holds no tensor named mtp.*; this layout is not known.")
    draft_ids = weights.pop("draft_ids", None)
    if draft_ids is None:
        draft_ids = _draft_ids_beside(file)
    module = new_head(trunk)
    _check_shapes(module, weights, file)
    module.load_weights(list(weights.items()))
    module.update(tree_map(lambda array: array.astype(trunk.dtype), module.parameters()))
    mx.eval(module.parameters())
    draft_ids = _reduced(draft_ids, draft_vocabulary, trunk.vocab_size)
    return LoadedHead(module, head_kv_spec(module, trunk), str(file), draft_ids)


def new_head(trunk: Trunk, spec: HeadSpec | None = None) -> MTPHead:
    """A head with random weights, with a decoder layer of the trunk's own kind."""
    args = getattr(trunk.model, "args", None) or trunk.model.config
    eps = getattr(args, "rms_norm_eps", None)
    if eps is None:
        raise HeadError("this family's config has no rms_norm_eps, which an MTP head needs.")
    head = MTPHead(spec or HeadSpec(), trunk.hidden_size, eps, _new_layer(trunk, args))
    head.eval()
    return head


def head_kv_spec(head: MTPHead, trunk: Trunk) -> KVSpec:
    """What the head stores for a pair, read off the shapes of a pass that is never computed."""
    from mlx_lm.models.cache import KVCache

    probe = KVCache()
    one = mx.zeros((1, 1, trunk.hidden_size), trunk.dtype)
    try:
        head(one, one, probe)
    except (TypeError, ValueError) as error:
        kind = type(head.layers[0]).__name__
        raise HeadError(f"a {kind} cannot be the layer of an MTP head: {error}") from error
    if probe.keys is None or probe.values is None:
        raise HeadError("the head's layer keeps no keys and values")
    return KVSpec(probe.keys.shape[1], probe.keys.shape[3], probe.values.shape[3], probe.keys.dtype)


def _new_layer(trunk: Trunk, args: Any) -> nn.Module:
    layers = trunk.model.layers
    kind = type(layers[-1])
    takes_index = "layer_idx" in inspect.signature(kind.__init__).parameters
    extra = {"layer_idx": len(layers) - 1} if takes_index else {}
    try:
        layer: nn.Module = kind(args, **extra)
    except TypeError as error:
        raise HeadError(f"a {kind.__name__} cannot be the layer of an MTP head: {error}") from error
    return layer


def _check_shapes(module: MTPHead, weights: dict[str, mx.array], file: Path) -> None:
    parameters: dict[str, mx.array] = dict(tree_flatten(module.parameters()))
    expected = {name: array.shape for name, array in parameters.items()}
    missing = sorted(expected.keys() - weights.keys())
    unknown = sorted(weights.keys() - expected.keys())
    if missing:
        count = f"{len(missing)} of {len(expected)} are"
        raise HeadError(f"{file} is only part of a head: mtp.{missing[0]} is missing ({count}).")
    if unknown:
        raise HeadError(f"{file} holds mtp.{unknown[0]}, which this family's head does not have.")
    for name, shape in expected.items():
        if weights[name].shape != shape:
            raise HeadError(
                f"{file} is a head for another model: mtp.{name} is {list(weights[name].shape)}, "
                f"this model needs {list(shape)}."
            )


def _draft_ids_beside(file: Path) -> mx.array | None:
    """Most frequent ids first, from a `freq.json` of {"ids": […]} beside the head."""
    beside = file.with_name("freq.json")
    if not beside.is_file():
        return None
    try:
        return mx.array(json.loads(beside.read_text())["ids"], mx.int32)
    except (KeyError, TypeError, ValueError) as error:
        raise HeadError(f"{beside} holds no list of token ids named 'ids': {error!r}") from error


def _reduced(draft_ids: mx.array | None, size: int | None, vocab_size: int) -> mx.array | None:
    if draft_ids is None:
        return None
    ids = draft_ids if size is None else draft_ids[:size]
    if ids.ndim != 1 or ids.size == 0:
        raise HeadError("the head's draft vocabulary (draft_ids) is empty, or not one list of ids.")
    if mx.any((ids < 0) | (ids >= vocab_size)).item():
        raise HeadError("the head's draft vocabulary (draft_ids) names ids that this model does not have.")
    return mx.sort(ids.astype(mx.int32))
