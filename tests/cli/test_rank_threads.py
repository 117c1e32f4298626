"""How many threads ranks on one machine have."""

from __future__ import annotations

import sys

import pytest

from outrider.cli import tensor_parallel
from outrider.cli.tensor_parallel import shared_cores


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted on Linux only")
def test_ranks_of_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel, "usable_cpus", lambda: 8)
    assert shared_cores(2, {}) == {"OUTRIDER_BLAS_THREADS": "4"}
    assert shared_cores(3, {}) == {"OUTRIDER_BLAS_THREADS": "2"}
    assert shared_cores(20, {}) == {"OUTRIDER_BLAS_THREADS": "1"}
    assert shared_cores(2, {"OMP_NUM_THREADS": "7"}) == {}
