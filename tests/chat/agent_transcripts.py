"""What coding agents send, turn by turn: their long system prompt, their tools, calls and results.

Written for these tests in the shape that such clients use; every turn holds the whole history.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

RULES = "\n".join(
    f"- Rule {i}: read a file before you change it; keep changes small; never guess a path; say what you did."
    for i in range(40)
)
READ = {"file_path": {"type": "string"}, "offset": {"type": "number"}, "limit": {"type": "number"}}
TOOLS = {
    "Read": READ,
    "Edit": {"file_path": {"type": "string"}, "old": {"type": "string"}, "new": {"type": "string"}},
    "Bash": {"command": {"type": "string"}, "timeout": {"type": "number"}},
    "Grep": {"pattern": {"type": "string"}, "path": {"type": "string"}},
}
FILE, TRACE = "\n".join(f"{i}  line {i}" for i in range(60)), "trace line\n" * 30
STEPS: list[tuple[str, str, dict[str, Any], str]] = [
    ("I look for it.", "Grep", {"pattern": "def parse", "path": "src"}, "src/a.py:12: def parse(text):"),
    ("Now I read it.", "Read", {"file_path": "src/a.py", "offset": 1}, FILE),
    ("The bound is wrong.", "Edit", {"file_path": "src/a.py", "old": "< n", "new": "<= n"}, "1 replaced"),
    ("I run the tests.", "Bash", {"command": "pytest -q"}, f"....F\n1 failed: test_empty\n{TRACE}"),
    ("An empty text is special.", "Edit", {"file_path": "src/a.py", "old": "x", "new": "y"}, "1 replaced"),
    ("Once more.", "Bash", {"command": "pytest -q"}, ".....\n5 passed"),
]


def claude_code_turns() -> Iterator[dict[str, Any]]:
    """Bodies of /v1/messages: blocks, cache_control, and a note to the biller that is new every time."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "parse() fails on the last line. Fix it."}]}
    ]
    for number, (words, name, arguments, result) in enumerate([*STEPS, ("Done: fixed.", "", {}, "")]):
        marked = {"cache_control": {"type": "ephemeral"}}
        yield {
            "model": "m",
            "max_tokens": 100,
            "system": [
                {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.9; cch={number:05x};"},
                {"type": "text", "text": f"You are an agent in a terminal.\n{RULES}", **marked},
            ],
            "tools": [
                {
                    "name": tool,
                    "description": f"{tool}: see the rules.",
                    "input_schema": {"type": "object", "properties": properties},
                }
                for tool, properties in TOOLS.items()
            ],
            "messages": [*messages[:-1], _marked(messages[-1], marked)],
        }
        use = {"type": "tool_use", "id": f"toolu_{number}", "name": name, "input": arguments}
        messages.append({"role": "assistant", "content": [{"type": "text", "text": words}, use]})
        back = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": result}
        messages.append({"role": "user", "content": [back]})


def _marked(message: dict[str, Any], marked: dict[str, Any]) -> dict[str, Any]:
    """The mark moves along: it is on the last block of the last message only."""
    *blocks, last = message["content"]
    return message | {"content": [*blocks, last | marked]}


def opencode_turns() -> Iterator[dict[str, Any]]:
    """Bodies of /v1/chat/completions: arguments as JSON text, results as tool messages, a date."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": f"You are a coding agent.\n{RULES}\nToday's date: Sun Jan 05 2025"},
        {"role": "user", "content": "parse() fails on the last line. Fix it."},
    ]
    for number, (words, name, arguments, result) in enumerate([*STEPS, ("Done: fixed.", "", {}, "")]):
        functions = [
            {"name": tool.lower(), "parameters": {"type": "object", "properties": properties}}
            for tool, properties in TOOLS.items()
        ]
        yield {
            "model": "m",
            "messages": list(messages),
            "tools": [{"type": "function", "function": function} for function in functions],
        }
        text = "{" + ", ".join(f'"{key}": {_json(value)}' for key, value in arguments.items()) + "}"
        call = {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": name.lower(), "arguments": text},
        }
        messages.append({"role": "assistant", "content": words, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": result})


def _json(value: Any) -> str:
    return str(value) if isinstance(value, int) else f'"{value}"'
