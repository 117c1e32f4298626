"""Times the drafts of a head before it is served: to learn whether several ranks should divide it."""

from __future__ import annotations

import time
from collections.abc import Callable

import mlx.core as mx

from outrider.models.heads import LoadedHead
from outrider.models.trunk import Trunk
from outrider.plan import RowPlan
from outrider.request import SamplingParams
from outrider.sampling.sampler import Sampler
from outrider.step.deferred_head import FollowedRows, PausableHead
from outrider.step.head_rows import HeadRows
from outrider.step.ranks import Ranks

NUM_DRAFTS = 3  # that are timed together: the second and the third are fed drafts; chosen by hand
NUM_CELLS = 128  # of the row; chosen by hand, as in speculate/calibration.py
NUM_RUNS = 12  # of each head, of which the shortest counts; chosen by hand
GREEDY = SamplingParams(temperature=0)


def shortest_s(
    whole: LoadedHead | None, divided: LoadedHead, trunk: Trunk, ranks: Ranks
) -> tuple[float, float]:
    """Seconds of one draft of one row, of both heads. All ranks call it; rank 0's figures count.

    The heads take turns. While the whole one drafts on rank 0, the other ranks wait as they will in a step.
    """
    run_whole = None if whole is None else _timed_drafts(whole, trunk, None)
    run_divided = _timed_drafts(divided, trunk, ranks)
    of_whole, of_divided = [], []
    for _ in range(NUM_RUNS):
        of_whole.append(0.0 if run_whole is None else run_whole())
        of_divided.append(run_divided())
    return min(of_whole) / NUM_DRAFTS, min(of_divided) / NUM_DRAFTS


def _timed_drafts(head: LoadedHead, trunk: Trunk, ranks: Ranks | None) -> Callable[[], float]:
    """A function that makes drafts and returns the seconds that it took."""
    drafter, capacity = PausableHead(head, trunk, ranks), NUM_CELLS + 1 + NUM_DRAFTS
    for buffers in drafter.buffers():
        buffers.resize(1, capacity)
    is_first = ranks is None or ranks.rank == 0
    sampler = Sampler.of([GREEDY]) if is_first else None
    token_ids, one = mx.zeros((1, 1), mx.int32), mx.ones(1, mx.int32)
    hidden = mx.ones((1, 1, trunk.hidden_size), trunk.dtype)
    row = RowPlan(0, 0, NUM_CELLS, (0,), 0, None, True, NUM_DRAFTS, GREEDY, (), 0)
    rows = HeadRows([0], mx.array([NUM_CELLS]), one, one, NUM_CELLS + 1, sampler, NUM_DRAFTS)

    def run() -> float:
        began_s = time.perf_counter()
        drafts = drafter.draft(FollowedRows([row], token_ids, hidden, token_ids, rows), capacity)
        assert drafts is not None
        mx.eval(drafts.token_ids, [array for buffers in drafter.buffers() for array in buffers.arrays()])
        return time.perf_counter() - began_s

    return run
