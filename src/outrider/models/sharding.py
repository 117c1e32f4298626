"""Divides a model among ranks: each has some of the heads, of the experts' and of the MLP's columns.

mlx-lm's models know which layers are divided how (`shard`). Afterwards its classes for divided layers are
replaced by ordinary ones, so that everything that is done to a model's layers (models/layer_swaps.py, native
matmuls for quantised weights) is done to the parts too. Sums over the ranks are those of rank_sums.py.
Embeddings stay whole. Ranks other than 0 keep a part of the output projection (models/divided_output.py).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import (
    AllToShardedLinear,
    QuantizedAllToShardedLinear,
    QuantizedShardedToAllLinear,
    ShardedToAllLinear,
)
from mlx.utils import tree_unflatten

from outrider.models.divided_output import rows_of_rank, take_rows
from outrider.models.families import UnsupportedModel, unsupported
from outrider.rank_sums import Division, SummedLinear, division_of, other_sums, sum_output

HEAD_COUNTS = (
    "n_heads", "n_kv_heads", "num_attention_heads", "num_key_value_heads", "num_heads", "num_k_heads",
    "num_v_heads",
)  # fmt: skip
ENDS_WITH_SUM = frozenset({  # mlx-lm's layers whose last operation is `all_sum`
    "deepseek_v2.DeepseekV2MoE", "deepseek_v3.DeepseekV3MoE", "deepseek_v32.DeepseekV32MoE", "exaone_moe.MoE",
    "glm4_moe.MoE", "glm4_moe_lite.Glm4MoeLiteMoE", "gpt_oss.MLPBlock", "mistral4.Mistral4MoE",
    "minimax.MiniMaxSparseMoeBlock", "qwen3_moe.Qwen3MoeSparseMoeBlock", "qwen3_next.Qwen3NextSparseMoeBlock",
    "step3p5.Step3p5MoE",
})  # fmt: skip
GATED_DELTA = "qwen3_5.GatedDeltaNet"  # models/recurrent/gated_delta.py sums its output in order


def shard(model: nn.Module, group: mx.distributed.Group, family: str) -> None:
    """Keep this rank's part of the model's weights. Raises UnsupportedModel if it cannot be divided."""
    if not hasattr(model, "shard"):
        raise unsupported(family, "mlx-lm has no tensor parallelism for it: serve it on one machine")
    language_model = _language_model(model)
    with _whole_output(language_model):
        _shard_part(model, model, group, family)
    if group.rank() > 0 and "lm_head" in language_model:
        _keep_own_rows(language_model.lm_head, group)


def shard_layer(layer: nn.Module, model: nn.Module, group: mx.distributed.Group, family: str) -> None:
    """Divide a decoder layer that is not in the model as the model divides its own layers.

    The model's layers may be divided already. Raises UnsupportedModel if the layer cannot be divided.
    """
    outer = copy.copy(model)  # shares every parameter
    language_model = _language_model(model)
    if language_model is not model:
        outer.language_model = copy.copy(language_model)
    try:
        name = _stack_name(language_model)
        setattr(_language_model(outer), name, _with_one_layer(language_model[name], layer))
        with _whole_output(language_model):
            _shard_part(layer, outer, group, family)
    except (AttributeError, KeyError, TypeError) as error:
        kind = type(layer).__name__
        raise unsupported(family, f"mlx-lm divides its own layers, not a {kind} ({error})") from error


def _shard_part(part: nn.Module, model: nn.Module, group: mx.distributed.Group, family: str) -> None:
    """`part`: the modules of the model that its `shard` divides."""
    before, shapes = dict(_head_counts(part)), dict(_linear_shapes(part))
    try:
        model.shard(group)
    except (ValueError, AssertionError) as error:
        raise _not_divisible(family, group, str(error)) from error
    _check_heads(part, before, group, family)
    replaced = [(name, _ordinary(layer, group)) for name, layer in part.named_modules()]
    part.update_modules(tree_unflatten([(name, layer) for name, layer in replaced if layer is not None]))
    _note_other_divisions(part, shapes, group)
    _sum_in_order(part, group, family)


def _language_model(model: nn.Module) -> nn.Module:
    found = getattr(model, "language_model", None)
    return found if isinstance(found, nn.Module) else model


def _stack_name(language_model: nn.Module) -> str:
    """Of the module with the list of decoder layers."""
    for name, part in language_model.items():
        if isinstance(part, nn.Module) and isinstance(part.get("layers"), list):
            return name
    raise AttributeError(f"{type(language_model).__name__} has no list of layers")


def _with_one_layer(stack: nn.Module, layer: nn.Module) -> nn.Module:
    """A stack with this layer and nothing else of the model, which `shard` could divide again."""
    found = copy.copy(stack)
    for name in [*found]:
        del found[name]
    found.layers = [layer]
    return found


def _keep_own_rows(output: nn.Module, group: mx.distributed.Group) -> None:
    for name, array in take_rows(output, rows_of_rank(output["weight"].shape[0], group)).items():
        output[name] = mx.contiguous(array)


def _sum_in_order(model: nn.Module, group: mx.distributed.Group, family: str) -> None:
    """Raises UnsupportedModel if the order of a layer's sums would depend on the tokens beside a token."""
    for layer in other_sums(model):
        name = f"{type(layer).__module__.rpartition('.')[2]}.{type(layer).__name__}"
        if name in ENDS_WITH_SUM:
            sum_output(layer)
        elif name != GATED_DELTA and group.size() > 2:  # two parts have one sum
            raise unsupported(
                family, f"sums over {group.size()} ranks in its {name} depend on the other rows: use 2 ranks"
            )


@contextmanager
def _whole_output(language_model: nn.Module) -> Iterator[None]:
    """mlx-lm leaves the output projection whole if it is tied to the embeddings: say so while it divides."""
    args = getattr(language_model, "args", None)
    was_tied = getattr(args, "tie_word_embeddings", None)
    if args is None or was_tied is None:
        yield
        return
    args.tie_word_embeddings = True
    try:
        yield
    finally:
        args.tie_word_embeddings = was_tied


def _ordinary(layer: nn.Module, group: mx.distributed.Group) -> nn.Module | None:
    """The layer in MLX's ordinary classes; None for a layer that has one."""
    if isinstance(layer, AllToShardedLinear | ShardedToAllLinear):
        linear: nn.Module = nn.Linear(1, 1, bias=False)
    elif isinstance(layer, QuantizedAllToShardedLinear | QuantizedShardedToAllLinear):
        linear = nn.QuantizedLinear(32, 32, bias=False, group_size=32, bits=layer.bits)
        linear.group_size, linear.mode = layer.group_size, getattr(layer, "mode", "affine")
        linear.biases = None  # mxfp4, mxfp8 and nvfp4 have none
    else:
        return None
    is_summed = isinstance(layer, ShardedToAllLinear | QuantizedShardedToAllLinear)
    linear.division = Division(1 if is_summed else 0, group)
    for name in ("weight", "scales", "biases"):
        if layer.get(name) is not None:
            linear[name] = layer[name]
    if not is_summed:
        if "bias" in layer:
            linear.bias = layer.bias
        return linear
    return SummedLinear(linear, layer.get("bias"), group)


def _linear_shapes(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Linear | nn.QuantizedLinear):
            yield path, layer.weight.shape


def _note_other_divisions(
    model: nn.Module, before: dict[str, tuple[int, ...]], group: mx.distributed.Group
) -> None:
    """Layers with segments, and heads of which several ranks have a copy."""
    layers = dict(model.named_modules())
    for path, (num_rows, *columns) in _linear_shapes(model):
        was = before.get(path)  # None: a layer whose output is summed
        is_whole = division_of(layers[path]) is None and was == (num_rows, *columns)
        is_even = division_of(layers[path]) is not None and was == (num_rows * group.size(), *columns)
        if was is not None and not is_whole and not is_even:
            layers[path].division = Division(None, group)


def _head_counts(model: nn.Module) -> Iterator[tuple[tuple[str, str], int]]:
    for path, module in model.named_modules():
        for name in HEAD_COUNTS:
            if isinstance(count := getattr(module, name, None), int):
                yield (path, name), count


def _check_heads(
    model: nn.Module, before: dict[tuple[str, str], int], group: mx.distributed.Group, family: str
) -> None:
    """mlx-lm rounds down a number of heads that the ranks do not divide."""
    size = group.size()
    for key, after in _head_counts(model):
        was = before[key]
        is_repeated = was < size and size % was == 0 and after == 1  # fewer heads than ranks: each has a copy
        if after != was and after * size != was and not is_repeated:
            raise _not_divisible(family, group, f"{key[1]} is {was}")


def _not_divisible(family: str, group: mx.distributed.Group, reason: str) -> UnsupportedModel:
    return unsupported(family, f"{group.size()} ranks do not divide it evenly ({reason})")
