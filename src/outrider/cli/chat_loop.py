"""The conversation of `outrider chat`: input lines, commands, and the messages so far. Knows no model."""

from __future__ import annotations

import re
import sys
from contextlib import closing

from outrider.chat.conversation import Message, Role, TextPart
from outrider.chat.events import Finished, TextDelta
from outrider.cli.chat_backends import Backend, ChatFailed
from outrider.cli.chat_screen import ChatScreen
from outrider.terminal import printable

HINT = "Type a message. Ctrl-C stops an answer, /quit or Ctrl-D ends the chat, /help shows more."
HELP = """\
/reset         forget the conversation; the system message stays
/system TEXT   set the system message; without TEXT, remove it
/help          show this list
/quit          end the chat, as Ctrl-D does
A line that ends with \\ continues on the next line.
Ctrl-C stops an answer; the conversation goes on."""
MAX_ERROR_CHARS = 500  # of an error message, which may come from a server; chosen by hand


class ChatLoop:
    def __init__(self, backend: Backend, screen: ChatScreen, system: str | None) -> None:
        self._backend = backend
        self._screen = screen
        self._system = system
        self._turns: list[Message] = []  # user and assistant in turn

    def run(self) -> None:
        """Returns after /quit or the end of the input."""
        print(f"{printable(self._backend.greeting)}\n{HINT}")
        while (line := read_message()) is not None and line != "/quit":
            if line and not self._run_command(line):
                self._ask(line)

    def _run_command(self, line: str) -> bool:
        """False if the line is a message, not a command."""
        command, *rest = line.split(maxsplit=1)
        if command == "/system":
            self._system = rest[0] if rest else None
            self._screen.note("The system message is set." if rest else "The system message is removed.")
        elif line == "/reset":
            self._turns.clear()
        elif line == "/help":
            self._screen.note(HELP)
        elif re.fullmatch(r"/\w+", line):
            self._screen.note(f"There is no command {line}; see /help.")
        else:
            return False
        return True

    def _ask(self, line: str) -> None:
        """The question joins the conversation if there is an answer, even a part of one."""
        question = _message("user", line)
        opening = [_message("system", self._system)] if self._system else []
        answer = self._answer([*opening, *self._turns, question])
        if answer is not None:
            self._turns += [question, _message("assistant", answer)]

    def _answer(self, messages: list[Message]) -> str | None:
        pieces: list[str] = []
        is_finished = False
        try:
            with closing(self._backend.answer(messages)) as events:
                for event in events:
                    if isinstance(event, TextDelta):
                        pieces.append(event.text)
                    is_finished = isinstance(event, Finished)
                    self._screen.show(event)
        except KeyboardInterrupt:
            self._screen.end_answer()
            self._screen.note("(stopped)")
        except ChatFailed as error:
            self._screen.end_answer()
            print(f"outrider: {one_line(str(error))}", file=sys.stderr, flush=True)
        return "".join(pieces) if pieces or is_finished else None


def read_message() -> str | None:
    """One message, which may have several lines. None at the end of the input."""
    print()
    lines: list[str] = []
    try:
        while True:
            lines.append(input(". " if lines else "> "))
            if not lines[-1].endswith("\\"):
                break
            lines[-1] = lines[-1][:-1]
    except EOFError:
        print()
        if not lines:
            return None
    except KeyboardInterrupt:
        print("\n(Ctrl-D or /quit ends the chat)")
        return ""
    except UnicodeDecodeError as error:
        print(f"outrider: the input is not text: {error}", file=sys.stderr)
        return ""
    return "\n".join(lines).encode(errors="replace").decode().strip()


def one_line(text: str) -> str:
    line = " ".join(printable(text).split())
    return line if len(line) <= MAX_ERROR_CHARS else line[:MAX_ERROR_CHARS] + "…"


def _message(role: Role, text: str) -> Message:
    return Message(role, (TextPart(text),))
