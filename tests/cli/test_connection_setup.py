"""The limit of open files that --max-connections needs."""

from __future__ import annotations

import resource

import pytest

from outrider.cli.connection_setup import OTHER_DESCRIPTORS, allow_connections
from outrider.config import InvalidConfig

NEEDED = 2000 + OTHER_DESCRIPTORS


class Limits:
    """The system's, as `resource` shows them. `most`: what it really allows."""

    def __init__(self, soft: int, hard: int, most: int) -> None:
        self.soft, self.hard, self.most = soft, hard, most

    def getrlimit(self, _: int) -> tuple[int, int]:
        return self.soft, self.hard

    def setrlimit(self, _: int, limits: tuple[int, int]) -> None:
        if limits[0] > self.most:
            raise ValueError("current limit exceeds maximum limit")
        self.soft, self.hard = limits


@pytest.mark.parametrize(
    ("soft", "hard", "after"),
    [(256, 4096, NEEDED), (256, resource.RLIM_INFINITY, NEEDED), (9000, 9000, 9000)],
)
def test_limit_is_raised_as_far_as_needed(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, after: int
) -> None:
    limits = Limits(soft, hard, most=10_240)
    monkeypatch.setattr(resource, "getrlimit", limits.getrlimit)
    monkeypatch.setattr(resource, "setrlimit", limits.setrlimit)
    allow_connections(2000)
    assert (limits.soft, limits.hard) == (after, hard)


@pytest.mark.parametrize(("hard", "most"), [(1024, 1024), (resource.RLIM_INFINITY, 1024)])
def test_limit_that_the_system_refuses_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, hard: int, most: int
) -> None:
    """macOS reports no hard limit and allows 10,240 open files."""
    limits = Limits(256, hard, most)
    monkeypatch.setattr(resource, "getrlimit", limits.getrlimit)
    monkeypatch.setattr(resource, "setrlimit", limits.setrlimit)
    with pytest.raises(InvalidConfig, match=f"needs {NEEDED} open files"):
        allow_connections(2000)
