"""The native extension, for tests that change its threads and instructions."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from outrider.cpu.extension import extension
from outrider.cpu.threads import thread_counts


@pytest.fixture(scope="session")
def native() -> ModuleType:
    found = extension()
    assert found is not None
    return found


@pytest.fixture
def as_before(native: ModuleType) -> Iterator[None]:
    """Afterwards it has the threads and the instructions of before."""
    yield
    native.set_num_threads(thread_counts({}).max)
    assert native.use_instructions("")
