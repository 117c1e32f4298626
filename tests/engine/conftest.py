"""An engine on a runner without a model, with and without overlapped steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_runner import EngineRunner, parts

from outrider.config import EngineConfig
from outrider.engine.engine import Engine


@pytest.fixture
def runner() -> EngineRunner:
    return EngineRunner()


@pytest.fixture(params=[False, True], ids=["", "ahead"])
def engine(runner: EngineRunner, request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine(EngineConfig(), lambda: parts(runner, overlaps_steps=request.param))
    yield engine
    runner.may_run.set()
    engine.close()
