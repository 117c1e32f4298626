"""The two ways of sampling: the native operations of CPUs, and MLX's operations."""

from __future__ import annotations

import pytest

from outrider.cpu import extension
from outrider.cpu import sampling as cpu_sampling


@pytest.fixture(params=["native", "mlx"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test once with the native operations, where there are any, and once without."""
    if request.param == "mlx":
        monkeypatch.setattr(cpu_sampling, "_native", lambda logits: None)
    elif extension.extension() is None:
        pytest.skip("no native operations here")
