"""What holds for every test: nothing is fetched from the network, and comparisons are made on the CPU."""

import gc
import os
import signal
import subprocess
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings
from hypothesis.internal.conjecture import providers

signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # a shell's background job ignores it, and tests send it
os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is first imported
# What steps cost is measured as shortly as possible and stored here, for all processes of a run.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _costs = tempfile.TemporaryDirectory(prefix="outrider-costs-")
    os.environ |= {"OUTRIDER_COSTS": _costs.name, "OUTRIDER_CALIBRATION_SECONDS": "0"}

import outrider  # noqa: E402, F401, I001  (first: it loads the fast BLAS, which must come before mlx)
import mlx.core as mx  # noqa: E402
from browser.browsers import reason_to_skip  # noqa: E402
from longest_files import LONGEST  # noqa: E402
from patience import IN_SOAK, in_test_or_soak  # noqa: E402

mx.set_default_device(mx.cpu)

# A slow example on a busy machine is no failure. 100 examples are Hypothesis's own default.
settings.register_profile(
    "outrider",
    max_examples=in_test_or_soak(25, 100),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("outrider")
if not IN_SOAK:  # no constants of the project's own files, which take each worker seconds to find
    providers._get_local_constants = lambda: providers._local_constants


@pytest.hookimpl(tryfirst=True)  # before pytest looks for `-m soak`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts the longest files first, so that the workers end at about the same time.

    Marks all tests of Hypothesis, which run with more examples under `make soak`.
    """
    items.sort(key=lambda item: _place(item.path))
    for item in items:
        if isinstance(item, pytest.Function) and is_hypothesis_test(item.obj):
            item.add_marker(pytest.mark.soak)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """No garbage collections meanwhile: each would look at all that is loaded, and free almost nothing."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """What is loaded now stays, so garbage collections need not look at it: each would take half a second."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says why the tests of the web page did not run: `-q` hides the reasons of skipped tests."""
    if any("tests/browser/" in report.nodeid for report in terminalreporter.stats.get("skipped", [])):
        terminalreporter.write_line(f"The tests of the web page were skipped: {reason_to_skip()}")


def _place(path: Path) -> int:
    return LONGEST.index(path.stem) if path.stem in LONGEST else len(LONGEST)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The files of a certificate for 127.0.0.1, signed by itself, and of its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test"]
    files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert]
    subprocess.run([*command, *files], check=True, capture_output=True)
    return cert, key
