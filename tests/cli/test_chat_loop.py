"""The conversation: commands, messages of several lines, and what stays of stopped and failed answers."""

from __future__ import annotations

import io
import os
import signal
import threading
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.chat.conversation import Message, TextPart
from outrider.chat.events import ChatEvent, Finished, ReasoningDelta, TextDelta, Usage
from outrider.cli.chat_backends import ChatFailed, LocalBackend
from outrider.cli.chat_loop import ChatLoop
from outrider.cli.chat_screen import ChatScreen, summary
from outrider.engine.sequence import Stats
from outrider.terminal import wants_styles
from server_process import write_tiny_model

END = Finished("stop", Usage(), Stats(num_generated=10, ttft_s=0.5, total_s=2.0))


class ScriptedBackend:
    """Answers "1", "2", ...; a question may ask for something else to happen."""

    greeting = "scripted."

    def __init__(self) -> None:
        self.asked: list[list[tuple[str, str]]] = []

    def answer(self, messages: Sequence[Message]) -> Generator[ChatEvent, None, None]:
        self.asked.append([(message.role, message.text) for message in messages])
        question = messages[-1].text
        if question == "refuse":
            raise ChatFailed("not\nthis \x1b[2Jtime")
        yield TextDelta(str(len(self.asked)))
        if question == "break":
            raise ChatFailed("it broke")
        if question == "stop":
            raise KeyboardInterrupt
        yield END


class Keyboard(io.StringIO):
    """Lines, of which "^C" is the key."""

    def readline(self, size: int | None = -1, /) -> str:
        line = super().readline(-1 if size is None else size)
        if line == "^C\n":
            raise KeyboardInterrupt
        return line


def converse(monkeypatch: pytest.MonkeyPatch, typed: str, system: str | None = None) -> ScriptedBackend:
    backend = ScriptedBackend()
    monkeypatch.setattr("sys.stdin", Keyboard(typed))
    ChatLoop(backend, ChatScreen(io.StringIO(), False), system).run()
    return backend


def test_answers_are_remembered_until_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = converse(monkeypatch, "a\n\nb\n/reset\nc\n/quit\nd\n", system="s")
    assert backend.asked == [
        [("system", "s"), ("user", "a")],
        [("system", "s"), ("user", "a"), ("assistant", "1"), ("user", "b")],
        [("system", "s"), ("user", "c")],
    ]


def test_the_system_message_can_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = converse(monkeypatch, "/system be brief\na\n/system\nb\n")
    assert backend.asked[0] == [("system", "be brief"), ("user", "a")]
    assert backend.asked[1] == [("user", "a"), ("assistant", "1"), ("user", "b")]


def test_a_backslash_goes_on_with_the_next_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert converse(monkeypatch, "a\\\n  b\\\nc\nd\\\n").asked[0] == [("user", "a\n  b\nc")]
    assert converse(monkeypatch, "a\\\n").asked == [[("user", "a")]]


def test_unknown_commands_are_not_sent_but_paths_are(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = converse(monkeypatch, "/hlep\n/help\n/etc/hosts holds what?\n")
    assert backend.asked == [[("user", "/etc/hosts holds what?")]]


def test_ctrl_c_at_the_prompt_drops_the_line_only(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = converse(monkeypatch, "a\nb\\\n^C\nc\n")
    assert backend.asked[1:] == [[("user", "a"), ("assistant", "1"), ("user", "c")]]


def test_parts_of_answers_are_kept_and_refused_questions_are_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = converse(monkeypatch, "stop\nbreak\nrefuse\na\n")
    kept = [("user", "stop"), ("assistant", "1"), ("user", "break"), ("assistant", "2")]
    assert backend.asked[-1] == [*kept, ("user", "a")]
    assert capsys.readouterr().err == "outrider: it broke\noutrider: not this [2Jtime\n"


# -- the screen ------------------------------------------------------------------------------------------


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(has_styles: bool, *events: ChatEvent) -> str:
    out = Tty() if has_styles else io.StringIO()
    screen = ChatScreen(out, has_styles)
    for event in events:
        screen.show(event)
    return out.getvalue()


EVENTS = (ReasoningDelta("Hm\nm"), TextDelta("a **b"), TextDelta("** \x1b[2J`c"), END)
FIGURES = "10 tokens, 5.0 tokens/s; first token after 500 ms"


def test_without_styles_the_text_is_shown_as_it_is() -> None:
    assert shown(False, *EVENTS) == f"Hm\nm\na **b** [2J`c\n{FIGURES}\n"


def test_with_styles_markdown_is_rendered_and_reasoning_dimmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    dim = "\x1b[2m{}\x1b[0m".format
    found = shown(True, *EVENTS)
    assert found.startswith(f"{dim('Hm')}\n{dim('m')}\n")
    assert found.endswith(f"a \x1b[1mb\x1b[0m [2J`c\n{dim(FIGURES)}\n")


def test_figures_tell_what_is_known() -> None:
    stats = Stats(num_generated=10, steps=4, drafted=[4, 3], accepted=[4, 2], total_s=1.0)
    figures = summary(Finished("stop", Usage(), stats))
    assert figures == ("10 tokens, 10.0 tokens/s; drafts accepted 4/4, 2/3 by position, 2.50 tokens per step")
    usage = Usage(num_accepted=6, num_rejected=1)
    assert summary(Finished("length", usage)) == "drafts accepted 6/7; cut at --max-tokens"


def test_styles_are_for_terminals_that_want_them() -> None:
    assert wants_styles(Tty(), {"NO_COLOR": ""})
    assert not wants_styles(Tty(), {"NO_COLOR": "1"})
    assert not wants_styles(Tty(), {"TERM": "dumb"})
    assert not wants_styles(io.StringIO(), {})


# -- a model in this process -----------------------------------------------------------------------------


def test_a_local_answer_can_be_interrupted_and_the_next_one_comes(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny", with_head=False)
    question = [Message("user", (TextPart("hello"),))]
    with LLM(folder, drafter="ngram") as llm:
        endless = LocalBackend(llm, SamplingParams(max_tokens=None, ignore_eos=True))
        key = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        answer = endless.answer(question)
        next(answer)

        def read_on() -> None:
            key.start()  # here: the signal may come as soon as the thread runs
            list(answer)

        with pytest.raises(KeyboardInterrupt):
            read_on()
        endless.close()

        brief = LocalBackend(llm, SamplingParams(max_tokens=3, ignore_eos=True))
        *_, finished = brief.answer(question)
        assert isinstance(finished, Finished)
        assert finished.stats.num_generated == 3
        with pytest.raises(ChatFailed, match="context"):
            list(brief.answer([Message("user", (TextPart("a b " * 9000),))]))
        brief.close()
