"""Runs of layers: which layers they have, whose bits they give, and when they are not used."""

from __future__ import annotations

from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from outrider.cache.placement import Placement, block_tables
from outrider.cache.ragged_kv import LayerView
from outrider.cpu import fused_layers, layer_runs
from outrider.cpu.extension import extension, loaded
from outrider.cpu.layer_runs import LayerRun
from outrider.cpu.quantized import keep_quantized
from outrider.models.prompt_scorer import PromptScorer
from outrider.models.trunk import Trunk, TrunkCache
from outrider.plan import BLOCK_SIZE, NUM_SPARE_BLOCKS
from ragged_rows import RaggedRows
from tiny_models import SLIDING_AND_FULL, VOCAB_SIZE, tiny_model

pytestmark = [
    pytest.mark.skipif(extension() is None, reason="no native extension: no compiler, or not Linux"),
    pytest.mark.usefixtures("as_before"),
]

TEXT = [(7 * i * i + 3 * i + 5) % VOCAB_SIZE for i in range(240)]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_scaling": None}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with windows": ("llama", SLIDING_AND_FULL),
    "llama with wide heads": ("llama", {"num_key_value_heads": 4, "head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}


def served(family: str, bits: int = 4, kv_bits: int | None = None, **changes: Any) -> Trunk:
    model = tiny_model(family, **changes)
    nn.quantize(model, group_size=32, bits=bits)
    assert keep_quantized(model) == []
    trunk = Trunk(model, max_context=512)
    trunk.use_kv_bits(kv_bits)
    trunk.prepare_for_serving()
    return trunk


def runs(trunk: Trunk) -> list[list[int]]:
    """The numbers of the layers of each run."""
    found: dict[LayerRun, list[int]] = {}
    for number, layer in enumerate(trunk.model.layers):
        run = getattr(layer, "_run", None)
        if run is not None:
            assert layer._number_in_run == len(found.setdefault(run, []))
            found[run].append(number)
    return list(found.values())


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that lets a trunk compute its layers one by one."""

    def split(trunk: Trunk) -> None:
        for layer in trunk.model.layers:
            monkeypatch.setattr(layer, "_run", None, raising=False)

    return split


def history(trunk: Trunk) -> list[np.ndarray]:
    """Rows that join, draft, roll back and decode beside each other."""
    rows = RaggedRows(trunk, 3, 256)
    rows.scribble()
    rows.join("a", slot=2)
    rows.join("b", slot=0)
    passes = [rows.feed({"a": TEXT[:150], "b": TEXT[5:9]}), rows.feed({"b": TEXT[9:10], "a": TEXT[150:154]})]
    rows.roll_back("a", 2)
    rows.join("c", slot=1)
    passes.append(rows.feed({"c": TEXT[:70], "a": TEXT[152:153], "b": TEXT[10:13]}))
    passes.append(rows.feed({"a": TEXT[153:154], "c": TEXT[70:71], "b": TEXT[13:14]}))
    return [logits for each in passes for logits in each.values()] + [
        np.array(array.astype(mx.float32)) for kv in rows.cache.buffers() for array in kv.arrays()
    ]


# What is computed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "kv_bits"), [*product(KINDS, (None, 16)), ("llama with wide heads", 8)])
def test_a_run_has_the_bits_of_its_layers(kind: str, kv_bits: int | None, one_by_one: Any) -> None:
    family, changes = KINDS[kind]
    trunk = served(family, kv_bits=kv_bits, **changes)
    assert runs(trunk) == [[0, 1, 2]]
    found = history(trunk)
    one_by_one(trunk)
    for array, expected in zip(found, history(trunk), strict=True):
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_no_bit(threads: int) -> None:
    trunk = served("llama", kv_bits=16)
    expected = history(trunk)
    loaded().set_num_threads(threads)
    for array, want in zip(history(trunk), expected, strict=True):
        np.testing.assert_array_equal(array, want)


def test_rows_in_blocks_give_what_rows_in_slots_give() -> None:
    trunk = served("llama", kv_bits=16)
    hidden = []
    for in_blocks in (False, True):
        cache = TrunkCache(trunk.layout)
        tables = None
        for kv in cache.buffers():
            if in_blocks:
                kv.resize_blocks(NUM_SPARE_BLOCKS + 4, BLOCK_SIZE)
                tables = block_tables([[NUM_SPARE_BLOCKS + 3, NUM_SPARE_BLOCKS], [NUM_SPARE_BLOCKS + 2]])
            else:
                kv.resize(2, 128)
        starts, num_fed = mx.array([0, 0]), mx.array([70, 9])
        place = Placement([0, 1], starts, num_fed, 70, 70, 128, tables=tables, block_size=BLOCK_SIZE)
        out = trunk.hidden(mx.array([TEXT[:70], TEXT[100:170]]), cache, place)
        assert place.num_native == 3
        hidden.append([np.array(out[0]), np.array(out[1, :9])])
    for slots, blocks in zip(*hidden, strict=True):
        np.testing.assert_array_equal(slots, blocks)


def test_buffers_are_written_in_place() -> None:
    trunk = served("llama", kv_bits=16)
    rows = RaggedRows(trunk, 2, 128)
    rows.join("a", slot=0)
    rows.feed({"a": TEXT[:20]})
    before = loaded().num_buffer_copies()
    for i in range(20, 40):
        rows.feed({"a": TEXT[i : i + 1]})
    assert loaded().num_buffer_copies() == before


# Which layers -----------------------------------------------------------------------------------------------


def test_long_models_have_several_runs() -> None:
    num = layer_runs.MAX_LAYERS + 3
    trunk = served("llama", num_hidden_layers=num)
    assert runs(trunk) == [list(range(num - 3)), [num - 3, num - 2, num - 1]]


def test_a_run_ends_where_the_rope_changes() -> None:
    trunk = served("smollm3", num_hidden_layers=6, no_rope_layers=[1, 1, 0, 0, 0, 1])
    assert runs(trunk) == [[0, 1], [2, 3, 4]]


def test_layers_that_a_model_goes_through_twice_are_in_no_run() -> None:
    trunk = served("nanbeige")
    assert all(layer._fused for layer in trunk.model.layers)
    assert runs(trunk) == []


def test_layers_with_experts_are_in_no_run() -> None:
    trunk = served("qwen3_moe")
    dense = [number for number, layer in enumerate(trunk.model.layers) if layer._fused.mlp is not None]
    assert all(number in dense for run in runs(trunk) for number in run)


def test_a_run_ends_where_something_comes_between_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    plain = type(model.model).__call__

    def scaled(self: Any, inputs: mx.array, cache: Any = None, **named: Any) -> mx.array:
        second = type(self.layers[1])

        class Scaled(second):  # type: ignore[misc, valid-type]
            def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
                return super().__call__(2 * x, mask, cache)

        self.layers[1].__class__ = Scaled
        try:
            return plain(self, inputs, cache=cache, **named)
        finally:
            self.layers[1].__class__ = second

    nn.quantize(model, group_size=32, bits=4)
    keep_quantized(model)
    trunk = Trunk(model, max_context=512)
    monkeypatch.setattr(type(model.model), "__call__", scaled)
    trunk.prepare_for_serving()
    assert runs(trunk) == [[1, 2]]


# When it is not used ----------------------------------------------------------------------------------------


def test_a_layer_that_gets_something_else_than_its_runs_output_is_an_error() -> None:
    trunk = served("llama")
    cache = TrunkCache(trunk.layout)
    for kv in cache.buffers():
        kv.resize(1, 16)
    place = Placement([0], mx.array([0]), mx.array([2]), 2, 2, 16)
    views, place.layer_buffers = cache.views(place), cache.layers
    x, mask = mx.zeros((1, 2, trunk.hidden_size)), place.mask(None)
    first, second, _ = trunk.model.layers
    out = first(x, mask, views[0])
    assert second(out, mask, views[1]) is out
    with pytest.raises(RuntimeError, match="one after the other"):
        second(2 * out, mask, views[1])
    with pytest.raises(RuntimeError, match="one after the other"):
        second(out, place.mask(3), views[1])


def test_a_layer_that_is_called_alone_computes_itself(one_by_one: Any) -> None:
    trunk = served("llama")
    (kv, *_) = TrunkCache(trunk.layout).buffers()
    kv.resize(1, 16)
    x = mx.random.normal((1, 2, trunk.hidden_size))

    def output() -> np.ndarray:
        place = Placement([0], mx.array([0]), mx.array([2]), 2, 2, 16)
        return np.array(trunk.model.layers[0](x, place.mask(None), LayerView(kv, place)))

    found = output()
    one_by_one(trunk)
    np.testing.assert_array_equal(found, output())


def test_a_scorer_that_stops_half_way_uses_no_run(one_by_one: Any) -> None:
    trunk = served("llama")

    def scores() -> np.ndarray:
        scorer = PromptScorer(trunk, num_layers=2)
        scorer.read(TEXT[:60], 0, 60)
        return scorer.scores()

    found = scores()
    one_by_one(trunk)
    np.testing.assert_array_equal(found, scores())


def test_image_features_between_layers_turn_runs_off() -> None:
    trunk = served("llama")
    cache = TrunkCache(trunk.layout)
    for kv in cache.buffers():
        kv.resize(1, 16)
    features = [mx.zeros((1, 2, trunk.hidden_size))]
    place = Placement([0], mx.array([0]), mx.array([2]), 2, 2, 16, deepstack=features)
    trunk.hidden(mx.array([TEXT[:2]]), cache, place)
    assert place.computed_run == (None, None)
    assert place.num_native == 3


def test_the_plain_class_of_a_layer_in_a_run() -> None:
    trunk = served("llama")
    assert {fused_layers.plain_class(type(layer)).__module__ for layer in trunk.model.layers} == {
        "mlx_lm.models.llama"
    }
