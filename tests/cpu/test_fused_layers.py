"""Decoder layers as two native primitives: what they compute, for whom, and what must not change it."""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from outrider.cache.placement import GridPositions, Placement, block_tables
from outrider.cache.ragged_kv import LayerView, RaggedKV
from outrider.cpu import fused_layers
from outrider.cpu.extension import extension
from outrider.cpu.kernel_switch import INSTRUCTIONS
from outrider.cpu.quantized import keep_quantized
from outrider.models.layer_swaps import without_speed_swaps
from outrider.models.trunk import Trunk, TrunkCache
from outrider.models.vision.deepstack import use_deepstack
from outrider.models.vision.mrope import MRopeSections
from outrider.plan import BLOCK_SIZE
from ragged_rows import RaggedRows, error
from step.histories import Tally, play, random_history, world
from tiny_models import SLIDING_AND_FULL, VOCAB_SIZE, YARN, tiny_model

pytestmark = [
    pytest.mark.skipif(extension() is None, reason="no native extension: no compiler, or not Linux"),
    pytest.mark.usefixtures("as_before"),
]

TEXT = [(7 * i * i + 3 * i + 5) % VOCAB_SIZE for i in range(240)]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_scaling": None}),
    "llama with llama3 rope": ("llama", {}),
    "llama with yarn": ("llama", {"rope_scaling": YARN}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with windows": ("llama", SLIDING_AND_FULL),
    "llama with one head each": ("llama", {"num_key_value_heads": 4, "head_dim": 32}),
    "layers without rope": ("smollm3", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3 with experts": ("qwen3_moe", {}),
}
WIDE = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}  # a multiple of all group sizes
WIDE_FORMATS = [(4, 128), (5, 64), (5, 128), (6, 64), (6, 128), (8, 64), (8, 128)]  # bits, group size


def quantized(
    family: str, bits: int = 4, group_size: int = 32, mode: str = "affine", **changes: Any
) -> nn.Module:
    model = tiny_model(family, **changes)
    nn.quantize(model, group_size=group_size, bits=bits, mode=mode)
    assert keep_quantized(model) == []
    return model


def served(model: nn.Module) -> Trunk:
    trunk = Trunk(model, max_context=512)
    trunk.prepare_for_serving()
    return trunk


def is_fused(layer: nn.Module) -> bool:
    return fused_layers.plain_class(type(layer)) is not type(layer)


@pytest.fixture(scope="module")
def llama() -> Trunk:
    return served(quantized("llama"))


def ragged(trunk: Trunk, slots: int = 3, capacity: int = 256) -> RaggedRows:
    rows = RaggedRows(trunk, slots, capacity)
    rows.scribble()
    return rows


def fed_alone(trunk: Trunk, text: list[int], chunks: list[int], capacity: int = 256) -> np.ndarray:
    """The logits of a row that is fed in chunks of these sizes."""
    rows = ragged(trunk, 1, capacity)
    rows.join("a", slot=0)
    ends = np.cumsum(chunks).tolist()
    return np.concatenate(
        [rows.feed({"a": text[end - size : end]})["a"] for size, end in zip(chunks, ends, strict=True)]
    )


# What is computed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_model_gives_what_the_plain_form_gives(kind: str, bits: int) -> None:
    family, changes = KINDS[kind]
    model = quantized(family, bits, **changes)
    trunk = served(model)
    assert all(is_fused(layer) for layer in model.layers)
    found = two_rows(trunk)
    with without_speed_swaps(model):
        assert not any(is_fused(layer) for layer in model.layers)
        expected = two_rows(trunk)
    # A number between two codes may fall elsewhere, and changes all that follows a little.
    assert error(found, expected) <= 0.002


@pytest.mark.parametrize(
    ("mode", "bits", "group_size"), [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]
)
def test_layers_of_small_floats_are_fused_too(mode: str, bits: int, group_size: int) -> None:
    model = quantized("qwen2", bits, group_size, mode)  # with biases of its own
    trunk = served(model)
    assert all(is_fused(layer) for layer in model.layers)
    found = two_rows(trunk)
    with without_speed_swaps(model):
        assert error(found, two_rows(trunk)) <= 0.002


@pytest.mark.parametrize(("bits", "group_size"), WIDE_FORMATS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_layers_of_other_bits_and_group_sizes_are_fused_too(family: str, bits: int, group_size: int) -> None:
    model = quantized(family, bits, group_size, **WIDE)
    trunk = served(model)
    assert all(is_fused(layer) for layer in model.layers)
    found = two_rows(trunk)
    with without_speed_swaps(model):
        assert error(found, two_rows(trunk)) <= 0.002


def two_rows(trunk: Trunk) -> np.ndarray:
    rows = ragged(trunk)
    rows.join("a", slot=2)
    rows.join("b", slot=0)
    first = rows.feed({"a": TEXT[:150], "b": TEXT[5:9]})
    second = rows.feed({"b": TEXT[9:10], "a": TEXT[150:154]})
    return np.concatenate([first["a"], second["a"], first["b"], second["b"]])


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_exact_over_many_cells(kind: str) -> None:
    """With a long past: many blocks of cells, and scores that differ much."""
    rng = np.random.default_rng(0)
    family, changes = KINDS[kind]
    trunk = served(quantized(family, **changes))
    layer, (kv, *_) = trunk.model.layers[0], list(TrunkCache(trunk.layout).buffers())
    kv.resize(1, 800)
    filled = [mx.array(scale * rng.standard_normal(kv.keys.shape), mx.float32) for scale in (2, 1)]
    x = mx.array(rng.standard_normal((1, 40, trunk.hidden_size)), mx.float32)

    def run() -> np.ndarray:
        kv.put([mx.array(np.array(part)) for part in filled])
        place = Placement([0], mx.array([700]), mx.array([40]), 40, 740, 800)
        out = layer(x, place.mask(kv.spec.window), LayerView(kv, place))
        return np.array(out - x)[0]

    found = run()
    with without_speed_swaps(trunk.model):
        expected = run()
    errors = np.abs(found - expected).max(axis=1) / np.abs(expected).max()  # of each token
    assert np.median(errors) <= 2e-6
    assert errors.max() <= 0.02


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("llama")])
def test_angles_are_those_of_the_rope_to_the_bit(kind: str) -> None:
    family, changes = KINDS[kind]
    ropes = {layer._fused.rope for layer in served(quantized(family, **changes)).model.layers}
    (rope,) = ropes  # all layers share one
    assert rope.native is not None
    place = Placement([0, 1], mx.array([3, 200]), mx.array([5, 5]), 5, 205, 256)
    assert mx.array_equal(rope.of_pass(place, 5), rope.turned(2, 5, place.positions))


def test_images_have_positions_in_three_directions() -> None:
    model = quantized("qwen3")
    trunk = Trunk(model, max_context=512, mrope=MRopeSections((4, 2, 2), "interleaved"))
    trunk.prepare_for_serving()
    layer, (kv, *_) = model.layers[0], list(TrunkCache(trunk.layout).buffers())
    assert is_fused(layer)
    grid = mx.array(np.random.default_rng(0).integers(0, 50, (3, 2, 6)), mx.int32)
    x = mx.random.normal((2, 6, trunk.hidden_size))

    def run(positions: GridPositions | None) -> np.ndarray:
        kv.resize(0, 0)
        kv.resize(2, 16)
        starts, fed = mx.array([0, 0]), mx.array([6, 6])
        place = Placement([0, 1], starts, fed, 6, 6, 16, positions=positions)
        return np.array(layer(x, place.mask(None), LayerView(kv, place)) - x)

    found = run(GridPositions(grid))
    with without_speed_swaps(model):
        expected = run(GridPositions(grid))
    assert error(found, expected) <= 0.01
    assert error(run(None), expected) > 0.1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_blocks", [False, True])
def test_a_pass_that_nobody_reads_writes_the_same_cells(kind: str, has_blocks: bool) -> None:
    family, changes = KINDS[kind]
    trunk = served(quantized(family, **changes))
    layer, (kv, *_) = trunk.model.layers[0], list(TrunkCache(trunk.layout).buffers())
    x = mx.random.normal((2, 70, trunk.hidden_size))
    tables = block_tables([[3, 5], [4]]) if has_blocks else None

    def cells(only_cells: bool) -> list[mx.array]:
        kv.resize(0, 0)
        if has_blocks:
            kv.resize_blocks(6, BLOCK_SIZE)
        else:
            kv.resize(2, 128)
        starts, fed = mx.array([9, 2]), mx.array([70, 40])
        place = Placement([0, 1], starts, fed, 70, 79, 128, tables=tables, only_cells=only_cells)
        out = layer(x, place.mask(kv.spec.window), LayerView(kv, place))
        mx.eval(out)
        assert mx.array_equal(out, x) == only_cells
        return [mx.array(np.array(part)) for part in kv.arrays()]

    written, expected = cells(True), cells(False)
    assert all(mx.array_equal(a, b) for a, b in zip(written, expected, strict=True))
    assert all(mx.any(part) for part in written)


def test_padding_is_not_computed(llama: Trunk) -> None:
    layer, (kv, *_) = llama.model.layers[0], list(TrunkCache(llama.layout).buffers())
    kv.resize(2, 16)
    x = mx.random.normal((2, 3, llama.hidden_size))
    place = Placement([0, 1], mx.array([0, 0]), mx.array([3, 1]), 3, 3, 16)
    out = layer(x, place.mask(None), LayerView(kv, place))
    assert mx.array_equal(out[1, 1:], x[1, 1:])
    assert not mx.any(out[1, :1] == x[1, :1])
    assert not mx.any(kv.keys[:, :, 3:])  # not even the cell for padding
    assert not mx.any(kv.keys[1, :, 1:])


def test_a_row_may_run_over_the_end_of_the_buffers(llama: Trunk) -> None:
    """Drafts past a row's own depth. Their results are not used, but other rows' must not change."""
    layer, (kv, *_) = llama.model.layers[0], list(TrunkCache(llama.layout).buffers())
    kv.resize(2, 16)
    x = mx.random.normal((2, 4, llama.hidden_size))
    place = Placement([0, 1], mx.array([14, 3]), mx.array([4, 4]), 4, 16, 16)
    out = layer(x, place.mask(None), LayerView(kv, place))
    assert mx.isfinite(out).all()
    assert not mx.any(kv.keys[1, :, :3])
    assert not mx.any(kv.keys[1, :, 7:])


def test_a_norm_outside_of_layers_is_one_operation(llama: Trunk, native: ModuleType) -> None:
    x = mx.random.normal((2, 3, llama.hidden_size)) * 5
    norm = llama.model.model.norm
    assert type(norm) is not nn.RMSNorm
    np.testing.assert_allclose(norm(x), mx.fast.rms_norm(x, norm.weight, norm.eps), rtol=1e-5)
    half = x.astype(mx.float16)
    assert mx.array_equal(norm(half), mx.fast.rms_norm(half, norm.weight, norm.eps))
    turned = x.swapaxes(0, 1)
    assert mx.array_equal(norm(turned), norm(x).swapaxes(0, 1))
    with without_speed_swaps(llama.model):
        assert type(norm) is nn.RMSNorm


# What must not change it ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "llama with windows", "qwen3"])
def test_a_token_is_the_same_whatever_is_beside_it(kind: str) -> None:
    family, changes = KINDS[kind]
    check_that_a_token_is_the_same(served(quantized(family, **changes)))


@pytest.mark.parametrize(("bits", "group_size"), WIDE_FORMATS)
def test_a_token_is_the_same_with_other_bits_and_group_sizes(
    native: ModuleType, bits: int, group_size: int
) -> None:
    trunk = served(quantized("qwen3", bits, group_size, **WIDE))
    check_that_a_token_is_the_same(trunk)
    expected = fed_alone(trunk, TEXT, [200, 1, 4, 35])
    for wanted in INSTRUCTIONS:
        if native.use_instructions(wanted):
            for num in (1, 3):
                native.set_num_threads(num)
                np.testing.assert_array_equal(fed_alone(trunk, TEXT, [200, 1, 4, 35]), expected)


def check_that_a_token_is_the_same(trunk: Trunk) -> None:
    """Whatever the chunks of its row, the size of the buffers and the rows beside it are."""
    text = TEXT[:150]
    expected = fed_alone(trunk, text, [1] * len(text))
    for chunks in ([150], [64, 64, 22], [1, 130, 3, 7, 9], [149, 1]):
        for capacity in (151, 256):
            np.testing.assert_array_equal(fed_alone(trunk, text, chunks, capacity), expected)
    rows = ragged(trunk, slots=5)
    rows.join("b", slot=1)
    rows.feed({"b": TEXT[50:220]})
    rows.join("a", slot=4)
    rows.join("c", slot=0)
    first = rows.feed({"b": TEXT[3:5], "a": text[:100], "c": TEXT[7:8]})
    second = rows.feed({"c": TEXT[20:24], "a": text[100:103]})
    np.testing.assert_array_equal(np.concatenate([first["a"], second["a"]]), expected[:103])


def test_a_long_row_is_shared_by_threads_and_stays_the_same(native: ModuleType) -> None:
    """More cells than one segment: a row alone is cut into segments, many rows are not."""
    rng = np.random.default_rng(1)
    trunk = served(quantized("llama", head_dim=64))
    layer, (kv, *_) = trunk.model.layers[0], list(TrunkCache(trunk.layout).buffers())
    kv.resize(40, 1300)
    filled = [
        mx.array(np.repeat(rng.standard_normal((1, 2, 1301, 64)), 40, axis=0), mx.float32) for _ in "kv"
    ]
    x = mx.array(rng.standard_normal((1, 3, trunk.hidden_size)), mx.float32)

    def run(num_rows: int, window: int | None) -> mx.array:
        kv.put([mx.array(np.array(part)) for part in filled])
        ones = mx.ones(num_rows, mx.int32)
        place = Placement(range(num_rows), 1200 * ones, 3 * ones, 3, 1203, 1300)
        many = mx.broadcast_to(x, (num_rows, *x.shape[1:]))
        return layer(many, place.mask(window), LayerView(kv, place))

    for window in (None, 700):
        native.set_num_threads(1)
        expected = run(1, window)
        native.set_num_threads(4)
        assert mx.array_equal(run(1, window), expected)
        assert mx.all(run(40, window) == expected)
    assert not mx.array_equal(run(1, None), run(1, 700))


def test_threads_and_instructions_change_nothing(llama: Trunk, native: ModuleType) -> None:
    expected = fed_alone(llama, TEXT, [200, 1, 4, 35])
    for num in (1, 2, 3):
        native.set_num_threads(num)
        np.testing.assert_array_equal(fed_alone(llama, TEXT, [200, 1, 4, 35]), expected)
    for wanted in INSTRUCTIONS:
        if native.use_instructions(wanted):
            np.testing.assert_array_equal(fed_alone(llama, TEXT, [200, 1, 4, 35]), expected)


def test_rejected_drafts_leave_no_trace(llama: Trunk) -> None:
    rows = ragged(llama)
    rows.join("a", slot=0)
    rows.feed({"a": TEXT[:70]})
    rows.feed({"a": [TEXT[70], 1, 2, 3]})
    rows.roll_back("a", 3)
    found = rows.feed({"a": TEXT[71:73]})["a"]
    np.testing.assert_array_equal(found, fed_alone(llama, TEXT, [73])[71:])


def test_nan_stays_in_its_row_and_after_its_token(llama: Trunk) -> None:
    layer, (kv, *_) = llama.model.layers[0], list(TrunkCache(llama.layout).buffers())
    kv.resize(3, 128)
    x = mx.random.normal((2, 90, llama.hidden_size))

    def run(x: mx.array) -> mx.array:
        kv.put([mx.zeros(part.shape) for part in kv.arrays()])
        place = Placement([2, 0], mx.array([0, 0]), mx.array([90, 90]), 90, 90, 128)
        return layer(x, place.mask(None), LayerView(kv, place))

    expected = run(x)
    x[0, 70, 5] = math.nan
    found = run(x)
    assert mx.array_equal(found[1], expected[1])
    assert mx.array_equal(found[0, :70], expected[0, :70])
    assert mx.isnan(found[0, 70:]).all()  # later tokens attend to the token


def test_cells_of_other_sequences_are_not_read(llama: Trunk) -> None:
    layer, (kv, *_) = llama.model.layers[0], list(TrunkCache(llama.layout).buffers())
    kv.resize(2, 128)
    kv.put([mx.full(part.shape, math.nan) for part in kv.arrays()])
    place = Placement([1], mx.array([0]), mx.array([70]), 70, 70, 128)
    out = layer(mx.random.normal((1, 70, llama.hidden_size)), place.mask(None), LayerView(kv, place))
    assert mx.isfinite(out).all()


# In place ---------------------------------------------------------------------------------------------------


def test_buffers_are_written_in_place(llama: Trunk, native: ModuleType) -> None:
    """Step after step, and when several passes are evaluated at once, as those of an MTP head are."""
    cache = TrunkCache(llama.layout)
    for buffers in cache.buffers():
        buffers.resize(4, 64)
    num_buffers = len([array for buffers in cache.buffers() for array in buffers.arrays()])
    copies = native.num_buffer_copies()
    for step in range(12):
        for start in range(4 * step, 4 * step + 4):
            place = Placement([3, 1], mx.array([start, start]), mx.array([1, 1]), 1, start + 1, 64)
            hidden = llama.hidden(mx.zeros((2, 1), mx.int32), cache, place)
        mx.eval(hidden, [buffers.arrays() for buffers in cache.buffers()])
    # A copy is right but slow. It may happen by chance: MLX lets go of memory a moment after its use.
    assert native.num_buffer_copies() - copies <= 0.1 * 48 * num_buffers


@pytest.mark.parametrize("is_evaluated", [True, False])
def test_a_buffer_that_is_held_is_copied(llama: Trunk, native: ModuleType, is_evaluated: bool) -> None:
    layer, (kv, *_) = llama.model.layers[0], list(TrunkCache(llama.layout).buffers())
    kv.resize(2, 16)
    mx.eval(kv.arrays())
    part = kv.keys[:1]  # a view of the same memory
    if is_evaluated:
        mx.eval(part)
    copies = native.num_buffer_copies()
    place = Placement([0, 1], mx.array([0, 0]), mx.array([1, 1]), 1, 1, 16)
    mx.eval(layer(mx.ones((2, 1, llama.hidden_size)), place.mask(None), LayerView(kv, place)))
    assert native.num_buffer_copies() == copies + 1
    assert not mx.any(part)
    assert mx.any(kv.keys)


def test_buffers_may_be_views(llama: Trunk) -> None:
    """Not contiguous in memory: copied in the right order."""
    layer, (kv, *_) = llama.model.layers[0], list(TrunkCache(llama.layout).buffers())
    kv.resize(2, 16)
    noise = mx.random.normal((*kv.keys.shape[:2], kv.keys.shape[3], kv.keys.shape[2])).swapaxes(2, 3)
    kv.put([noise, noise])
    place = Placement([0, 1], mx.array([9, 9]), mx.array([1, 1]), 1, 10, 16)
    layer(mx.ones((2, 1, llama.hidden_size)), place.mask(None), LayerView(kv, place))
    changed = mx.arange(17)[:, None] == 9
    assert mx.array_equal(mx.where(changed, 0, kv.keys), mx.where(changed, 0, noise))


# Which layers, which calls ----------------------------------------------------------------------------------


def test_float_layers_and_other_forms_stay_plain() -> None:
    """Wherever a layer of this list computes something else, the plain form must compute it."""
    plain = {
        "float weights": tiny_model("llama"),
        "a scaled residual": quantized("granite"),
        "norms with an offset": quantized("gemma3_text"),
        "neighbouring elements turn": quantized("llama", rope_traditional=True),
        "a norm of all heads": quantized("olmo2"),
        "mxfp4": tiny_model("llama"),
    }
    nn.quantize(plain["mxfp4"], group_size=32, bits=4, mode="mxfp4")
    for reason, model in plain.items():
        fused_layers.use_fused_layers(model)
        assert not any(is_fused(layer) for layer in model.layers), reason


def test_a_model_without_quantised_layers_does_not_ask_for_the_extension(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused_layers, "extension", None)
    for model in (tiny_model("llama"), tiny_model("llama", rope_scaling=None)):
        fused_layers.use_fused_layers(model)
        assert not any(is_fused(layer) for layer in model.layers)


def test_layers_of_another_swap_stay_plain() -> None:
    model = quantized("qwen3")
    use_deepstack(model.layers, 2)
    fused_layers.use_fused_layers(model)
    assert [is_fused(layer) for layer in model.layers] == [False, False, True]


def test_a_layer_that_computes_otherwise_is_noticed() -> None:
    model = quantized("llama")
    first, second, third = model.layers
    first.self_attn.scale *= 1.5
    second.__class__ = type("Louder", (type(second),), {"__call__": louder})
    louder.__module__ = "mlx_lm.models.llama"
    fused_layers.use_fused_layers(model)
    assert [is_fused(layer) for layer in (first, second, third)] == [True, False, True]


def louder(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
    h = x + 1.1 * self.self_attn(self.input_layernorm(x), mask, cache)
    return h + self.mlp(self.post_attention_layernorm(h))


def test_used_twice_is_used_once(llama: Trunk) -> None:
    before = [type(module) for _, module in llama.model.named_modules()]
    fused_layers.use_fused_layers(llama.model)
    assert [type(module) for _, module in llama.model.named_modules()] == before


def test_other_calls_go_to_the_plain_form(llama: Trunk, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, (kv, *_) = llama.model.layers[0], list(TrunkCache(llama.layout).buffers())
    kv.resize(1, 16)
    place = Placement([0], mx.array([4]), mx.array([2]), 2, 6, 16)
    x, mask = mx.random.normal((1, 2, llama.hidden_size)), place.mask(None)
    calls = [
        (x, None, None),
        (x, "causal", None),
        (x, mx.array(mask), LayerView(kv, place)),
        (x, mx.where(mask, 0.0, -1e9), LayerView(kv, place)),
        (x.astype(mx.float16), mask, LayerView(kv, place)),
    ]
    with without_speed_swaps(llama.model):
        expected = [layer(*call) for call in calls]
    monkeypatch.setattr(layer, "_fused", None)  # which the primitives cannot do without
    for call, want in zip(calls, expected, strict=True):
        np.testing.assert_allclose(np.array(layer(*call)), np.array(want), rtol=1e-3, atol=1e-3)


def test_bad_arrays_are_refused(native: ModuleType) -> None:
    weight, scales, biases = mx.quantize(mx.random.normal((64, 64)), group_size=32, bits=4)
    for bad, message in (
        ((weight, scales, biases, 32, 7, "affine", None), "no weights of 7 bits"),
        ((weight, scales, biases, 48, 4, "affine", None), "groups"),
        ((weight, scales[:32], biases, 32, 4, "affine", None), "do not belong together"),
        ((weight, *(x.astype(mx.int32) for x in (scales, biases)), 32, 4, "affine", None), "must be float32"),
        ((weight.astype(mx.float32), scales, biases, 32, 4, "affine", None), "codes must be uint32"),
        ((weight[None], scales, biases, 32, 4, "affine", None), "not a quantised matrix"),
    ):
        with pytest.raises(ValueError, match=message):
            native.Linear(*bad)
    linear, norm = (
        native.Linear(weight, scales, biases, 32, 4, "affine", None),
        native.RMSNorm(mx.ones(64), 1e-5),
    )
    with pytest.raises(ValueError, match="heads"):
        native.Attention(norm, linear, linear, linear, linear, None, None, 3, 3, 16, 1.0, False)
    with pytest.raises(ValueError, match="another shape"):
        native.MLP(native.RMSNorm(mx.ones(32), 1e-5), linear, linear, linear, False)
    mlp = native.MLP(norm, linear, linear, linear, False)
    with pytest.raises(ValueError, match="hidden"):
        mlp(mx.ones((1, 1, 32)), mx.ones(1, mx.int32))
    with pytest.raises(ValueError, match="fed counts"):
        mlp(mx.ones((1, 1, 64)), mx.ones(2, mx.int32))


# In the engine ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "bits", "first"), [("llama", 4, 0), ("qwen3", 8, 1000)])
def test_every_request_gives_what_it_gives_alone(family: str, bits: int, first: int) -> None:
    """Rows that join, leave and are preempted, drafts of every kind, failing steps: not one token differs."""
    own = world(f"{family}-{bits}bit")
    assert all(is_fused(layer) for layer in [*own.model.layers, *own.head.layers])
    tally = Tally()
    for seed in range(first, first + 12):
        tally.add(play(own, replace(random_history(seed, own.vocab_size), inspects=False)))
    assert tally.excused == 0
    assert tally.tokens > 400
    assert {kind for kind, drafted, _ in tally.accepted if drafted} >= {"scripted", "head"}


def test_a_step_of_the_engine_copies_no_buffer(native: ModuleType) -> None:
    """Decoding rows, prompt chunks and several drafts of a head in one step."""
    own = world("llama-4bit")
    for seed in (100, 108):  # steps that are not overlapped, as on CPUs
        history = replace(random_history(seed, own.vocab_size), inspects=False, scribbles=False)
        for ask in history.asks:
            own.answer(ask)
        copies = native.num_buffer_copies()
        play(own, history)
        assert native.num_buffer_copies() - copies <= 2  # by chance: see above


@pytest.mark.parametrize("kind", KINDS)
def test_cells_in_blocks_give_the_same_bits_as_cells_in_slots(kind: str) -> None:
    """Long and short rows, blocks in any order, one of them shared; a prompt's chunk and single tokens."""
    rng = np.random.default_rng(1)
    family, changes = KINDS[kind]
    trunk = served(quantized(family, **changes))
    layer, (slots, *_) = trunk.model.layers[0], list(TrunkCache(trunk.layout).buffers())
    blocks = RaggedKV(slots.spec)
    starts, num_fed, capacity = [700, 3, 130], [40, 1, 7], 768
    slots.resize(3, capacity)
    tables = [rng.permutation(np.arange(2, 14)).tolist(), [20], [16, 15, 14]]
    tables[2][0] = tables[0][0]
    cells = [rng.standard_normal((3, *part.shape[1:])).astype(np.float32) for part in slots.arrays()]
    for part in cells:
        part[2, :, :BLOCK_SIZE] = part[0, :, :BLOCK_SIZE]
    slots.put([mx.array(part) for part in cells])
    blocks.resize_blocks(24, BLOCK_SIZE)
    in_blocks = [np.zeros(part.shape, np.float32) for part in blocks.arrays()]
    for part, whole in zip(in_blocks, cells, strict=True):
        for row, table in enumerate(tables):
            for number, block in enumerate(table):
                part[block] = whole[row, :, number * BLOCK_SIZE : (number + 1) * BLOCK_SIZE]
    blocks.put([mx.array(part) for part in in_blocks])
    x = mx.array(rng.standard_normal((3, 40, trunk.hidden_size)), mx.float32)
    arguments = [0, 1, 2], mx.array(starts), mx.array(num_fed), 40, 740, capacity
    outs, fed = [], []
    for kv, place in (
        (slots, Placement(*arguments)),
        (blocks, Placement(*arguments, tables=block_tables(tables))),
    ):
        outs.append(layer(x, place.mask(kv.spec.window), LayerView(kv, place)))
        fed.append(LayerView(kv, place).read())
    assert mx.array_equal(*outs)
    for row, (start, num) in enumerate(zip(starts, num_fed, strict=True)):
        for own, other in zip(*fed, strict=True):
            assert mx.array_equal(own[row, :, : start + num], other[row, :, : start + num])
    assert not mx.any(blocks.keys[mx.array([0, 21, 22, 23])])


def test_blocks_of_another_size_are_refused() -> None:
    trunk = served(quantized("llama"))
    kv, *_ = TrunkCache(trunk.layout).buffers()
    assert isinstance(kv, RaggedKV)
    kv.resize_blocks(4, 32)
    place = Placement([0], mx.array([0]), mx.array([1]), 1, 1, 0, tables=block_tables([[2]]), block_size=32)
    with pytest.raises(ValueError, match="64 cells"):
        trunk.model.layers[0](mx.zeros((1, 1, trunk.hidden_size)), place.mask(None), LayerView(kv, place))


@pytest.mark.parametrize(
    ("name", "reads_blocks"),
    [("llama-4bit", True), ("qwen3_5-4bit", True), ("gpt_oss-5bit", False), ("deepseek_v3", False)],
)
def test_rows_have_blocks_where_attention_reads_them_in_place(name: str, reads_blocks: bool) -> None:
    """Not with sinks or latent attention, which would copy all cells in every layer."""
    assert world(name).trunk.reads_blocks == reads_blocks
