"""States of recurrent layers: when they are written, and what the layers of a pass share."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from outrider.cache.placement import CommitCounts, Placement
from outrider.cache.recurrent import RecurrentState, StateAfter, StateSpec, StateView

SPEC = StateSpec(((2,), (3,)), (mx.float32, mx.float32))


def placed(commits_all: bool, slots: list[int], fed: list[int]) -> Placement:
    starts = mx.array([5] * len(slots))
    return Placement(slots, starts, mx.array(fed), 4, 9, 16, any_new=False, commits_all=commits_all)


def states(num_slots: int = 3) -> RecurrentState:
    state = RecurrentState(SPEC)
    state.resize(num_slots, 16)
    return state


def counted(width: int) -> StateAfter:
    """A state that says how many tokens were committed."""
    return lambda counts: mx.repeat(counts.num[:, None], width, axis=1).astype(mx.float32)


def test_without_drafts_states_are_written_as_the_layers_run() -> None:
    state = states()
    view = StateView(state, placed(True, [2, 0], fed=[4, 1]))
    view.on_commit(0, counted(2))
    assert np.array(state.parts[0])[:, 0].tolist() == [1, 0, 4]
    view.on_commit(1, counted(3))
    view.commit(CommitCounts(mx.array([9, 9])))  # nothing is left to do
    assert np.array(state.parts[1])[:, 0].tolist() == [1, 0, 4]


def test_with_drafts_nothing_is_written_before_the_commit() -> None:
    state = states()
    view = StateView(state, placed(False, [0, 1, 2], fed=[4, 4, 4]))
    view.on_commit_all(lambda counts: [counted(2)(counts), counted(3)(counts)])
    assert not any(np.array(part).any() for part in state.parts)
    view.commit(CommitCounts(mx.array([1, 2, 3])))
    assert [np.array(part)[:, 0].tolist() for part in state.parts] == [[1, 2, 3], [1, 2, 3]]


@pytest.mark.parametrize("commits_all", [True, False])
def test_a_layer_that_forgets_a_part_is_told(commits_all: bool) -> None:
    view = StateView(states(), placed(commits_all, [0], fed=[1]))
    view.on_commit(0, counted(2))
    with pytest.raises(ValueError, match="updated 1 of its 2 states"):
        view.commit(CommitCounts(mx.array([1])))


def test_layers_share_the_columns_of_the_commit_counts() -> None:
    counts = CommitCounts(mx.array([0, 2]))
    columns = counts.columns(3)
    assert np.array(columns)[..., 0].tolist() == [[0, 1, 2], [2, 3, 4]]
    assert counts.columns(3) is columns
    counts.wait_for([mx.zeros(1)])
    assert np.array(counts.columns(3)).tolist() == np.array(columns).tolist()
    assert np.array(counts.num).tolist() == [0, 2]
    place = placed(True, [0, 1], fed=[1, 3])
    seen: list[CommitCounts] = []
    for _ in range(2):  # two layers of one pass
        StateView(states(2), place).on_commit(0, lambda counts: seen.append(counts) or counted(2)(counts))
    assert seen[0] is seen[1]
