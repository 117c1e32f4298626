"""The id under which a request is answered, logged and shown: the client's own, or a new one."""

from __future__ import annotations

import logging
import re
import uuid
from contextvars import ContextVar

current_request_id: ContextVar[str] = ContextVar("current_request_id", default="-")

SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def request_id_for(given: str) -> str:
    """What the client sent, if it is fit for a log line."""
    return given if SANE_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"


class RequestIdFilter(logging.Filter):
    """Gives every log record the id of the request it was written for."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = current_request_id.get()
        return True
