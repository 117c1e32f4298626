"""Routes of OpenAI's API that this server does not have: a 404 that says what to use instead.

Not a 501: the SDKs would repeat the request. The routes are no part of /openapi.json.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Response

from outrider.api.context import ServerContext
from outrider.api.errors import ApiError

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
UNSERVED = {  # by the first part of the path
    "/v1/audio": "this server reads and writes no audio: use a speech server for speech and transcriptions",
    "/v1/images": "this server makes no images. A vision model reads them: send image_url parts to "
    "/v1/chat/completions",
    "/v1/videos": "this server makes no videos. A vision model reads them: send video_url parts to "
    "/v1/chat/completions",
    "/v1/moderations": "this server has no moderation model: ask a chat model for a classification with a "
    "response_format",
    "/v1/files": "files are not stored: send their text in the request",
    "/v1/uploads": "files are not stored: send their text in the request",
    "/v1/batches": "there are no batch jobs: send the requests at once, and they share the model's steps",
    "/v1/fine_tuning": "models are not trained by the server",
    "/v1/vector_stores": "there are no vector stores: make embeddings with /v1/embeddings and store them",
    "/v1/assistants": "the assistants API is not served: use /v1/responses or /v1/chat/completions",
    "/v1/threads": "the assistants API is not served: use /v1/responses or /v1/chat/completions",
    "/v1/conversations": "conversations are not stored: use previous_response_id of /v1/responses",
    "/v1/realtime": "the realtime API is not served: use stream: true of /v1/chat/completions",
}


def unserved_router(context: ServerContext) -> APIRouter:
    router = APIRouter()
    for path, reason in UNSERVED.items():
        for route in (path, f"{path}/{{rest:path}}"):
            router.add_api_route(route, _refusal(path, reason), methods=METHODS, include_in_schema=False)
    return router


def _refusal(path: str, reason: str) -> Callable[[], Awaitable[Response]]:
    async def refuse() -> Response:
        raise ApiError(404, f"{path} is not served: {reason}", code="not_supported")

    return refuse
