"""One rank for tests/test_rank_sums.py. Rank 0 writes what it found to OUT.

How many of the sums over the ranks are the same to the bit for rows together and for each row alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from outrider.rank_sums import sum_over_ranks

Sum = Callable[[mx.array], mx.array]


def share_of_equal_sums(add: Sum, rows: mx.array) -> float:
    together = add(rows)
    mx.eval(together)
    alone = []
    for row in range(rows.shape[0]):
        alone.append(add(rows[row : row + 1]))
        mx.eval(alone[-1])
    return float(mx.mean(mx.concatenate(alone) == together))


def main(out: str) -> None:
    group = mx.distributed.init(strict=True)
    rows = mx.random.normal((7, 64), key=mx.random.key(group.rank()))
    ordered = share_of_equal_sums(lambda part: sum_over_ranks(part, group), rows)
    as_it_comes = share_of_equal_sums(lambda part: mx.distributed.all_sum(part, group=group), rows)
    on_all_ranks = mx.distributed.all_gather(sum_over_ranks(rows, group)[None], group=group)
    expected = sum(mx.random.normal((7, 64), key=mx.random.key(rank)) for rank in range(group.size()))
    found = {
        "ordered": ordered,
        "all_sum": as_it_comes,
        "ranks_agree": bool(mx.all(on_all_ranks == on_all_ranks[:1])),
        "is_sum": bool(mx.allclose(on_all_ranks[0], expected)),
    }
    if group.rank() == 0:
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
