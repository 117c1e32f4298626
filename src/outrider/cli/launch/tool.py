"""What `outrider launch` needs to know about a tool, and what it will do for it. Pure data.

A tool is a module like its neighbours: a function from a target to a plan, and a `Tool` that names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

NO_KEY = "none"  # what a client sends to a server without keys: most clients insist on some key


@dataclass(frozen=True)
class Target:
    """The server and the model that the tool will use."""

    url: str  # without /v1
    model: str  # its served name
    context: int | None  # tokens of a prompt and its answer; None: not known yet
    api_key: str = NO_KEY
    reads_images: bool = False

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"

    def max_answer(self, most: int) -> int | None:
        """Tokens that a tool should keep free for an answer: a quarter of the context, at most `most`."""
        return None if self.context is None else max(1, min(most, self.context // 4))


@dataclass(frozen=True)
class Plan:
    """How a tool is started. Files are written into a temporary folder, which is removed afterwards."""

    arguments: Sequence[str] = ()  # in front of the user's own
    environment: Mapping[str, str] = field(default_factory=dict)
    removed: Sequence[str] = ()  # variables that would lead the tool to another server
    files: Mapping[Path, str] = field(default_factory=dict)
    notes: Sequence[str] = ()  # what the user should know


class MakePlan(Protocol):
    def __call__(self, target: Target, folder: Path) -> Plan: ...


@dataclass(frozen=True)
class Tool:
    title: str
    program: str
    install: str  # the command
    plan: MakePlan
    prompt_tokens: int  # of its own prompt, before the user has said anything (docs/AGENTS.md)


def without_unknown(values: Mapping[str, str | int | None]) -> dict[str, str]:
    """Variables of an environment; those that are None are left out."""
    return {name: str(value) for name, value in values.items() if value is not None}
