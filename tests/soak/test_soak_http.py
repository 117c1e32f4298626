"""A real server under load, attack and faults: for some seconds here, as long as asked under `make soak`.

OUTRIDER_SOAK_SECONDS=3600 pytest -m soak -s tests/soak   (OUTRIDER_SOAK_REPORT=FILE writes the table)
"""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path

import pytest

from soak.driver import Soak, SoakPlan, SoakReport, SoakServer
from tiny_vision import write_vision_checkpoint

SECONDS = float(os.environ.get("OUTRIDER_SOAK_SECONDS", "0"))
MAX_HEALTH_S = 0.05


def run_soak(plan: SoakPlan, folder: Path) -> SoakReport:
    write_vision_checkpoint(folder / "model", "qwen3_5")  # images, recurrent layers and attention
    server = SoakServer(folder / "model", folder)

    async def run() -> SoakReport:
        return await Soak(plan, server).run()

    try:
        report = asyncio.run(run())
        assert server.stop() == 0
    finally:
        server.close()
        print(server.log_path.read_text()[-6000:])
    print(report.table())
    print(report.outcomes, report.attacks)
    return report


def test_a_server_stands_load_attacks_and_faults(tmp_path: Path) -> None:
    plan = SoakPlan(
        seconds=4,
        num_clients=16,
        num_attackers=4,
        fault_every_s=0.5,
        deadly_every=3,
        deadly=("kill",),
        idle_every_s=3.0,
        idle_s=0.5,
        num_replayed=12,
        num_fuzzed=0,
        seed=1,
        min_answers=21,
        min_faults=4,
    )
    report = run_soak(plan, tmp_path)
    assert not report.problems, "\n".join(report.problems)
    assert report.outcomes["answered"] > 20
    assert sum(report.attacks.values()) > 20
    assert report.faults["kill"] > 0
    assert len(report.faults) > 2


@pytest.mark.soak
@pytest.mark.skipif(SECONDS <= 0, reason="runs under `make soak` only")
@pytest.mark.timeout(0)
def test_a_server_stands_as_long_as_asked(tmp_path: Path) -> None:
    report = run_soak(SoakPlan(seconds=SECONDS, seed=secrets.randbits(32)), tmp_path)
    if "OUTRIDER_SOAK_REPORT" in os.environ:
        Path(os.environ["OUTRIDER_SOAK_REPORT"]).write_text(report.table() + "\n")
    assert not report.problems, "\n".join(report.problems)
    assert report.health_p99_s < MAX_HEALTH_S
