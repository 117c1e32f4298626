"""Progress bars: on a terminal, and on streams that are none."""

from __future__ import annotations

import io
import re

import pytest

from outrider.progress import Progress, ProgressBar

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def terminal_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")


def drawn(stream: io.StringIO) -> list[str]:
    """The bar each time it was drawn, without escape sequences."""
    lines = re.split(r"[\r\n]+", ESCAPE.sub("", stream.getvalue()))
    return [line.rstrip() for line in lines if line.strip()]


def test_a_terminal_shows_share_count_time_left_and_note() -> None:
    now_s = [0.0]
    stream = Terminal()
    bar = ProgressBar(stream, clock=lambda: now_s[0])
    bar(Progress("Training", 100, 500, "steps"))  # resumed: the first hundred took no time
    for done in (110, 200):
        now_s[0] += 0.6 * (done - 100)
        bar(Progress("Training", done, 500, "steps", "loss 1.25"))
    bar.close()
    first, *_, last = drawn(stream)
    assert re.fullmatch(r"Training \S+ +20% 100/500 steps +--:--", first)
    assert re.fullmatch(r"Training \S+ +40% 200/500 steps +03:20 loss 1\.25", last)


def test_a_narrow_terminal_gets_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    bar = ProgressBar(stream)
    bar(Progress("Downloading the default model", 50e6, 100e6, note="from a slow server"))
    bar.close()
    assert all(len(line) <= 40 for line in drawn(stream))
    assert stream.getvalue().count("\n") == 1


def test_a_bar_is_not_drawn_for_every_report() -> None:
    now_s = [0.0]
    stream = Terminal()
    bar = ProgressBar(stream, clock=lambda: now_s[0])
    for step in range(1000):
        now_s[0] += 0.001
        bar(Progress("Training", step, 1000, "steps"))
    assert len(drawn(stream)) < 15


def test_text_in_square_brackets_is_text() -> None:
    stream = Terminal()
    bar = ProgressBar(stream)
    bar(Progress("Loading [red]model[/red]", 0, 0))
    bar.close()
    assert "Loading [red]model[/red]" in stream.getvalue()


def test_a_pipe_gets_a_line_for_each_stage_and_the_news() -> None:
    stream = io.StringIO()
    bar = ProgressBar(stream)
    for done in range(0, 11_000_000, 1_000_000):
        bar(Progress("Fetching", done, 10_000_000))
    for step in range(10):
        bar(Progress("Training", step, 10, "steps", "so far so good", is_news=step == 5))
    bar.close()
    assert stream.getvalue() == (
        "Fetching: 0/10 MB\nTraining: 0/10 steps\nTraining: 5/10 steps, so far so good\n"
    )
