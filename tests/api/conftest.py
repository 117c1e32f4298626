"""One real server process on a tiny model with a head, for all tests that talk to one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from server_process import ServerProcess, serving, write_tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def live(tiny_folder: Path) -> Iterator[ServerProcess]:
    flags = ("--max-rows", "8", "--log-level", "warning")
    with serving(tiny_folder, *flags) as server:
        yield server
