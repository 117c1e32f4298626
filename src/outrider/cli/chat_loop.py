"""The conversation of `outrider chat`: reads lines, obeys commands, keeps the messages. Knows no model."""

from __future__ import annotations

import re
import sys
from contextlib import closing

from outrider.chat.conversation import Message, Role, TextPart
from outrider.chat.events import Finished, TextDelta
from outrider.cli.chat_backends import Backend, ChatFailed
from outrider.cli.chat_screen import ChatScreen
from outrider.cli.terminal import printable

HINT = "Type a message. /help shows the commands, /quit (or Ctrl-D) leaves, Ctrl-C stops an answer."
HELP = """\
/reset         start over; the system message stays
/system TEXT   set the system message; without TEXT there is none
/help          this
/quit          leave, as does Ctrl-D
A \\ at the end of a line goes on with the next one. Ctrl-C stops an answer and keeps the conversation."""
MAX_ERROR = 500  # characters of one line


class ChatLoop:
    def __init__(self, backend: Backend, screen: ChatScreen, system: str | None) -> None:
        self._backend = backend
        self._screen = screen
        self._system = system
        self._turns: list[Message] = []  # user and assistant in turn

    def run(self) -> None:
        """Until /quit or the end of the input."""
        print(f"{self._backend.greeting}\n{HINT}")
        while (line := read_message()) is not None and line != "/quit":
            if line and not self._obey(line):
                self._converse(line)

    def _obey(self, line: str) -> bool:
        """Whether it was a command."""
        command, *rest = line.split(maxsplit=1)
        if command == "/system":
            self._system = rest[0] if rest else None
            self._screen.note("The system message is set." if rest else "There is no system message now.")
        elif line == "/reset":
            self._turns.clear()
        elif line == "/help":
            self._screen.note(HELP)
        elif re.fullmatch(r"/\w+", line):
            self._screen.note(f"There is no command {line}; see /help.")
        else:
            return False
        return True

    def _converse(self, line: str) -> None:
        """A turn is kept once something was answered, be it only a part."""
        question = _message("user", line)
        answer = self._answer([*self._opening(), *self._turns, question])
        if answer is not None:
            self._turns += [question, _message("assistant", answer)]

    def _opening(self) -> list[Message]:
        return [_message("system", self._system)] if self._system else []

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
    """What the user typed, over several lines where they end with a backslash; None: there is no more."""
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
        print("\n(Ctrl-D or /quit leaves)")
        return ""
    except UnicodeDecodeError as error:
        print(f"outrider: this is not text: {error}", file=sys.stderr)
        return ""
    return "\n".join(lines).encode(errors="replace").decode().strip()


def one_line(text: str) -> str:
    line = " ".join(printable(text).split())
    return line if len(line) <= MAX_ERROR else line[:MAX_ERROR] + "…"


def _message(role: Role, text: str) -> Message:
    return Message(role, (TextPart(text),))
