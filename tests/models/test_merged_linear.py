"""Layers that read the same input, computed as one matmul: which they are, what they give, what is cached."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from outrider.models import merged_linear
from outrider.models.files.fingerprint import fingerprint
from outrider.models.heads import head_layout, new_head
from outrider.models.layer_swaps import without_speed_swaps
from outrider.models.merged_linear import MergedLinearPart, MergedQuantizedLinearPart, merge
from outrider.models.trunk import Trunk
from ragged_rows import RaggedRows, error, solo_logits
from tiny_models import TINY, VOCAB_SIZE, fill, quantized_tiny_model, tiny_model

TEXT = [(7 * i * i + 3 * i + 5) % VOCAB_SIZE for i in range(24)]
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
DELTA = {f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a")}
HEADS = {"linear_num_value_heads": 8, "linear_num_key_heads": 4}  # as many as a vector is long


def merged_model(family: str, **changes: Any) -> tuple[nn.Module, Trunk]:
    model = tiny_model(family, **changes)
    trunk = Trunk(model, max_context=256)
    merge(trunk.model, trunk.dry_run)
    return model, trunk


def layers_of(model: nn.Module) -> list[Any]:
    kinds = MergedLinearPart, MergedQuantizedLinearPart
    return [module for _, module in model.named_modules() if isinstance(module, kinds)]


def groups(block: nn.Module) -> set[frozenset[str]]:
    """The names of the layers of each matmul."""
    found: dict[int, set[str]] = {}
    for name, module in block.named_modules():
        if isinstance(module, MergedLinearPart | MergedQuantizedLinearPart):
            found.setdefault(id(module.merged), set()).add(name)
    return {frozenset(names) for names in found.values()}


def sets(*names: Any) -> set[frozenset[str]]:
    return {frozenset(each) for each in names}


def ragged_logits(trunk: Trunk) -> np.ndarray:
    rows = RaggedRows(trunk, num_slots=2, capacity=64)
    rows.join("a", slot=0)
    rows.join("b", slot=1)
    first = rows.feed({"a": TEXT[:20], "b": TEXT[5:9]})["a"]
    second = rows.feed({"a": TEXT[20:24], "b": TEXT[9:10]})["a"]
    return np.concatenate([first, second])


def nothing_is_cached(model: nn.Module) -> bool:
    return all(layer.merged._outputs is None for layer in layers_of(model))


# -- what is computed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(TINY))
def test_a_model_gives_what_it_gave(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merged_linear, "ROWS_STEP", 1)  # all that could be merged
    model = tiny_model(family)
    trunk = Trunk(model, max_context=256)
    alone, ragged, num_bytes = solo_logits(model, TEXT), ragged_logits(trunk), trunk.num_bytes
    merge(trunk.model, trunk.dry_run)
    assert error(solo_logits(model, TEXT), alone) <= 1e-5
    assert error(ragged_logits(trunk), ragged) <= 1e-5
    assert nothing_is_cached(model)
    assert trunk.num_bytes == num_bytes
    with without_speed_swaps(model):
        assert not layers_of(model)
        assert (solo_logits(model, TEXT) == alone).all()


@pytest.mark.parametrize(
    ("family", "wanted"),
    [
        ("llama", sets(QKV, GATE_UP)),
        ("qwen2", sets(QKV, GATE_UP)),  # with biases
        ("qwen3", sets(QKV, GATE_UP)),
        ("qwen3_5", sets(DELTA, GATE_UP)),
        ("qwen3_next", sets(
            ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"),
            ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        )),
        ("deepseek_v3", sets(("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"), GATE_UP)),
        ("cohere2", sets(QKV + GATE_UP)),  # attention and MLP side by side
        ("gemma4_text", sets(QKV, GATE_UP)),
        ("phi3", set()),  # merged as published
    ],
)  # fmt: skip
def test_layers_with_the_same_input_are_merged(family: str, wanted: set[frozenset[str]]) -> None:
    model, trunk = merged_model(family, **(HEADS if "linear_num_value_heads" in TINY[family] else {}))
    assert groups(trunk.model.layers[0]) == wanted
    assert error(ragged_logits(trunk), solo_logits(model, TEXT)) <= 1e-5


def test_a_layer_that_takes_over_another_ones_keys_has_its_queries_alone() -> None:
    model, _ = merged_model("gemma4_text")
    assert groups(model.layers[-1]) == sets(GATE_UP)


@pytest.mark.parametrize(
    "name",
    ["llama-4bit", "qwen3-5bit", "qwen3_5-6bit", "qwen3_5_moe-8bit", "llama-mixed", "qwen3_next-mixed"],
)
def test_quantised_layers_are_merged_too(name: str) -> None:
    model, _ = quantized_tiny_model(name)
    trunk = Trunk(model, max_context=256)
    before, num_bytes = ragged_logits(trunk), trunk.num_bytes
    merge(trunk.model, trunk.dry_run)
    assert {type(layer) for layer in layers_of(model)} == {MergedQuantizedLinearPart}
    assert error(ragged_logits(trunk), before) <= 1e-5
    assert trunk.num_bytes == num_bytes


def test_layers_of_other_bits_groups_or_types_stay_apart() -> None:
    """Two layers of one format are merged; the third stays apart."""
    model = tiny_model("llama")
    own = {"0.self_attn.v_proj": {"bits": 8, "group_size": 32}, "1.self_attn.q_proj": False}
    own |= {"2.self_attn.k_proj": {"bits": 4, "group_size": 64}, "2.mlp.up_proj": False}

    def how(path: str, module: nn.Module) -> Any:
        return hasattr(module, "to_quantized") and own.get(path.removeprefix("model.layers."), True)

    nn.quantize(model, group_size=32, bits=4, class_predicate=how)
    trunk = Trunk(model, max_context=256)
    before = ragged_logits(trunk)
    merge(trunk.model, trunk.dry_run)
    found = [groups(block) for block in model.layers]
    q, k, v = QKV
    assert found == [sets((q, k), GATE_UP), sets((k, v), GATE_UP), sets((q, v))]
    assert error(ragged_logits(trunk), before) <= 1e-5


def test_layers_with_and_without_a_bias_stay_apart() -> None:
    model = tiny_model("qwen2")
    del model.layers[0].self_attn.k_proj["bias"]
    trunk = Trunk(model, max_context=256)
    before = ragged_logits(trunk)
    merge(trunk.model, trunk.dry_run)
    assert groups(model.layers[0]) == sets((QKV[0], QKV[2]), GATE_UP)
    assert error(ragged_logits(trunk), before) <= 1e-5


def test_adapters_and_parts_that_are_no_whole_vector_stay_apart() -> None:
    class Adapted(nn.Linear):
        pass

    model = tiny_model("qwen3_5")  # four heads: a matmul with such a part would not be aligned
    for block in model.language_model.model.layers:
        block.mlp.up_proj.__class__ = Adapted
    trunk = Trunk(model, max_context=256)
    merge(trunk.model, trunk.dry_run)
    assert groups(model.language_model.model.layers[0]) == sets(DELTA - {*sorted(DELTA)[:2]})
    assert type(model.language_model.model.layers[0].linear_attn.in_proj_b) is nn.Linear


def test_a_heads_layers_are_merged_with_each_other_and_not_with_the_trunks() -> None:
    trunk = Trunk(tiny_model("qwen3"), max_context=256)
    layer = new_head(trunk)
    fill(layer, 5)
    hidden, embedded = mx.random.normal((2, 2, 3, trunk.hidden_size), key=mx.random.key(1))
    before = np.array(layer(hidden, embedded, None)[0])
    merge(trunk.model, trunk.dry_run)
    merge(layer, partial(head_layout, layer, trunk))
    assert groups(layer) == {frozenset(f"layers.0.{name}" for name in names) for names in (QKV, GATE_UP)}
    assert error(np.array(layer(hidden, embedded, None)[0]), before) <= 1e-6
    assert {id(one.merged) for one in layers_of(layer)}.isdisjoint(
        id(one.merged) for one in layers_of(trunk.model)
    )


# -- parameters ------------------------------------------------------------------------------------------


def test_parameters_and_their_memory_stay_what_they_were() -> None:
    model = tiny_model("qwen3_5", **HEADS)
    trunk = Trunk(model, max_context=256)
    before = {name: np.array(array) for name, array in tree_flatten(model.parameters())}
    name = fingerprint([trunk.model])
    gc.collect()
    gc.disable()  # nothing may wait for it
    mx.clear_cache()
    active = mx.get_active_memory()
    mx.reset_peak_memory()
    merge(trunk.model, trunk.dry_run)
    gc.enable()
    assert mx.get_active_memory() <= active
    largest = max(sum(one.nbytes for one in each.merged._linear.values()) for each in layers_of(model))
    assert mx.get_peak_memory() <= active + 2 * largest
    assert mx.get_cache_memory() <= 2 * largest
    after = dict(tree_flatten(model.parameters()))
    assert after.keys() == before.keys()
    assert all((np.array(after[name]) == array).all() for name, array in before.items())
    assert fingerprint([trunk.model]) == name


def test_merged_twice_is_merged_once() -> None:
    model, trunk = merged_model("llama")
    groups_before = [layer.merged for layer in layers_of(model)]
    merge(trunk.model, trunk.dry_run)
    assert [layer.merged for layer in layers_of(model)] == groups_before


def test_without_speed_swaps_leaves_each_model_as_it_found_it() -> None:
    (one, _), other = merged_model("llama"), tiny_model("llama")
    found = layers_of(one)
    with without_speed_swaps(one, other):
        assert not layers_of(one)
    assert layers_of(one) == found != []
    assert not layers_of(other)


# -- what is cached, and for how long --------------------------------------------------------------------


@pytest.fixture
def qkv() -> list[Any]:
    """Merged layers of one matmul."""
    model, _ = merged_model("qwen2")
    attention = model.layers[0].self_attn
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def inputs(seed: int) -> mx.array:
    return mx.random.normal((2, 3, 64), key=mx.random.key(seed))


def alone(layer: Any, x: mx.array) -> np.ndarray:
    return np.array(x @ layer.weight.T + layer.bias)


def is_right(layer: Any, x: mx.array, found: mx.array) -> bool:
    return bool(np.allclose(np.array(found), alone(layer, x), atol=1e-5))


def test_one_matmul_is_computed_for_all(qkv: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    whole = nn.Linear.__call__

    def counted(self: nn.Linear, x: mx.array) -> mx.array:
        shapes.append(self.weight.shape)
        return whole(self, x)

    monkeypatch.setattr(nn.Linear, "__call__", counted)
    x = inputs(1)
    for layer in reversed(qkv):
        assert is_right(layer, x, layer(x))
    assert shapes == [(128, 64)]


def test_inputs_may_come_in_any_order(qkv: list[Any]) -> None:
    """As of threads that share a model, each with its own input."""
    one, two = inputs(1), inputs(2)
    for layer in (*qkv, qkv[1], *reversed(qkv)):
        for x in (one, two, two):
            assert is_right(layer, x, layer(x))


def test_an_input_that_changed_after_all_have_read_it_is_read_again(qkv: list[Any]) -> None:
    x = inputs(1)
    for _ in range(2):
        assert all(is_right(layer, x, layer(x)) for layer in qkv)
        x += 1


def test_parts_that_nobody_fetches_go_with_their_input(qkv: list[Any]) -> None:
    def only_queries(x: mx.array) -> mx.array:
        found: mx.array = qkv[0](x)
        assert qkv[0].merged._outputs is not None
        return found

    mx.eval(only_queries(inputs(1)))
    assert qkv[0].merged._outputs is None


def test_a_pass_that_fails_leaves_nothing() -> None:
    model, _ = merged_model("qwen2")
    tokens = mx.array([TEXT])
    del model.layers[1].self_attn.k_proj  # between queries and values
    with pytest.raises(AttributeError):
        model(tokens)
    assert nothing_is_cached(model)


def test_a_pass_leaves_no_memory_behind() -> None:
    model, _ = merged_model("llama")
    tokens = mx.array([TEXT])
    gc.collect()  # what other tests left
    for _ in range(2):
        before = mx.get_active_memory()
        mx.eval(model(tokens))
    assert mx.get_active_memory() == before


@pytest.fixture
def compiled() -> Iterator[None]:
    mx.enable_compile()
    yield
    mx.disable_compile()  # as it is on CPUs


@pytest.mark.usefixtures("compiled")
def test_a_compiled_function_has_them_as_one(qkv: list[Any]) -> None:
    num_calls = 0

    def run(x: mx.array) -> list[mx.array]:
        nonlocal num_calls
        num_calls += 1
        return [layer(x) for layer in qkv[: 1 + num_calls]]

    traced = mx.compile(run)
    for seed in (1, 2):
        x = inputs(seed)
        found = traced(x)
        assert len(found) == 2
        assert all(is_right(layer, x, part) for layer, part in zip(qkv, found, strict=False))
    assert num_calls == 1  # the values were never fetched, and nothing of the trace is left
    assert qkv[0].merged._outputs is None
    assert all(is_right(layer, x, layer(x)) for layer in qkv)
