"""The address of a server with OpenAI's API, as a user gives it. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

import httpx

from outrider.config import InvalidConfig


@dataclass(frozen=True)
class ServerAddress:
    url: httpx.URL  # without /v1 and without a slash at its end
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> ServerAddress:
        """The scheme in front and /v1 at the end may be left out."""
        try:
            parsed = httpx.URL(url if "://" in url else f"http://{url}")
        except (httpx.InvalidURL, ValueError) as error:
            raise InvalidConfig(f"--url {url}: {error}") from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise InvalidConfig(f"--url {url}: not an address like http://127.0.0.1:8000")
        if parsed.userinfo or parsed.query or parsed.fragment:
            raise InvalidConfig("--url takes a host, a port and a path; a key goes into --api-key")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise InvalidConfig("--api-key has characters that an HTTP header cannot carry")
        path = parsed.path.rstrip("/").removesuffix("/v1")
        return cls(parsed.copy_with(path=path), api_key)

    def __str__(self) -> str:
        return str(self.url).rstrip("/")

    @property
    def netloc(self) -> str:
        return self.url.netloc.decode("ascii")
