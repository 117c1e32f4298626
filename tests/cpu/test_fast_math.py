"""The arithmetic for x86 CPUs against float64, and against MLX's own."""

import math
import shutil
import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import activations, base
from mlx_lm.models.cache import KVCache

from outrider.cache.placement import Placement, RopeOffsets, block_tables
from outrider.cache.ragged_kv import KVSpec, LayerView, RaggedKV
from outrider.cpu import extension, fast_math
from outrider.plan import BLOCK_SIZE
from own_sgemm import WHERE_THEY_ARE

pytestmark = pytest.mark.skipif(not fast_math.applies(), reason="for Linux on x86 without a GPU")

ULP = 2.0**-23


def needs_own_matmul(test: Any) -> Any:
    for mark in WHERE_THEY_ARE:
        test = mark(test)
    return test


def silu(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


def test_swiglu_is_within_a_few_ulp_over_the_whole_range() -> None:
    tiny = np.float32(2.0) ** np.arange(-149, -100, dtype=np.float32)
    sweep = np.concatenate([np.linspace(-87, 87, 200_001), np.geomspace(1e-30, 3e38, 2001), tiny])
    gate = np.concatenate([sweep, -sweep]).astype(np.float32)
    found = np.array(fast_math.swiglu(mx.array(gate), mx.ones(gate.shape)), np.float64)
    truth = silu(gate.astype(np.float64))
    # The exponent x log2 e is rounded once: half an ulp of itself, which grows with |x|.
    allowed = ULP * np.abs(truth) * (3 + np.abs(np.minimum(gate, 0)))
    assert (np.abs(found - truth) <= allowed + 2.0**-126).all()  # denormals may be flushed
    theirs = np.array(activations.swiglu(mx.array(gate), mx.ones(gate.shape)), np.float64)
    core = np.abs(gate) < 50
    assert np.abs(found - truth)[core].max() <= 2 * np.abs(theirs - truth)[core].max()


def test_swiglu_of_what_is_no_number_is_as_mlxs() -> None:
    gate = mx.array([math.inf, -math.inf, math.nan, -1e30, 1e30, -0.0, 0.0, -3e38])
    for x in (mx.ones(gate.shape), -mx.ones(gate.shape), mx.full(gate.shape, 1e20)):
        ours, theirs = fast_math.swiglu(gate, x), activations.swiglu(gate, x)
        np.testing.assert_array_equal(np.array(ours), np.array(theirs))


def test_swiglu_of_another_dtype_is_mlxs() -> None:
    gate = mx.random.normal((64,)).astype(mx.float16)
    ours = fast_math.swiglu(gate, gate)
    assert ours.dtype == mx.float16
    assert mx.array_equal(ours, activations.swiglu(gate, gate))


# Attention --------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_native_attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests may have loaded the extension."""
    if "native" not in request.node.name:
        monkeypatch.setattr(extension, "if_loaded", lambda: None)


def placed(
    starts: Sequence[int], width: int, num_fed: Sequence[int] | None = None, capacity: int = 64
) -> Placement:
    fed = list(num_fed or [width] * len(starts))
    end = max(start + width for start in starts)
    return Placement(range(len(starts)), mx.array(list(starts)), mx.array(fed), width, end, capacity)


def layer_of(place: Placement, kv_heads: int, dim: int, value_dim: int, dtype: mx.Dtype) -> LayerView:
    """A layer whose buffers hold noise everywhere, cells that nobody may see included."""
    kv = RaggedKV(KVSpec(kv_heads, dim, value_dim, dtype))
    kv.resize(len(place.slots), place.capacity)
    kv.keys = (3 * mx.random.normal(kv.keys.shape)).astype(dtype)
    kv.values = mx.random.normal(kv.values.shape).astype(dtype)
    return LayerView(kv, place)


def in_float64(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None
) -> np.ndarray:
    q, k, v = (np.array(x, np.float64) for x in (queries, keys, values))
    repeats = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, repeats, axis=1), np.repeat(v, repeats, axis=1)
    scores = scale * q @ k.swapaxes(2, 3)
    if mask is not None:
        scores = np.where(np.array(mask), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ v


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (8, 1), (1, 1)])
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (24, 16), (80, 80), (7, 5)])
@pytest.mark.parametrize("width", [1, 4, 33])
@pytest.mark.parametrize("window", [None, 7])
def test_attention_is_exact_for_every_shape(
    heads: int, kv_heads: int, dim: int, value_dim: int, width: int, window: int | None
) -> None:
    mx.random.seed(heads + dim + width)
    place = placed([0, 5, 28], width)
    view = layer_of(place, kv_heads, dim, value_dim, mx.float32)
    queries = mx.random.normal((3, heads, width, dim))
    new_keys, new_values = (mx.random.normal((3, kv_heads, width, size)) for size in (dim, value_dim))
    keys, values = view.update_and_fetch(new_keys, new_values)
    mask = view.make_mask(width, window_size=window)
    scale = dim**-0.5
    call = queries, keys, values, view, scale, mask
    truth = in_float64(queries, keys, values, scale, mask)
    found = fast_math.attention(*call), base.scaled_dot_product_attention(*call)
    ours, theirs = (np.abs(np.array(each, np.float64) - truth).max() for each in found)
    assert ours <= max(1e-6, 2 * theirs)


def test_attention_is_as_exact_as_mlxs() -> None:
    mx.random.seed(0)
    place = placed([5, 28, 50], 4)
    errors = np.zeros(2)
    for _ in range(20):
        view = layer_of(place, 3, 64, 64, mx.float32)
        queries = mx.random.normal((3, 9, 4, 64))
        keys, values = view.update_and_fetch(*(mx.random.normal((3, 3, 4, 64)) for _ in range(2)))
        call = queries, keys, values, view, 0.125, view.make_mask(4)
        truth = in_float64(queries, keys, values, 0.125, view.make_mask(4))
        found = fast_math.attention(*call), base.scaled_dot_product_attention(*call)
        errors += [np.abs(np.array(each, np.float64) - truth).mean() for each in found]
    assert errors[0] <= 1.1 * errors[1]


def test_hidden_cells_have_no_weight_whatever_they_hold() -> None:
    place = placed([3, 20], 2)
    view = layer_of(place, 2, 16, 16, mx.float32)
    queries = mx.random.normal((2, 4, 2, 16))
    keys, values = view.update_and_fetch(*(mx.random.normal((2, 2, 2, 16)) for _ in range(2)))
    mask = view.make_mask(2)
    expected = fast_math.attention(queries, keys, values, view, 0.25, mask)
    hidden = ~mask.any(axis=2, keepdims=True).swapaxes(2, 3)  # [rows, 1, cells, 1]
    for junk in (1e30, -1e30):
        junk_keys, junk_values = (mx.where(hidden, junk, x) for x in (keys, values))
        found = fast_math.attention(queries, junk_keys, junk_values, view, 0.25, mask)
        assert mx.array_equal(found, expected)
    assert mx.isfinite(expected).all()


def test_padding_columns_are_finite() -> None:
    place = placed([0, 60], 4, num_fed=[4, 1])
    view = layer_of(place, 1, 8, 8, mx.float32)
    queries = mx.random.normal((2, 2, 4, 8))
    keys, values = view.update_and_fetch(*(mx.random.normal((2, 1, 4, 8)) for _ in range(2)))
    assert mx.isfinite(fast_math.attention(queries, keys, values, view, 0.3, view.make_mask(4))).all()


def test_huge_scores_do_not_overflow() -> None:
    place = placed([12], 1)
    view = layer_of(place, 1, 8, 8, mx.float32)
    queries = mx.full((1, 2, 1, 8), 1e6)
    keys, values = view.update_and_fetch(mx.full((1, 1, 1, 8), 1e6), mx.full((1, 1, 1, 8), 3.0))
    found = fast_math.attention(queries, keys, values, view, 1.0, view.make_mask(1))
    np.testing.assert_array_equal(np.array(found), 3.0)  # one cell outweighs all others


@needs_own_matmul
@pytest.mark.parametrize(("length", "longest"), [(9, 40), (300, 900)])
def test_a_rows_result_does_not_depend_on_its_neighbours(length: int, longest: int) -> None:
    """Nor on how far the view reaches because of them, to the bit."""
    mx.random.seed(3)
    new = [mx.random.normal((2, 3, 1, 16)) for _ in range(2)]
    queries = mx.random.normal((2, 9, 1, 16))
    both = layer_of(placed([length, longest], 1, capacity=1024), 3, 16, 16, mx.float32)
    kv_keys, kv_values = both.keys, both.kv.values
    keys, values = both.update_and_fetch(*new)
    together = fast_math.attention(queries, keys, values, both, 0.25, both.make_mask(1))
    alone = layer_of(placed([length], 1, capacity=1024), 3, 16, 16, mx.float32)
    alone.kv.keys, alone.kv.values = kv_keys[:1], kv_values[:1]
    keys, values = alone.update_and_fetch(*(x[:1] for x in new))
    single = fast_math.attention(queries[:1], keys, values, alone, 0.25, alone.make_mask(1))
    assert mx.array_equal(single[0], together[0])


@needs_own_matmul
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 100])
def test_long_and_short_rows_attend_in_groups_to_the_same_bits(has_sinks: bool, window: int | None) -> None:
    mx.random.seed(8)
    starts = [900, 9, 30, 850]
    new = [mx.random.normal((4, 3, 2, 16)) for _ in range(2)]
    queries, sinks = mx.random.normal((4, 9, 2, 16)), mx.random.normal((9,)) if has_sinks else None
    arguments = range(4), mx.array(starts), mx.array([2, 1, 2, 2]), 2, 902, 1024
    whole = layer_of(Placement(*arguments), 3, 16, 16, mx.float32)
    parts = LayerView(whole.kv, Placement(*arguments, ends=[start + 2 for start in starts]))
    found = []
    for view in (whole, parts):
        keys, values = view.update_and_fetch(*new)
        mask = view.make_mask(2, window_size=window)
        assert len(view.groups(keys, values, mask)) == (2 if view is parts else 0)
        found.append(fast_math.attention(queries, keys, values, view, 0.25, mask, sinks))
    assert mx.array_equal(found[0], found[1])


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 16), (8, 1, 80)])
@pytest.mark.parametrize("width", [1, 33])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("has_blocks", [False, True])
def test_native_attention_gives_the_same(
    heads: int, kv_heads: int, dim: int, width: int, window: int | None, has_blocks: bool
) -> None:
    """From slots and from blocks, for long and short rows; padding is zero."""
    if (native := extension.extension()) is None:
        pytest.skip("not for this CPU")
    mx.random.seed(dim + width)
    starts, num_fed = [0, 700, 30], [width, width, 1]
    rng = np.random.default_rng(width)
    order = rng.permutation(np.arange(2, 38)).reshape(3, 12)
    tables = block_tables(order.tolist())
    arguments = range(3), mx.array(starts), mx.array(num_fed), width, 700 + width, 768
    slots = layer_of(Placement(*arguments), kv_heads, dim, dim, mx.float32)
    view = slots
    if has_blocks:
        kv = RaggedKV(slots.kv.spec)
        kv.resize_blocks(38, BLOCK_SIZE)
        for own, other in zip(kv.arrays(), slots.arrays(), strict=True):
            cells = other[:, :, :768].reshape(3, kv_heads, 12, BLOCK_SIZE, dim).swapaxes(1, 2)
            own[mx.array(order)] = cells
        view = LayerView(kv, Placement(*arguments, tables=tables))
    queries = mx.random.normal((3, heads, width, dim))
    new = [mx.random.normal((3, kv_heads, width, dim)) for _ in range(2)]
    slots.update_and_fetch(*new)
    keys, values = slots.read()
    mask = slots.make_mask(width, window_size=window)
    truth = in_float64(queries, keys, values, dim**-0.5, mask)
    keys, values = view.update_and_fetch(*new)
    mask = view.make_mask(width, window_size=window)
    found = np.array(fast_math.attention(queries, keys, values, view, dim**-0.5, mask))
    assert view.placement.num_native == 1
    assert native is not None
    for row, num in enumerate(num_fed):
        assert np.abs(found[row, :, :num] - truth[row, :, :num]).max() <= 4e-6
        assert not found[row, :, num:].any()
    fast_math.attention(queries, keys, values, view, dim**-0.5, mask, mx.zeros(heads))
    fast_math.attention(queries, keys + 0, values, view, dim**-0.5, mask)
    assert view.placement.num_native == 1, "sinks, and keys that the model has changed: MLX's operations"


@needs_own_matmul
def test_a_long_prompt_is_the_same_to_the_bit_however_it_is_cut() -> None:
    """With 3 heads for each key head, 300 tokens are 900 rows of a matmul, more than the own one takes."""
    mx.random.seed(5)
    queries = mx.random.normal((1, 6, 300, 64))
    new = [mx.random.normal((1, 2, 300, 64)) for _ in range(2)]
    found = []
    for cuts in ((0, 300), (0, 40, 41, 140, 300)):
        view = layer_of(placed([0], 300, capacity=320), 2, 64, 64, mx.float32)
        parts = []
        for begin, end in pairwise(cuts):
            view = LayerView(view.kv, placed([begin], end - begin, capacity=320))
            keys, values = view.update_and_fetch(*(x[:, :, begin:end] for x in new))
            mask = view.make_mask(end - begin)
            parts.append(fast_math.attention(queries[:, :, begin:end], keys, values, view, 0.125, mask))
        found.append(mx.concatenate(parts, axis=2))
    assert mx.array_equal(*found)


@needs_own_matmul
@pytest.mark.parametrize("width", [1, 3])
def test_sinks_take_a_share_of_the_weights(width: int) -> None:
    """The result is mlx-lm's, and the same to the bit however far the view reaches."""
    mx.random.seed(4)
    queries, sinks = mx.random.normal((1, 6, width, 16)), mx.random.normal((6,))
    new = [mx.random.normal((1, 2, width, 16)) for _ in range(2)]
    near, far = (layer_of(placed([9], width), 2, 16, 16, mx.float32) for _ in range(2))
    far.kv.keys, far.kv.values, far.placement.num_attended = near.kv.keys, near.kv.values, 48
    found = []
    for view in (near, far):
        keys, values = view.update_and_fetch(*new)
        call = queries, keys, values, view, 0.25, view.make_mask(width), sinks
        found.append(fast_math.attention(*call))
        np.testing.assert_allclose(found[-1], base.scaled_dot_product_attention(*call), rtol=0, atol=2e-6)
        assert mx.abs(found[-1] - fast_math.attention(*call[:-1])).max() > 1e-2
    assert mx.array_equal(*found)


def test_what_is_not_ours_goes_to_mlx_lm(monkeypatch: pytest.MonkeyPatch) -> None:
    place = placed([4, 9], 3)
    view, half = (layer_of(place, 2, 8, 8, dtype) for dtype in (mx.float32, mx.float16))
    queries = mx.random.normal((2, 4, 3, 8))
    keys, values = view.update_and_fetch(*(mx.random.normal((2, 2, 3, 8)) for _ in range(2)))
    mask = view.make_mask(3)
    additive = mx.where(mask, 0.0, -1e9)
    per_head = mx.broadcast_to(mask, (2, 4, 3, keys.shape[2]))
    thin = [x.astype(mx.float16) for x in (queries, keys, values)]
    calls = [
        (queries, keys, values, KVCache(), 0.3, mask, None),
        (queries, keys, values, None, 0.3, "causal", None),
        (queries, keys, values, view, 0.3, "causal", None),
        (queries, keys, values, view, 0.3, additive, None),
        (queries, keys, values, view, 0.3, per_head, None),
        (*thin, half, 0.3, mask, None),
    ]
    expected = [base.scaled_dot_product_attention(*call) for call in calls]
    monkeypatch.setattr(mx, "power", None)  # what ours cannot do without
    for call, theirs in zip(calls, expected, strict=True):
        assert mx.array_equal(fast_math.attention(*call), theirs)


def test_no_mask_hides_nothing() -> None:
    view = layer_of(placed([15], 1, capacity=16), 2, 8, 8, mx.float32)
    queries = mx.random.normal((1, 2, 1, 8))
    keys, values = view.update_and_fetch(*(mx.random.normal((1, 2, 1, 8)) for _ in range(2)))
    found = fast_math.attention(queries, keys, values, view, 0.3, None)
    np.testing.assert_allclose(np.array(found), in_float64(queries, keys, values, 0.3, None), atol=1e-6)


# Rope -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dims", "base_", "scale"), [(64, 1e5, 1.0), (16, 1e4, 0.5), (40, 5e5, 1.0), (64, 8e6, 0.125)]
)
@pytest.mark.parametrize("width", [1, 5])
def test_rope_is_mlxs_to_the_bit(dims: int, base_: float, scale: float, width: int) -> None:
    place = placed([0, 7, 8000], width, capacity=9000)
    x = mx.random.normal((3, width, 4, 64)).transpose(0, 2, 1, 3)  # as models hand it over
    ours, theirs = (kind(dims, base=base_, scale=scale) for kind in (fast_math.SharedAnglesRope, nn.RoPE))
    for _ in range(2):  # the second time from what the pass keeps
        assert mx.array_equal(ours(x, offset=place.positions), theirs(x, offset=place.positions))


def test_rope_keeps_the_angles_of_one_pass_apart_from_anothers() -> None:
    rope, plain = fast_math.SharedAnglesRope(16), nn.RoPE(16)
    x = mx.random.normal((2, 4, 3, 16))
    passes = [placed([at, at + 3], 3, capacity=90) for at in (0, 11, 40)]
    for place in [*passes, *passes]:
        assert mx.array_equal(rope(x, offset=place.positions), plain(x, offset=place.positions))
        narrow = x[:, :, :2]
        assert mx.array_equal(rope(narrow, offset=place.positions), plain(narrow, offset=place.positions))
    other, slow = fast_math.SharedAnglesRope(16, base=500.0), nn.RoPE(16, base=500.0)
    assert mx.array_equal(other(x, offset=passes[0].positions), slow(x, offset=passes[0].positions))


def test_rope_of_positions_that_no_pass_has_is_mlxs() -> None:
    rope, plain = fast_math.SharedAnglesRope(16), nn.RoPE(16)
    x = mx.random.normal((2, 4, 3, 16))
    offset = mx.array([3, 5])
    for _ in range(2):
        assert mx.array_equal(rope(x, offset=offset), plain(x, offset=offset))
        offset += 1  # changes in place, as mlx-lm's caches do
    assert mx.array_equal(rope(x, offset=7), plain(x, offset=7))
    traditional, theirs = (kind(16, traditional=True) for kind in (fast_math.SharedAnglesRope, nn.RoPE))
    place = placed([3, 5], 3)
    assert mx.array_equal(traditional(x, offset=place.positions), theirs(x, offset=place.positions))


def test_angles_go_with_their_pass() -> None:
    place = placed([3], 2)
    positions = place.positions
    assert isinstance(positions, RopeOffsets)
    fast_math.SharedAnglesRope(16)(mx.zeros((1, 4, 2, 16)), offset=positions)
    assert len(positions.angles) == 1
    gone = weakref.ref(positions)
    del place, positions
    assert gone() is None  # without the garbage collector
