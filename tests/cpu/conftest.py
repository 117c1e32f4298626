"""The native extension, for tests that change its threads and instructions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from outrider.cpu.extension import extension
from outrider.cpu.kernel_switch import INSTRUCTIONS
from outrider.cpu.threads import thread_counts


@pytest.fixture(scope="session")
def native() -> ModuleType:
    found = extension()
    if sys.platform != "linux":
        pytest.skip("the native extension is for Linux")
    assert found is not None, "the log has the reason"
    return found


@pytest.fixture(params=INSTRUCTIONS)
def instructions(request: pytest.FixtureRequest, native: ModuleType) -> Iterator[str]:
    """Each set of instructions that this CPU has, in use."""
    if not native.use_instructions(request.param):
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    assert native.use_instructions("")


@pytest.fixture
def as_before(native: ModuleType) -> Iterator[None]:
    """Afterwards it has the threads and the instructions of before."""
    yield
    native.set_num_threads(thread_counts({}).max)
    assert native.use_instructions("")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder that is searched for compilers."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder
