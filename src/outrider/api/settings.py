"""The operator's settings of the HTTP server. Those of the engine are in `outrider.config`."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from outrider.config import InvalidConfig
from outrider.request import NO_DEFAULTS, SamplingDefaults

MIB = 1 << 20
HOST_NAME = re.compile(r"\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")


@dataclass(frozen=True)
class ServerSettings:
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None  # the one key of all clients; an operator's key too if there is no other
    operator_key: str | None = None  # of who may read metrics and delete caches
    api_keys_file: str | None = None  # file of several keys: see api/keys.py
    allow_public_without_key: bool = False
    served_model_names: tuple[str, ...] = ("model",)  # an answer has the requested name, or the first
    any_model_name: bool = False  # requests may have any model name
    old_model_names: tuple[str, ...] = ()  # names of earlier releases: accepted in requests, not listed
    max_tokens: int | None = None  # of an answer whose request sets no limit; None: up to max_context
    sampling: SamplingDefaults = NO_DEFAULTS  # of requests that leave the values out; checks itself
    max_rows: int = 16  # sequences that the engine decodes at once (vLLM: max_num_seqs)
    max_queue: int = 256  # requests that may wait; more get a 429
    max_body_bytes: int = 32 * MIB  # of a request; larger ones get a 413
    max_live_bytes: int = 256 * MIB  # bodies of all requests that run or wait; more get a 429. Chosen by hand
    max_live_tokens: int = 4 << 20  # prompt tokens of these; chosen by hand: about 160 MB of Python objects
    max_connections: int = 1024
    header_timeout_s: float = 15.0  # for the headers of a request, and for the first byte of a connection
    body_timeout_s: float = 30.0  # for the body of a request; more for long ones (see middleware)
    write_timeout_s: float = 60.0  # for a client to read the answer that waits for it
    queue_timeout_s: float = 600.0  # from the request to its row; 0: no limit
    request_timeout_s: float = 0.0  # from the request to the end of its answer; 0: no limit
    max_stored_responses: int = 1000  # /v1/responses: answers that previous_response_id can name
    max_stored_bytes: int = 64 * MIB  # all stored responses together
    retry_after_s: int = 2  # the Retry-After header of a 429 or 503
    keep_alive_s: float = 5.0  # a stream without tokens for this long gets a comment or a ping
    drain_s: float = 30.0  # time that a shutdown gives to running requests
    step_timeout_s: float = 60.0  # least time after which a step counts as hung; 0: never
    cors_origins: tuple[str, ...] = ()  # web origins whose pages may call the API; "*": any
    serves_page: bool = True  # the web pages at / and /docs
    allowed_hosts: tuple[str, ...] = ()  # further names in Host headers; "*.name": its subdomains; "*": any

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidConfig(f"port must be 0..65535, not {self.port}")
        for name in ("max_rows", "max_body_bytes", "max_stored_responses", "max_stored_bytes"):
            _at_least(name, getattr(self, name), 1)
        _at_least("max_queue", self.max_queue, 0)
        _at_least("max_connections", self.max_connections, 1)
        for name in ("header_timeout_s", "body_timeout_s", "write_timeout_s"):
            if not getattr(self, name) > 0:  # also refuses NaN
                raise InvalidConfig(f"{name} must be above 0 seconds, not {getattr(self, name)}")
        for name in ("queue_timeout_s", "request_timeout_s"):
            if not getattr(self, name) >= 0:
                raise InvalidConfig(f"{name} must be 0 (no limit) or more seconds, not {getattr(self, name)}")
        _at_least("max_live_bytes", self.max_live_bytes, self.max_body_bytes)
        _at_least("max_live_tokens", self.max_live_tokens, 1)
        _at_least("drain_s", self.drain_s, 0)
        _at_least("step_timeout_s", self.step_timeout_s, 0)
        if self.max_tokens is not None:
            _at_least("max_tokens", self.max_tokens, 1)
        if self.keep_alive_s <= 0:
            raise InvalidConfig(f"keep_alive_s must be above 0, not {self.keep_alive_s}")
        if not self.served_model_names or not all(self.served_model_names):
            raise InvalidConfig("the served model name is empty: pass --served-model-name NAME")
        for host in self.allowed_hosts:
            if not HOST_NAME.fullmatch(host):
                raise InvalidConfig(
                    f"--allowed-hosts {host}: give a name without a scheme or a port, such as example.org or "
                    "*.example.org, or * for any"
                )
        for key in (self.api_key, self.operator_key):
            if key is not None and (not key or not key.isascii() or not key.isprintable() or " " in key):
                raise InvalidConfig("the API key must be printable ASCII without spaces, and not empty")
        if self.operator_key is not None and self.operator_key == self.api_key:
            raise InvalidConfig("--operator-key and --api-key are the same: leave --operator-key out")
        if not (self.is_loopback or self.needs_key or self.allow_public_without_key):
            raise InvalidConfig(
                f"other machines may reach {self.host}, and no API key is set. Set a key (--api-key, "
                "OUTRIDER_API_KEY or --api-keys-file), bind 127.0.0.1, or pass --allow-public-without-key."
            )

    @property
    def needs_key(self) -> bool:
        return any(given is not None for given in (self.api_key, self.operator_key, self.api_keys_file))

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False  # a host name may point to any address

    @property
    def model_name(self) -> str:
        return self.served_model_names[0]


def _at_least(name: str, value: float, minimum: float) -> None:
    if value < minimum:
        raise InvalidConfig(f"{name} must be at least {minimum}, not {value}")
