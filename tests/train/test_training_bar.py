from __future__ import annotations

import io

import pytest

from outrider.train.progress import Progress, TrainingBar, duration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [200, 60])
def test_a_terminal_sees_a_bar_with_the_time_left(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    now = [0.0]
    stream = Terminal()
    bar = TrainingBar(stream, clock=lambda: now[0])
    bar(Progress("Training", 100, 500, "steps"))  # resumed: the first hundred took no time
    now[0] = 60.0
    bar(Progress("Training", 200, 500, "steps", "loss 1.25"))
    bar.close()
    want = "Training [##########--------------]  40% 200/500 steps, 3:00 left, loss 1.25"
    assert stream.getvalue().split("\r")[-1] == f"{want[: columns - 1]}\033[K\n"


def test_a_bar_is_not_drawn_for_every_step() -> None:
    now = [0.0]
    stream = Terminal()
    bar = TrainingBar(stream, clock=lambda: now[0])
    for step in range(1000):
        now[0] += 0.001
        bar(Progress("Training", step, 1000, "steps"))
    assert stream.getvalue().count("\r") < 15


def test_without_a_terminal_there_is_a_line_a_stage_and_the_news() -> None:
    stream = io.StringIO()
    bar = TrainingBar(stream)
    for step in range(10):
        bar(Progress("Training", step, 10, "steps", "so far so good", is_news=step == 5))
    bar.close()
    assert stream.getvalue() == "Training: 0/10 steps\nTraining: 5/10 steps, so far so good\n"


def test_durations_read_like_a_clock() -> None:
    assert [duration(s) for s in (0, 59.6, 61, 3600 * 2 + 5)] == ["0:00", "1:00", "1:01", "2:00:05"]
