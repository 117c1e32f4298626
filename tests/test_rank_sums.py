"""Sums over ranks: a row's sum has the same bits alone and beside other rows, on every rank."""

from __future__ import annotations

import json
from pathlib import Path

from rank_processes import run_ranks

PROGRAM = Path(__file__).with_name("rank_sums_program.py")


def test_a_sum_over_three_ranks_does_not_depend_on_the_rows_beside_it(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    run_ranks(3, PROGRAM, out)
    found = json.loads(out.read_text())
    assert found["is_sum"]
    assert found["ranks_agree"]
    assert found["ordered"] == 1
    assert found["all_sum"] < 1, "control: MLX's own sum depends on it"
