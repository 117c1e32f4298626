"""Where a server with OpenAI's API is: read from what a user wrote. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from outrider.config import InvalidConfig


@dataclass(frozen=True)
class ServerAddress:
    scheme: str
    host: str
    port: int | None
    path: str  # before /v1
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> ServerAddress:
        """From a URL with or without its scheme, with or without /v1 at its end."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            raise InvalidConfig(f"--url {url}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidConfig(f"--url {url}: not an address like http://127.0.0.1:8000")
        if parts.username or parts.query or parts.fragment:
            raise InvalidConfig("--url takes a host, a port and a path; a key goes into --api-key")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise InvalidConfig("--api-key has characters that no HTTP header can carry")
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.scheme, parts.hostname, port, path, api_key)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.netloc}{self.path}"

    @property
    def netloc(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port is None else f"{host}:{self.port}"

    def headers(self, user_agent: str) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "User-Agent": user_agent}
        return headers | ({"Authorization": f"Bearer {self.api_key}"} if self.api_key else {})
