"""Native attention over bfloat16 and quantised cells: the bits of MLX's own operations, in every pass."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from outrider.cache.placement import Placement, block_tables
from outrider.cache.ragged_kv import KVSpec, LayerView, RaggedKV
from outrider.cpu.extension import extension
from outrider.cpu.kernel_switch import INSTRUCTIONS
from outrider.cpu.quantized import keep_quantized
from outrider.models.layer_swaps import without_speed_swaps
from outrider.models.trunk import Trunk, TrunkCache
from outrider.plan import BLOCK_SIZE
from ragged_rows import RaggedRows, error
from tiny_models import VOCAB_SIZE, tiny_model

pytestmark = [
    pytest.mark.skipif(extension() is None, reason="no native extension: no compiler, or not Linux"),
    pytest.mark.usefixtures("as_before"),
]

TEXT = [(7 * i * i + 3 * i + 5) % VOCAB_SIZE for i in range(240)]


def served(kv_bits: int | None, head_dim: int = 64, **changes: Any) -> Trunk:
    model = tiny_model("llama", head_dim=head_dim, **changes)
    nn.quantize(model, group_size=32, bits=4)
    assert keep_quantized(model) == []
    trunk = Trunk(model, max_context=512)
    trunk.use_kv_bits(kv_bits)
    trunk.prepare_for_serving()
    return trunk


@pytest.fixture(scope="module", params=[16, 8, 4])
def llama(request: pytest.FixtureRequest) -> Trunk:
    return served(request.param)


def fed_alone(trunk: Trunk, text: list[int], chunks: list[int], capacity: int = 256) -> np.ndarray:
    rows = RaggedRows(trunk, 1, capacity)
    rows.scribble()
    rows.join("a", slot=0)
    ends = np.cumsum(chunks).tolist()
    return np.concatenate(
        [rows.feed({"a": text[end - size : end]})["a"] for size, end in zip(chunks, ends, strict=True)]
    )


# What is written --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_cells_have_the_bits_of_mlx(bits: int, head_dim: int, native: ModuleType) -> None:
    place = Placement([1, 0], mx.array([3, 0]), mx.array([5, 2]), 5, 8, 16)
    x = mx.random.normal((2, 5, 64), key=mx.random.key(3))
    trunks = served(None, head_dim), served(bits, head_dim)
    buffers = [next(iter(TrunkCache(trunk.layout).buffers())) for trunk in trunks]
    for wanted in INSTRUCTIONS:
        if not native.use_instructions(wanted):
            continue
        for trunk, kv in zip(trunks, buffers, strict=True):
            kv.resize(0, 0)
            kv.resize(2, 16)
            trunk.model.layers[0](x, place.mask(None), LayerView(kv, place))
        plain, quantized = buffers
        for slot, cells in ((1, slice(3, 8)), (0, slice(0, 2))):
            for one, other in zip(plain.cells, quantized.cells, strict=True):
                want = other.format.encode(one.arrays[0][slot : slot + 1, :, cells])
                for found, expected in zip(other.arrays, want, strict=True):
                    assert mx.array_equal(found[slot, :, cells], expected[0]), wanted


def edge_cases() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    ramp = np.linspace(-1, 1, 64)
    return {
        "zeros": np.zeros(64),
        "a constant": np.full(64, 5.25),
        "a negative constant": np.full(64, -3e-4),
        "tiny numbers": 1e-9 * ramp,
        "large numbers": 1e30 * ramp,
        "far from zero": 300 + ramp,
        "far below zero": -300 + ramp,
        "one outlier": np.where(np.arange(64) == 9, 1e4, ramp),
        "only positive": np.abs(ramp) + 1e-3,
        "ties": np.arange(64) / 2,
        "ties of bfloat16": 1 + np.arange(64) / 256,
        "the largest": 3.4e38 * ramp,
        "noise": rng.standard_normal(64),
    }


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_odd_vectors_have_the_bits_of_mlx(bits: int, native: ModuleType) -> None:
    """The values of a layer whose weights are zero are its biases."""
    cases = list(edge_cases().values())
    place = Placement([0], mx.array([2]), mx.array([1]), 1, 3, 8)
    for wanted in INSTRUCTIONS:
        if not native.use_instructions(wanted):
            continue
        for first, second in zip(cases, cases[1:] + cases[:1], strict=True):
            model = tiny_model("llama", head_dim=64, attention_bias=True, num_hidden_layers=1)
            nn.quantize(model, group_size=32, bits=4)
            vectors = mx.array(np.stack([first, second]), mx.float32)
            v_proj = model.layers[0].self_attn.v_proj
            v_proj.scales, v_proj.biases = v_proj.scales * 0, v_proj.biases * 0
            v_proj.bias = vectors.reshape(-1)
            assert keep_quantized(model) == []
            trunk = Trunk(model, max_context=64)
            trunk.use_kv_bits(bits)
            trunk.prepare_for_serving()
            kv = next(iter(TrunkCache(trunk.layout).buffers()))
            assert isinstance(kv, RaggedKV)
            kv.resize(1, 8)
            model.layers[0](mx.ones((1, 1, 64)), place.mask(None), LayerView(kv, place))
            for found, want in zip(kv.value_cells.arrays, kv.spec.value_format.encode(vectors), strict=True):
                assert mx.array_equal(found[0, :, 2], want)


# What is read -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("dim", [32, 64, 96, 128])
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize(
    ("group", "num_fed"), [(3, [3, 1, 2, 3, 3, 3]), (1, [3, 1, 2, 3, 1, 2]), (4, [1] * 6)]
)
def test_attention_is_that_over_the_dequantised_cells_to_the_bit(
    group: int, num_fed: list[int], bits: int, dim: int, in_blocks: bool, native: ModuleType
) -> None:
    num_kv, num_cells = 2, 11 * BLOCK_SIZE
    starts, fed = mx.array([0, 5, 63, 64, 200, 600]), mx.array(num_fed)
    rows = starts.size
    spec = KVSpec(num_kv, dim, dim, mx.float32, bits=bits)
    kv = RaggedKV(spec)
    places = mx.arange(rows)[:, None]
    if in_blocks:
        kv.resize_blocks(2 + 11 * rows, BLOCK_SIZE)
        order = np.random.default_rng(0).permutation(11 * rows) + 2
        places = block_tables([own.tolist() for own in order.reshape(rows, 11)])
    else:
        kv.resize(rows, num_cells)
    for seed, cells in enumerate(kv.cells):
        shape = (*cells.arrays[0].shape[:3], dim)
        cells.arrays = list(cells.format.encode(3 * mx.random.normal(shape, key=mx.random.key(seed))))
    plain = [cells.format.decode(cells.arrays) for cells in kv.cells]
    queries = mx.random.normal((rows, 3, num_kv * group, dim), key=mx.random.key(9))
    for window in (0, 70):
        others = starts, fed, places, in_blocks, window, dim**-0.5
        expected = native.attend_cells(queries, plain, *others)
        for wanted in INSTRUCTIONS:
            if native.use_instructions(wanted):
                assert mx.array_equal(native.attend_cells(queries, kv.arrays(), *others), expected), wanted
        assert native.use_instructions("")


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_junk_behind_a_row_in_its_last_block_is_not_read(bits: int, native: ModuleType) -> None:
    """NaN, which no weight of 0 hides."""
    spec = KVSpec(1, 64, 64, mx.float32, bits=bits)
    starts, fed, tables = mx.array([0, 61, 70]), mx.array([3, 3, 2]), block_tables([[2], [3], [4, 5]])
    queries = mx.random.normal((3, 3, 3, 64), key=mx.random.key(9))
    outputs = []
    for junk in (0.0, math.nan):
        kv = RaggedKV(spec)
        kv.resize_blocks(6, BLOCK_SIZE)
        for seed, cells in enumerate(kv.cells):
            content = mx.random.normal((6, 1, BLOCK_SIZE, 64), key=mx.random.key(seed))
            for block, end in ((2, 3), (5, 8)):
                content[block, :, end:] = junk
            cells.arrays = list(cells.format.encode(content))
        outputs.append(native.attend_cells(queries, kv.arrays(), starts, fed, tables, True, 0, 0.1))
    assert mx.array_equal(*outputs)
    assert not mx.any(mx.isnan(outputs[0]))


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_fused_model_gives_what_the_plain_form_gives(bits: int) -> None:
    trunk = served(bits, sliding_window=20, layer_types=["sliding_attention", "full_attention"] * 2)
    found = fed_alone(trunk, TEXT, [150, 4, 1])
    with without_speed_swaps(trunk.model):
        expected = fed_alone(trunk, TEXT, [150, 4, 1])
    assert error(found, expected) <= 0.03  # a key between two codes may fall elsewhere
    assert error(fed_alone(served(None, sliding_window=20), TEXT, [155]), expected) > 0


def test_a_token_is_the_same_whatever_is_beside_it(llama: Trunk, native: ModuleType) -> None:
    text = TEXT[:150]
    expected = fed_alone(llama, text, [1] * len(text))
    for chunks in ([150], [64, 64, 22], [1, 130, 3, 7, 9]):
        np.testing.assert_array_equal(fed_alone(llama, text, chunks, capacity=151), expected)
    for num_threads in (1, 3):
        native.set_num_threads(num_threads)
        np.testing.assert_array_equal(fed_alone(llama, text, [149, 1]), expected)
    for wanted in ("avx2", "portable"):
        if native.use_instructions(wanted):
            np.testing.assert_array_equal(fed_alone(llama, text, [149, 1]), expected)
    rows = RaggedRows(llama, num_slots=5, capacity=256)
    rows.scribble()
    rows.join("b", slot=1)
    rows.feed({"b": TEXT[50:220]})
    rows.join("a", slot=4)
    first = rows.feed({"b": TEXT[3:5], "a": text[:100]})
    rows.feed({"a": [1, 2, 3]})
    rows.roll_back("a", 3)
    second = rows.feed({"b": TEXT[5:9], "a": text[100:103]})
    np.testing.assert_array_equal(np.concatenate([first["a"], second["a"]]), expected[:103])


def test_nan_stays_in_its_row_and_after_its_token(llama: Trunk) -> None:
    layer, kv = llama.model.layers[0], next(iter(TrunkCache(llama.layout).buffers()))
    kv.resize(3, 128)
    x = mx.random.normal((2, 90, llama.hidden_size))
    x[0, 70, 5] = mx.nan
    place = Placement([2, 0], mx.array([0, 0]), mx.array([90, 90]), 90, 90, 128)
    found = layer(x, place.mask(None), LayerView(kv, place))
    assert mx.isfinite(found[1]).all()
    assert mx.isfinite(found[0, :70]).all()
    assert mx.isnan(found[0, 70:]).all()


def test_buffers_are_written_in_place(llama: Trunk, native: ModuleType) -> None:
    cache = TrunkCache(llama.layout)
    for buffers in cache.buffers():
        buffers.resize(4, 64)
    num_buffers = len([array for buffers in cache.buffers() for array in buffers.arrays()])
    copies = native.num_buffer_copies()
    for step in range(24):
        place = Placement([3, 1], mx.array([step, step]), mx.array([1, 1]), 1, step + 1, 64)
        mx.eval(llama.hidden(mx.zeros((2, 1), mx.int32), cache, place), [b.arrays() for b in cache.buffers()])
    assert native.num_buffer_copies() - copies <= 0.1 * 24 * num_buffers


def test_bad_buffers_are_refused(native: ModuleType) -> None:
    codes, scales, biases = mx.quantize(mx.ones((3, 2, 5, 64)))
    queries, rows = mx.ones((1, 1, 4, 64)), mx.ones(1, mx.int32)
    others = rows, rows, mx.zeros((1, 1), mx.int32), False, 0, 1.0
    good = [*mx.quantize(mx.ones((3, 2, 5, 64)), bits=8)] * 2
    mx.eval(native.attend_cells(queries, good, *others))
    mx.eval(native.attend_cells(queries, [mx.ones((3, 2, 5, 64), mx.bfloat16)] * 2, *others))
    for bad in (
        [codes, scales, biases],
        [codes.astype(mx.float32), scales, biases] * 2,
        [codes, scales.astype(mx.float16), biases] * 2,
        [codes, scales, biases[:2]] * 2,
        [codes[..., :3], scales, biases] * 2,
        [mx.ones((3, 2, 5, 64)), mx.ones((3, 2, 5, 32))],
        [mx.ones((3, 2, 5, 64)), mx.ones((3, 2, 5, 64), mx.bfloat16)],
        [mx.ones((3, 2, 5, 64), mx.float16)] * 2,
    ):
        with pytest.raises(ValueError, match="buffers"):
            native.attend_cells(queries, bad, *others)
