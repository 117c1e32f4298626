"""The gate of decode throughput: what is red, and what is measured once more."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from benchmarks import gate


def measured(*answers: list[float]) -> tuple[Callable[[int], list[float]], list[int]]:
    """Gives these ratios, one list for each call, and notes the rounds that were asked for."""
    left, asked = list(answers), []

    def measure(rounds: int) -> list[float]:
        asked.append(rounds)
        return left.pop(0)

    return measure, asked


def test_a_ratio_at_its_bound_is_green_and_measured_once() -> None:
    measure, asked = measured([0.9, 1.0, 1.4])
    assert gate.judge(gate.Gate("plain", 1.0, measure), 3).is_green
    assert asked == [3]


def test_a_slower_row_is_red_after_a_second_look() -> None:
    measure, asked = measured([0.8, 0.7, 1.2], [0.8] * 6)
    verdict = gate.judge(gate.Gate("plain", 1.0, measure), 3)
    assert not verdict.is_green
    assert asked == [3, 6]
    assert verdict.text().startswith("RED")
    assert "0.80 (0.80-0.80)" in verdict.text()


def test_a_busy_moment_is_not_red() -> None:
    measure, asked = measured([0.5, 0.5, 0.5], [1.1] * 6)
    assert gate.judge(gate.Gate("plain", 1.0, measure), 3).is_green
    assert asked == [3, 6]


class SlowBench:
    """A bench whose rows take as long as it is told."""

    head = object()
    clock = time.perf_counter

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def measure_costs(self, max_rows: int) -> None:
        pass

    def ours(self, depths: list[gate.DraftDepth], num_tokens: int) -> tuple[object, list[object]]:
        from benchmarks.side_by_side import DecodeRun

        return DecodeRun(self.seconds, len(depths) * num_tokens, num_tokens), []

    def mlx_lm(self, rows: int, num_tokens: int) -> object:
        from benchmarks.side_by_side import DecodeRun

        return DecodeRun(1.0, rows * num_tokens, num_tokens)


@pytest.mark.parametrize(("seconds", "status"), [(0.5, 0), (2.0, 1)])
def test_the_command_ends_with_a_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seconds: float, status: int
) -> None:
    monkeypatch.setattr(gate, "StepBench", lambda *_: SlowBench(seconds))
    monkeypatch.setattr("sys.argv", ["gate", "--model", "none"])
    assert gate.main() == status
    out = capsys.readouterr().out
    assert ("RED" in out) == bool(status)
    assert "mixed / solo" in out
