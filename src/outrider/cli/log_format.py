"""The lines of the log: text or JSON. Text of clients can neither forge lines nor control a terminal."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s [%(request_id)s] %(message)s"
# Longest message and traceback in characters; chosen by hand: messages of this project stay below 500.
MAX_MESSAGE = 4000
MAX_TRACEBACK = 40_000


def log_to_terminal(level: str | None, outer_level: str, log_format: str) -> None:
    """`serve` logs at INFO by default. `outrider --log-level debug serve` logs more."""
    numbers = logging.getLevelNamesMapping()
    chosen = numbers[level.upper()] if level else min(logging.INFO, numbers[outer_level.upper()])
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("outrider").setLevel(chosen)


def add_request_ids() -> None:
    """Log the ids of HTTP requests too. Only the process that serves them loads the HTTP library for that."""
    from outrider.api.middleware import RequestIdFilter

    for handler in logging.getLogger().handlers:
        handler.addFilter(RequestIdFilter())


def printable(text: str, max_length: int = MAX_MESSAGE) -> str:
    """The text in one line: control characters and the like as escapes, the rest of a long text left out."""
    shown = text[:max_length]
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)
    num_hidden = len(text) - max_length
    return f"{shown}... ({num_hidden} more characters)" if num_hidden > 0 else shown


class TextFormatter(logging.Formatter):
    """One line for each record, and the lines of its traceback, which are indented."""

    def __init__(self, line_format: str = LOG_FORMAT) -> None:
        super().__init__(line_format, defaults={"request_id": "-"})

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, exc_info: object) -> str:
        text = super().formatException(exc_info)  # type: ignore[arg-type]
        # The exception's text may have come from a client: none of its lines looks like a record.
        return "\n".join(f"    {printable(line)}" for line in text[:MAX_TRACEBACK].splitlines())


class JsonFormatter(logging.Formatter):
    """One JSON object for each record. Records of the access log have further fields."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "request_id": getattr(record, "request_id", "-"),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        entry = {name: v[:MAX_MESSAGE] if isinstance(v, str) else v for name, v in entry.items()}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)[:MAX_TRACEBACK]
        return json.dumps(entry, default=str)  # in ASCII: control characters are escapes
