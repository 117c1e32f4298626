import io

from outrider.models.files.progress import Progress, TerminalBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_each_stage_is_one_line():
    stream = io.StringIO()
    bar = TerminalBar(stream)
    for done in range(0, 11_000_000, 1_000_000):
        bar(Progress("fetching", done, 10_000_000))
    bar(Progress("converting", 0, 2_000_000))
    bar.close()
    assert stream.getvalue() == "fetching (10 MB)\nconverting (2 MB)\n"


def test_on_a_terminal_the_bar_fills_up_in_place():
    stream = Terminal()
    bar = TerminalBar(stream)
    bar(Progress("fetching", 0, 10_000_000))
    bar(Progress("fetching", 10_000_000, 10_000_000))
    bar.close()
    drawn = stream.getvalue().split("\r")
    assert "  0% 0/10 MB" in drawn[1]
    assert drawn[-1] == f"fetching [{'#' * 30}] 100% 10/10 MB\n"


def test_an_unknown_total_does_not_divide_by_zero():
    TerminalBar(Terminal())(Progress("fetching", 0, 0))
