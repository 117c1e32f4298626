"""Requests of the real programs as fixtures: true in form and length, without their prose and our machine.

A long line is stored as its length and a hash, and read back as made-up words of that length. Equal lines
stay equal, so prompts share the prefixes of the real ones. What requests have in common is stored once.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import script

FOLDER = Path(__file__).parents[1] / "data" / "agent_requests"
LONG = 32  # characters of a line that is replaced
KEPT_HEADERS = ("anthropic-beta", "anthropic-version")
EXACT = ("headers", "name", "type", "id", "$schema", "$ref", "pattern", "enum", "const", "required", "format")
LISTS = ("messages", "input")  # what grows from turn to turn

_MARK = re.compile(r"⟦(\d+):([0-9a-f]{8})⟧")
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_ID = re.compile(r"\b(?:call|msg|fc|rs|resp|ses|toolu)_[0-9a-zA-Z]{16,}|\b[0-9a-f]{64}\b")
_WORDS = "a new line may be kept as it was read by the one who wrote this for them".split()  # noqa: SIM905


@dataclass(frozen=True)
class Recording:
    """What one program sent, and the script that was played for it."""

    scenes: Sequence[script.Scene]
    requests: Sequence[dict[str, Any]]  # method, path, headers, body


def save(name: str, recording: Recording, folders: Mapping[str, str], kept: Sequence[str]) -> None:
    """`folders`: paths of this machine, and what stands for them. `kept`: texts whose lines are kept."""
    anonymous = _anonymous(folders)
    requests = [_mapped(request, anonymous) for request in recording.requests]
    stored = {
        "scenes": _mapped([asdict(scene) for scene in recording.scenes], anonymous),
        "requests": list(_shared([_shortened(request, kept) for request in requests])),
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(stored, ensure_ascii=False, indent=1) + "\n")


def names() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.json"))


def load(name: str) -> Recording:
    stored = json.loads((FOLDER / f"{name}.json").read_text())
    requests: list[dict[str, Any]] = []
    for entry in stored["requests"]:
        body = {key: _unshared(key, value, requests) for key, value in entry["body"].items()}
        requests.append(entry | {"body": body})
    return Recording(script.scenes(stored["scenes"]), _mapped(requests, _lengthened))


def trimmed(record: Mapping[str, Any]) -> dict[str, Any]:
    """What of a request is recorded."""
    headers = {name: record["headers"][name] for name in KEPT_HEADERS if name in record["headers"]}
    return {"path": record["path"], "headers": headers, "body": record["body"]}


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Every text in a JSON value changed; names of fields are kept."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(each, change) for key, each in value.items()}
    return [_mapped(each, change) for each in value] if isinstance(value, (list, tuple)) else value


def _anonymous(folders: Mapping[str, str]) -> Callable[[str], str]:
    """Paths and ids of this machine become others; equal ones stay equal."""
    numbers: dict[str, int] = {}

    def numbered(found: re.Match[str]) -> str:
        number = numbers.setdefault(found.group(), len(numbers))
        prefix = found.group().rpartition("_")[0]
        return f"{prefix}_{number:024x}" if prefix else str(_uuid(number))

    def change(text: str) -> str:
        for path in sorted(folders, key=len, reverse=True):
            text = text.replace(path, folders[path])
        return _ID.sub(numbered, _UUID.sub(numbered, text))

    return change


def _uuid(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012x}"


def _shortened(value: Any, kept: Sequence[str]) -> Any:
    def line(found: str) -> str:
        if len(found) <= LONG or any(each in found for each in kept):
            return found
        return f"⟦{len(found)}:{hashlib.sha256(found.encode()).hexdigest()[:8]}⟧"

    if isinstance(value, str):
        return "\n".join(map(line, value.split("\n")))
    if isinstance(value, dict):
        return {key: each if key in EXACT else _shortened(each, kept) for key, each in value.items()}
    return [_shortened(each, kept) for each in value] if isinstance(value, list) else value


def _lengthened(text: str) -> str:
    return _MARK.sub(lambda found: _prose(int(found.group(1)), found.group(2)), text)


def _prose(length: int, seed: str) -> str:
    choose = random.Random(seed)
    text = " ".join(choose.choices(_WORDS, k=length // 2 + 1))
    return text[:length]


# -- what requests have in common ------------------------------------------------------------------------


def _shared(requests: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for i, request in enumerate(requests):
        body = {key: _reference(key, value, requests[:i]) for key, value in request["body"].items()}
        yield request | {"body": body}


def _reference(key: str, value: Any, earlier: Sequence[dict[str, Any]]) -> Any:
    if len(json.dumps(value)) < 100:
        return value
    for i, request in reversed(list(enumerate(earlier))):
        if request["body"].get(key) == value:
            return {"⟦as in⟧": i}
    if key in LISTS and isinstance(value, list) and earlier:
        common = [_num_common(value, request["body"].get(key)) for request in earlier]
        best = max(range(len(common)), key=common.__getitem__)
        if common[best]:
            return {"⟦as in⟧": best, "first": common[best], "then": value[common[best] :]}
    return value


def _num_common(one: list[Any], other: object) -> int:
    others = other if isinstance(other, list) else []
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, others, strict=False))))


def _unshared(key: str, value: Any, earlier: Sequence[dict[str, Any]]) -> Any:
    if not (isinstance(value, dict) and "⟦as in⟧" in value):
        return value
    found = earlier[value["⟦as in⟧"]]["body"][key]
    return [*found[: value["first"]], *value["then"]] if "then" in value else found
