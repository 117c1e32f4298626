"""Every tool parser of mlx-lm has a format here that reads the same calls out of the same text."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

import mlx_lm.tool_parsers
import pytest
from test_output_parser import events_of, meaning_of, new_parser
from written_calls import WRITERS

from outrider.chat.conversation import Tool
from outrider.chat.formats import tool_format_named
from outrider.chat.template import tool_dict

PARSERS = [module.name for module in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)]
# Where the name means another format here, or several of them.
FORMATS = {"pythonic": ["lfm2"], "mistral": ["mistral", "mistral_list"]}

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "is_on": {"type": "boolean"},
    },
}
TOOLS = {name: Tool(name, "", SCHEMA) for name in ("get_weather", "clock")}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"text": "Paris é, 2 days", "count": 2, "is_on": True}),
    ("clock", {"text": "now", "count": -1}),
]


def read_by_mlx_lm(parser: str, text: str) -> list[tuple[str, dict[str, Any]]]:
    """As its server does: the parser gets the text between its markers."""
    module = import_module(f"mlx_lm.tool_parsers.{parser}")
    start, end = module.tool_call_start, module.tool_call_end
    bodies = [part.split(end)[0] if end else part for part in text.split(start)[1:]]
    found = [module.parse_tool_call(body, [tool_dict(tool) for tool in TOOLS.values()]) for body in bodies]
    calls = [call for each in found for call in (each if isinstance(each, list) else [each])]
    return [(call["name"], call["arguments"]) for call in calls]


@pytest.mark.parametrize(
    ("parser", "format"),
    [(parser, name) for parser in PARSERS for name in FORMATS.get(parser, [tool_format_named(parser).name])],
)
@pytest.mark.parametrize("num_calls", [1, 2])
def test_a_text_has_the_calls_that_mlx_lm_reads_in_it(parser: str, format: str, num_calls: int) -> None:
    calls = CALLS[:num_calls]
    text = WRITERS[format](calls)
    assert read_by_mlx_lm(parser, text) == calls
    assert meaning_of(events_of(new_parser(format, tools=TOOLS), [text])) == calls
