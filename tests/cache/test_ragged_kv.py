"""The buffers by themselves, without a model: who writes where, and who sees what."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cache.placement import VIEW_STEP, Placement
from outrider.cache.ragged_kv import KVSpec, LayerView, RaggedKV

SPEC = KVSpec(num_heads=2, key_dim=3, value_dim=5, dtype=mx.float32)


def _place(
    slots: list[int], starts: list[int], num_fed: list[int], capacity: int, width: int | None = None
) -> Placement:
    end = max(start + num for start, num in zip(starts, num_fed, strict=True))
    return Placement(slots, mx.array(starts), mx.array(num_fed), width or max(num_fed), end, capacity)


def _cells(numbers: list[list[float]], dim: int) -> mx.array:
    """One number a fed cell, spread over heads and dimensions.  [rows, width] -> [rows, 2, width, dim]"""
    cells = mx.array(numbers)[:, None, :, None] + 1000.0 * mx.arange(SPEC.num_heads)[None, :, None, None]
    return mx.broadcast_to(cells, (*cells.shape[:3], dim))


def _feed(kv: RaggedKV, place: Placement, numbers: list[list[float]]) -> tuple[mx.array, mx.array]:
    return LayerView(kv, place).update_and_fetch(_cells(numbers, 3), -_cells(numbers, 5))


def _buffer(num_slots: int, capacity: int) -> RaggedKV:
    kv = RaggedKV(SPEC)
    kv.resize(num_slots, capacity)
    return kv


def _numbers(kv: RaggedKV, slot: int) -> list[float]:
    """The numbers that a slot's cells hold, the spare cell left out."""
    keys, values = np.array(kv.keys[slot, :, :-1]), np.array(kv.values[slot, :, :-1])
    assert np.all(keys == keys[..., :1])
    assert np.all(keys[1] - keys[0] == np.where(keys[0] == 0, 0, 1000.0))
    assert np.all(values == -keys[..., :1])
    return keys[0, :, 0].tolist()


def test_each_row_writes_at_its_own_start() -> None:
    kv = _buffer(3, 4)
    _feed(kv, _place([2, 0], [1, 2], [2, 1], capacity=4), [[5, 6], [7, 99]])
    assert _numbers(kv, 2) == [0, 5, 6, 0]
    assert _numbers(kv, 0) == [0, 0, 7, 0]
    assert _numbers(kv, 1) == [0, 0, 0, 0]


def test_padding_goes_to_the_spare_cell_even_in_a_full_row() -> None:
    kv = _buffer(2, 3)
    _feed(kv, _place([0, 1], [0, 0], [3, 3], capacity=3), [[1, 2, 3], [4, 5, 6]])
    _feed(kv, _place([0, 1], [2, 0], [1, 3], capacity=3), [[9, 98, 97], [4, 5, 6]])
    assert _numbers(kv, 0) == [1, 2, 9]
    assert _numbers(kv, 1) == [4, 5, 6]


def test_a_row_that_runs_over_writes_to_the_spare_cell() -> None:
    """A head that recurses deeper than one row's own depth goes past that row's capacity."""
    kv = _buffer(2, 3)
    _feed(kv, _place([0, 1], [0, 0], [3, 3], capacity=3), [[1, 2, 3], [4, 5, 6]])
    place = Placement([0, 1], mx.array([4, 1]), mx.array([1, 1]), 1, end=3, capacity=3)
    _feed(kv, place, [[97], [8]])
    assert _numbers(kv, 0) == [1, 2, 3]
    assert _numbers(kv, 1) == [4, 8, 6]


def test_a_row_that_needs_more_cells_than_there_are_is_an_error() -> None:
    with pytest.raises(ValueError, match="5 cells where the buffers have 4"):
        _place([0], [3], [2], capacity=4)


@pytest.mark.parametrize("slots", [[1, 2, 3], [3, 1, 2], [0, 2, 3], [2]])
def test_rows_are_read_in_their_own_order(slots: list[int]) -> None:
    kv = _buffer(4, 4)
    _feed(kv, _place([0, 1, 2, 3], [0] * 4, [1] * 4, capacity=4), [[10], [11], [12], [13]])
    place = _place(slots, [1] * len(slots), [1] * len(slots), capacity=4)
    keys, values = _feed(kv, place, [[20 + slot] for slot in slots])
    assert keys[:, 0, :2, 0].tolist() == [[10 + slot, 20 + slot] for slot in slots]
    assert values.shape == (len(slots), SPEC.num_heads, 4, SPEC.value_dim)


def test_neighbouring_slots_in_order_are_read_without_a_copy() -> None:
    assert _place([1, 2, 3], [0] * 3, [1] * 3, capacity=4).is_range
    assert not _place([1, 3], [0] * 2, [1] * 2, capacity=4).is_range
    assert not _place([2, 1], [0] * 2, [1] * 2, capacity=4).is_range


@pytest.mark.parametrize(
    ("end", "capacity", "seen"), [(1, 256, 16), (16, 256, 16), (17, 256, 32), (18, 20, 20)]
)
def test_the_view_grows_in_steps_up_to_the_capacity(end: int, capacity: int, seen: int) -> None:
    assert VIEW_STEP == 16
    assert _place([0], [end - 1], [1], capacity).num_attended == seen


@given(
    starts=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    width=st.integers(1, 5),
    window=st.none() | st.integers(1, 6),
)
@settings(max_examples=50, deadline=None)
def test_a_token_sees_its_own_past_and_itself(starts: list[int], width: int, window: int | None) -> None:
    place = _place(list(range(len(starts))), starts, [width] * len(starts), capacity=20)
    got = np.array(place.mask(window))
    assert got.shape == (len(starts), 1, width, place.num_attended)
    for row, start in enumerate(starts):
        for column in range(width):
            own = start + column
            oldest = 0 if window is None else max(0, own - window + 1)
            seen = [oldest <= cell <= own for cell in range(place.num_attended)]
            assert got[row, 0, column].tolist() == seen


def test_the_window_of_a_layer_is_used_unless_the_model_names_one() -> None:
    kv = RaggedKV(KVSpec(2, 3, 5, mx.float32, window=2))
    kv.resize(1, 8)
    view = LayerView(kv, _place([0], [5], [1], capacity=8))
    assert int(view.make_mask(1).sum().item()) == 2
    assert int(view.make_mask(1, window_size=3).sum().item()) == 3


def test_masks_are_shared_between_layers_but_not_between_windows() -> None:
    place = _place([0], [5], [1], capacity=8)
    assert place.mask(None) is place.mask(None)
    assert place.mask(2) is not place.mask(3)


def test_resize_keeps_every_cell_that_still_has_a_place() -> None:
    kv = _buffer(2, 2)
    _feed(kv, _place([0, 1], [0, 0], [2, 2], capacity=2), [[1, 2], [3, 4]])
    kv.resize(3, 4)
    assert [_numbers(kv, slot)[:2] for slot in range(2)] == [[1, 2], [3, 4]]
    kv.resize(1, 4)
    assert _numbers(kv, 0)[:2] == [1, 2]
    kv.resize(0, 0)
    assert kv.num_bytes == 0


def test_bytes_accounted_are_bytes_held() -> None:
    kv = _buffer(3, 7)
    cells = 3 * (7 + 1)
    assert kv.num_bytes == cells * SPEC.bytes_per_cell == kv.keys.nbytes + kv.values.nbytes


def test_exchange_swaps_two_slots() -> None:
    kv = _buffer(3, 2)
    _feed(kv, _place([0, 1, 2], [0] * 3, [2] * 3, capacity=2), [[1, 2], [3, 4], [5, 6]])
    kv.exchange(0, 2, one_way=False)
    assert [_numbers(kv, slot) for slot in range(3)] == [[5, 6], [3, 4], [1, 2]]


def test_a_one_way_exchange_leaves_the_other_slots_alone() -> None:
    kv = _buffer(3, 2)
    _feed(kv, _place([0, 1, 2], [0] * 3, [2] * 3, capacity=2), [[1, 2], [3, 4], [5, 6]])
    kv.exchange(2, 0, one_way=True)
    assert [_numbers(kv, slot) for slot in (0, 1)] == [[5, 6], [3, 4]]


_STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("feed"),
            st.permutations(range(4)),
            st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), min_size=1, max_size=4),
        ),
        st.tuples(st.just("exchange"), st.integers(0, 3), st.integers(0, 3)),
        st.tuples(st.just("grow"), st.integers(1, 9), st.just(0)),
    ),
    max_size=12,
)


@given(steps=_STEPS)
@settings(max_examples=40, deadline=None)
def test_any_history_leaves_each_row_with_its_own_cells(steps: list[tuple]) -> None:
    """Feeding (after giving up some cells), exchanging and growing, in any order."""
    capacity, count = 6, 0
    kv = _buffer(4, capacity)
    rows: list[list[float]] = [[] for _ in range(4)]  # the plainest ragged buffer: one list a slot
    for kind, first, second in steps:
        if kind == "grow":
            capacity += first
            kv.resize(4, capacity)
        elif kind == "exchange" and first != second:
            kv.exchange(first, second, one_way=False)
            rows[first], rows[second] = rows[second], rows[first]
        elif kind == "feed":
            slots = list(first[: len(second)])
            for slot, (num_rejected, _) in zip(slots, second, strict=True):
                del rows[slot][max(0, len(rows[slot]) - num_rejected) :]
            starts = [len(rows[slot]) for slot in slots]
            num_fed = [num for _, num in second]
            if max(start + num for start, num in zip(starts, num_fed, strict=True)) > capacity:
                continue
            width = max(num_fed)
            numbers = [[float(count + 10 * row + column + 1) for column in range(width)] for row in range(4)]
            count += 50
            for slot, num, new in zip(slots, num_fed, numbers, strict=False):
                rows[slot] += new[:num]
            place = _place(slots, starts, num_fed, capacity)
            keys, values = _feed(kv, place, numbers[: len(slots)])
            for row, slot in enumerate(slots):
                length = len(rows[slot])
                assert keys[row, 0, :length, 0].tolist() == rows[slot]
                assert values[row, 0, :length, 0].tolist() == [-number for number in rows[slot]]
    for slot, cells in enumerate(rows):
        assert _numbers(kv, slot)[: len(cells)] == cells


@pytest.mark.parametrize("launches", [True, False])
def test_only_passes_that_are_not_traced_launch_layers(
    launches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[mx.array] = []
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: launched.extend(arrays))
    place = Placement([0], mx.array([0]), mx.array([1]), 1, 1, capacity=4, launches=launches)
    _feed(_buffer(1, 4), place, [[1]])
    assert not launched
    _feed(_buffer(1, 4), place, [[1]])
    assert bool(launched) == launches
