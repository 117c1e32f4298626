"""Fixtures: a server with a scripted model, and a place to work for the programs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from workplace import INSTALLED, SMALL_CONTEXT, AgentServer, Workplace, new_workplace, scripted_server

# `make test-agents` installs the programs.
collect_ignore = [] if INSTALLED else ["test_programs.py", "test_odd_tools.py"]


@pytest.fixture(scope="session")
def agent_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentServer]:
    with scripted_server(tmp_path_factory.mktemp("agent-server")) as server:
        yield server


@pytest.fixture(scope="session")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentServer]:
    """Its context holds the prompts of the programs and little more."""
    folder = tmp_path_factory.mktemp("small-server")
    with scripted_server(folder, "--max-context", str(SMALL_CONTEXT)) as server:
        yield server


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    return new_workplace(tmp_path)
