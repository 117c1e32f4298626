"""POST /v1/completions: the request."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from outrider.api.decoding_schema import Decoding, StreamOptions


def _prompt_kind(prompt: Any) -> str:
    """By its first item, so that a long list of ids is not tried as four other things first."""
    if isinstance(prompt, str):
        return "text"
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    if isinstance(first, list):
        return "lists of ids"
    return "ids" if isinstance(first, int) else "texts"


Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Tag("texts"), Field(min_length=1)]
    | Annotated[list[int], Tag("ids")]
    | Annotated[list[list[int]], Tag("lists of ids")],
    Discriminator(_prompt_kind),
]


class CompletionRequest(Decoding):
    model: str | None = None
    prompt: Prompt
    n: int | None = Field(None, ge=1, le=128)
    best_of: int | None = Field(None, description="Only as large as n")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, description="16 if not given")
    stop: str | list[str] | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    user: str | None = Field(None, description="No effect")
