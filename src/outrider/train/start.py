"""The head before its first step. It starts close to the trunk's last layer.

    layer   the trunk's last layer
    fc      [I/2 | I/2]: the mean of the two normed inputs
    norms   the norm of the hidden state undoes the trunk's final norm, so the layer gets familiar inputs;
            the output norm is the trunk's final norm

The best scale of the layer's input differs between models. The start tries SCALES and takes the scale with
the smallest loss.
"""

from __future__ import annotations

import copy

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from outrider.models.dtypes import dequantize
from outrider.models.heads import MTPHead, head_kv_spec, new_head
from outrider.models.trunk import Trunk
from outrider.train.batches import Batch
from outrider.train.chain import chain_outputs
from outrider.train.loss import loss_and_gradients

SCALES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)  # factors on the layer's input; chosen by hand
MIN_GAIN = 0.1  # share of the median gain; bounds the division for channels with a tiny gain; chosen by hand
FINAL_NORMS = ("norm", "final_layernorm", "final_norm", "ln_f")


def starting_head(trunk: Trunk, batch: Batch, seed: int) -> MTPHead:
    """A float32 head for this trunk. HeadError: the trunk's layer cannot be a head's layer."""
    mx.random.seed(seed)  # for parameters that the trunk's layer does not have
    head = new_head(trunk)
    head_kv_spec(head, trunk)
    head.update(tree_map(lambda array: array.astype(mx.float32), head.parameters()))
    wanted = _names(head.layers[0])
    # The trunk's layer with the most parameter names of the head's layer; of several, the last.
    similar = max(reversed(trunk.model.layers), key=lambda layer: len(wanted & _names(layer)))
    _copy_layer(similar, head.layers[0])
    half = 0.5 * mx.eye(trunk.hidden_size)
    head.fc.weight = mx.concatenate([half, half], axis=1)
    gain = final_gain(trunk)
    head.norm.weight = gain
    hidden = trunk.inner(batch.token_ids)
    best = min(SCALES, key=lambda scale: _loss(_scaled(head, gain, scale), trunk, batch, hidden))
    _scaled(head, gain, best)
    mx.eval(head.parameters())
    return head


def final_gain(trunk: Trunk) -> mx.array:
    """The factor of the trunk's final norm for each channel; ones if the norm is not found.  [H]"""
    ones = mx.ones(trunk.hidden_size)
    norm = next((found for name in FINAL_NORMS if (found := getattr(trunk.inner, name, None))), None)
    if norm is None:
        return ones
    gain = norm(ones.astype(trunk.dtype)).astype(mx.float32)  # an RMS norm of ones is its gain
    is_gain = gain.shape == ones.shape and bool(mx.median(mx.abs(gain)) > 0)
    return gain if is_gain else ones


def _names(module: nn.Module) -> set[str]:
    named: dict[str, mx.array] = dict(tree_flatten(module.parameters()))
    return set(named)


def _copy_layer(source: nn.Module, target: nn.Module) -> None:
    """Copy every parameter of the same name and shape, dequantised."""
    plain = copy.deepcopy(source)
    dequantize(plain)
    found = dict(tree_flatten(plain.parameters()))
    wanted: dict[str, mx.array] = dict(tree_flatten(target.parameters()))
    taken = [
        (name, found[name].astype(mx.float32))
        for name, array in wanted.items()
        if name in found and found[name].shape == array.shape
    ]
    target.update(tree_unflatten(taken))


def _scaled(head: MTPHead, gain: mx.array, scale: float) -> MTPHead:
    size = mx.maximum(mx.abs(gain), MIN_GAIN * mx.median(mx.abs(gain)))
    head.pre_fc_norm_embedding.weight = mx.full(gain.shape, scale)
    head.pre_fc_norm_hidden.weight = 2 * scale * mx.where(gain < 0, -1.0, 1.0) / size
    return head


def _loss(head: MTPHead, trunk: Trunk, batch: Batch, hidden: mx.array) -> float:
    embedded = trunk.embed(batch.token_ids).astype(mx.float32)
    guesses = batch.guesses(chain_outputs(head, hidden.astype(mx.float32), embedded, 1))
    loss, _ = loss_and_gradients(trunk, guesses, batch.at_targets(hidden), batch)
    return loss.total
