"""What the scripted model says: scenes, each with the turns of one conversation. Pure data, stored as JSON.

The model reads its prompt as text. The first scene whose `when` strings are all in the prompt is played. Its
turn is the number of answers that the prompt has after the last place of the scene's first string.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ASSISTANT = "<|im_start|>assistant\n"  # how the template of agent_model.py opens an answer
LOST = "The script has no answer to this."


@dataclass(frozen=True)
class Call:
    name: str
    arguments: dict[str, Any]  # in the order of the tool's schema: a grammar wants it

    def __str__(self) -> str:
        call = {"name": self.name, "arguments": self.arguments}
        return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


@dataclass(frozen=True)
class Turn:
    """One answer: what the model thinks, what it says, and the tools that it calls."""

    text: str = ""
    calls: Sequence[Call] = ()
    thought: str = ""

    def __str__(self) -> str:
        thought = f"<think>\n{self.thought}\n</think>\n\n" if self.thought else ""
        return thought + "\n".join([*([self.text] if self.text else []), *map(str, self.calls)])


@dataclass(frozen=True)
class Scene:
    when: Sequence[str]  # must all be in the prompt
    turns: Sequence[Turn]
    unless: Sequence[str] = ()  # must not be in the prompt

    def fits(self, prompt: str) -> bool:
        return all(text in prompt for text in self.when) and not any(text in prompt for text in self.unless)

    def answer(self, prompt: str) -> str:
        place = prompt.rfind(self.when[0]) if self.when else 0
        turn = prompt.count(ASSISTANT, place) - 1  # the last one opens the answer that is wanted
        return str(self.turns[turn]) if 0 <= turn < len(self.turns) else LOST


def answer(played: Sequence[Scene], prompt: str) -> str:
    return next((scene.answer(prompt) for scene in played if scene.fits(prompt)), LOST)


def write(file: Path, played: Sequence[Scene]) -> None:
    file.write_text(json.dumps([asdict(scene) for scene in played]))


def read(file: Path) -> list[Scene]:
    return scenes(json.loads(file.read_text()))


def scenes(entries: Sequence[dict[str, Any]]) -> list[Scene]:
    return [
        Scene(entry["when"], [_turn(turn) for turn in entry["turns"]], entry["unless"]) for entry in entries
    ]


def _turn(entry: dict[str, Any]) -> Turn:
    return Turn(entry["text"], [Call(**call) for call in entry["calls"]], entry["thought"])
