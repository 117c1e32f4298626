"""Random calls, written as each family writes them and cut anywhere, are read back as they were."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_output_parser import events_of, meaning_of, new_parser
from written_calls import WRITERS

from outrider.chat.conversation import Tool
from outrider.chat.formats import TOOL_FORMATS
from patience import in_test_or_soak

# Every kind of argument, with a few names that are hard on tags and keys.
SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "file_path": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "is_on": {"type": "boolean"},
        "names": {"type": "array", "items": {"type": "string"}},
        "place": {"type": "object", "properties": {"x": {"type": "integer"}, "label": {"type": "string"}}},
    },
}
TOOLS = {name: Tool(name, "", SCHEMA) for name in ("get_weather", "Read", "mcp__files__list-all")}
PYTHON_NAMES = {"lfm2", "gemma3", "pythonic", "olmo3"}  # a name with a hyphen is no Python
ONE_CALL = {"harmony", "gigachat3"}

# Without the first and last blanks, which tags cannot keep apart from their own line breaks.
SCRAPS = st.sampled_from(
    [
        *"<>{}[],:&\"'\
",
        "</",
        "é😀",
        "```",
        "x1 y",
    ]
)
WORDS = st.one_of(st.lists(SCRAPS, max_size=6).map("".join), st.text(max_size=8)).map(str.strip)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "text": WORDS,
    "file_path": st.sampled_from(["/tmp/a b.py", "C:\\x", "~"]),
    "count": st.integers(-(10**9), 10**9),
    "ratio": st.floats(allow_nan=False, allow_infinity=False, width=32),
    "is_on": st.booleans(),
    "names": st.lists(st.sampled_from(["a", "b c", "d"]), min_size=2, max_size=3),
    "place": st.fixed_dictionaries({"x": st.integers(0, 9), "label": st.sampled_from(["here", "there"])}),
}


@st.composite
def calls(draw: st.DrawFn, format: str) -> list[tuple[str, dict[str, Any]]]:
    names = [name for name in TOOLS if format not in PYTHON_NAMES or name.isidentifier()]
    num_calls = 1 if format in ONE_CALL else draw(st.integers(1, 3))
    found = []
    for _ in range(num_calls):
        keys = draw(st.lists(st.sampled_from(list(VALUES)), unique=True))
        found.append((draw(st.sampled_from(names)), {key: draw(VALUES[key]) for key in keys}))
    return found


def is_writable(format: str, text: str) -> bool:
    """Whether a format can express this text: its own markers inside a value are beyond most formats."""
    if any(not character.isprintable() and character != "\n" for character in text):
        return False
    if format == "gemma3":
        return "```" not in text
    return True


@pytest.mark.parametrize("format", TOOL_FORMATS)
@given(data=st.data())
@settings(max_examples=in_test_or_soak(15, 400), deadline=None)
def test_calls_are_read_back_however_they_are_cut(format: str, data: st.DataObject) -> None:
    wanted = data.draw(calls(format))
    assume(all(is_writable(format, given.get("text", "")) for _, given in wanted))
    text = WRITERS[format](wanted)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert meaning_of(events_of(new_parser(format, tools=TOOLS), pieces)) == wanted


def test_every_format_is_written() -> None:
    assert set(WRITERS) == set(TOOL_FORMATS)
