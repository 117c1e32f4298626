"""The route class of Ollama's API: bodies are JSON whatever their Content-Type says."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from starlette.datastructures import MutableHeaders

from outrider.api.body import JsonRoute, is_json

# Headers that browsers add to the requests of a web page. curl and clients do not send them.
BROWSER_HEADERS = ("origin", "sec-fetch-site", "referer")


class OllamaRoute(JsonRoute):
    """As Ollama does, takes JSON from `curl -d`, which names another Content-Type, and from nobody's page.

    A web page could forge such a request without a CORS check, so from a browser the type must be JSON.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_any_type(request: Request) -> Response:
            headers = MutableHeaders(scope=request.scope)
            is_browser = any(name in headers for name in BROWSER_HEADERS)
            if not is_browser and not is_json(headers.get("content-type", "")):
                headers["content-type"] = "application/json"
            return await handle(Request(request.scope, request.receive))

        return handle_any_type
