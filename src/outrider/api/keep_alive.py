"""`keep_alive` of a request: how long its model stays loaded after its last use, as in Ollama's API."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from outrider.api.errors import invalid
from outrider.pool.durations import duration_s

# The texts that `duration_s` reads, for /openapi.json.
PATTERN = r"^[+-]?((([0-9]+(\.[0-9]*)?|\.[0-9]+)(ns|us|µs|ms|s|m|h))+|[0-9]+(\.[0-9]+)?)$"
Duration = Annotated[str, Field(max_length=40, json_schema_extra={"pattern": PATTERN})]
KeepAlive = Duration | float
LONGEST_S = 1e9  # more seconds than that are for ever


def keep_alive_s(value: KeepAlive | None) -> float | None:
    """Seconds; infinite for a negative value, which means: for ever. None: the request does not say.

    A number is in seconds. Raises a 400.
    """
    if value is None:
        return None
    seconds = duration_s(value) if isinstance(value, str) else float(value)
    if isinstance(value, str) and value != value.strip():
        seconds = None
    if seconds is None or seconds != seconds:
        raise invalid(
            "keep_alive",
            f"{str(value)[:40]!r} is not a duration: give seconds, or a text such as 10m; -1: keep",
        )
    return seconds if 0 <= seconds <= LONGEST_S else float("inf")
