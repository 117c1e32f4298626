"""What holds for every test: nothing is fetched from the network, and comparisons are made on the CPU."""

import os
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # a shell's background job ignores it, and tests send it
os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is first imported

import outrider  # noqa: E402, F401, I001  (first: it loads the fast BLAS, which must come before mlx)
import mlx.core as mx  # noqa: E402
from outrider.speculate import calibration, cost_store  # noqa: E402

mx.set_default_device(mx.cpu)

_measurements = tempfile.TemporaryDirectory(prefix="outrider-depth-")
cost_store.folder = lambda: Path(_measurements.name)
calibration.BUDGET_S = 0.05

# A slow example on a busy machine is no failure.
settings.register_profile("outrider", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("outrider")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that two workers end at about the same time."""
    items.sort(key=lambda item: "step" not in item.path.parts)
