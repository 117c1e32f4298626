"""What the operator chooses about the server (not the engine). Frozen, validated, no HTTP library."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from outrider.config import InvalidConfig

MIB = 1 << 20


@dataclass(frozen=True)
class ServerSettings:
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    allow_public_without_key: bool = False
    served_model_names: tuple[str, ...] = ("model",)  # the first is the one that answers carry
    max_tokens: int | None = None  # for requests that do not say; None: up to the context
    max_rows: int = 16  # what the engine decodes at once
    max_queue: int = 256  # requests that may wait for a row
    max_body_bytes: int = 32 * MIB
    max_stored_responses: int = 1000
    max_stored_bytes: int = 64 * MIB
    retry_after_s: int = 2
    keep_alive_s: float = 5.0  # silence in a stream after which a sign of life is sent
    drain_s: float = 30.0  # how long a shutdown waits for answers under way
    cors_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidConfig(f"port must be 0..65535, not {self.port}")
        for name in ("max_rows", "max_body_bytes", "max_stored_responses", "max_stored_bytes"):
            _at_least(name, getattr(self, name), 1)
        _at_least("max_queue", self.max_queue, 0)
        _at_least("drain_s", self.drain_s, 0)
        if self.max_tokens is not None:
            _at_least("max_tokens", self.max_tokens, 1)
        if self.keep_alive_s <= 0:
            raise InvalidConfig(f"keep_alive_s must be above 0, not {self.keep_alive_s}")
        if not self.served_model_names or not all(self.served_model_names):
            raise InvalidConfig("the served model needs a name")
        _check_key(self.api_key)
        if not (self.is_loopback or self.api_key or self.allow_public_without_key):
            raise InvalidConfig(
                f"{self.host} can be reached by others and no API key is set. Set one (--api-key or "
                "OUTRIDER_API_KEY), bind 127.0.0.1, or say --allow-public-without-key."
            )

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False  # a name: who knows where it points

    @property
    def model_name(self) -> str:
        return self.served_model_names[0]


def _at_least(name: str, value: float, least: float) -> None:
    if value < least:
        raise InvalidConfig(f"{name} must be at least {least}, not {value}")


def _check_key(key: str | None) -> None:
    if key is not None and (not key or not key.isascii() or not key.isprintable() or " " in key):
        raise InvalidConfig("the API key must be printable ASCII without spaces, and not empty")
