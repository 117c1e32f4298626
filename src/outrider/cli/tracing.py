"""Whether `outrider serve` sends traces: by --otlp-endpoint, or by OpenTelemetry's own variables (OTEL_*)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from outrider.config import InvalidConfig

if TYPE_CHECKING:
    from outrider.api.tracing import Tracing

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL = "http/protobuf"


def is_tracing_on(endpoint: str | None, environ: Mapping[str, str] = os.environ) -> bool:
    """Raises InvalidConfig if tracing is asked for and cannot be done."""
    source = next((name for name in ENDPOINTS if environ.get(name)), None)
    if endpoint is None and (source is None or _is_disabled(environ)):
        return False
    if endpoint is not None and _is_disabled(environ):
        raise InvalidConfig("--otlp-endpoint contradicts OTEL_SDK_DISABLED or OTEL_TRACES_EXPORTER=none")
    source, url = ("--otlp-endpoint", endpoint) if endpoint is not None else (source, environ[source or ""])
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidConfig(f"{source}: {url!r} is not a URL such as http://localhost:4318")
    for name in PROTOCOLS:
        if environ.get(name, PROTOCOL) != PROTOCOL:
            raise InvalidConfig(f"{name}: {environ[name]!r} is not supported, only {PROTOCOL}")
    try:
        import outrider.api.tracing  # noqa: F401
    except ImportError as error:
        raise InvalidConfig(
            f"{source} turns on tracing, which needs OpenTelemetry ({error}). Install it with "
            "pip install 'outrider[otel]', or leave the endpoint out."
        ) from None
    return True


def new_tracing(endpoint: str | None) -> Tracing | None:
    """None if tracing is off."""
    if not is_tracing_on(endpoint):
        return None
    from outrider.api.tracing import Tracing, otlp_provider

    return Tracing(otlp_provider(endpoint))


def _is_disabled(environ: Mapping[str, str]) -> bool:
    return environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or (
        environ.get("OTEL_TRACES_EXPORTER", "otlp") == "none"
    )
