"""The arithmetic of cache sizes that the scheduler and the caches share."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.plan import CacheGeometry


@given(num_cells=st.integers(0, 10**6), capacity_step=st.integers(1, 4096))
@settings(deadline=None)
def test_capacity_is_the_fewest_whole_pages(num_cells: int, capacity_step: int) -> None:
    capacity = CacheGeometry(bytes_per_cell=1, capacity_step=capacity_step).capacity_for(num_cells)
    assert capacity % capacity_step == 0
    assert num_cells <= capacity < num_cells + capacity_step


@given(num_slots=st.integers(1, 100), capacity=st.integers(0, 10**5))
@settings(deadline=None)
def test_bytes_are_those_of_the_buffers_with_a_cell_for_padding(num_slots: int, capacity: int) -> None:
    geometry = CacheGeometry(bytes_per_cell=24, bytes_per_slot=100)
    assert geometry.num_bytes(num_slots, capacity) == num_slots * (24 * capacity + 24 + 100)
    assert geometry.num_bytes(0, capacity) == 0
