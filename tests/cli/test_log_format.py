"""Lines of the log: nothing that a client sends begins a line of its own, or reaches a terminal as it is."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from outrider.cli.log_format import MAX_MESSAGE, JsonFormatter, TextFormatter, printable

FORMAT = "%(levelname)s %(message)s"


def record(text: str, error: Exception | None = None, **fields: Any) -> logging.LogRecord:
    exc_info = None
    if error is not None:
        try:
            raise error
        except Exception:
            exc_info = sys.exc_info()
    made = logging.LogRecord("test", logging.INFO, "file", 1, "%s", (text,), exc_info)
    made.fields = fields
    return made


@given(st.text())
def test_text_of_a_client_stays_in_its_line(text: str) -> None:
    assert printable(text).isprintable()
    lines = TextFormatter(FORMAT).format(record(text)).splitlines()
    assert lines == [f"INFO {printable(text)}"]


def test_text_of_an_exception_is_indented() -> None:
    lines = TextFormatter(FORMAT).format(record("failed", ValueError("a\nINFO forged\x1b[31m"))).splitlines()
    assert lines[0] == "INFO failed"
    assert "    INFO forged\\x1b[31m" in lines
    assert all(line.startswith("    ") for line in lines[1:])


def test_long_text_is_cut() -> None:
    assert len(printable("x" * 10**6)) < MAX_MESSAGE + 50
    entry = json.loads(JsonFormatter().format(record("x" * 10**6, path="y" * 10**6)))
    assert len(entry["message"]) == len(entry["path"]) == MAX_MESSAGE


@given(st.text())
def test_json_is_one_object_in_one_line(text: str) -> None:
    line = JsonFormatter().format(record(text, ValueError(text), path=text, status=200))
    assert line.isprintable()
    entry = json.loads(line)
    assert entry["message"] == entry["path"] == text
    assert entry["status"] == 200
    assert "ValueError" in entry["traceback"]
