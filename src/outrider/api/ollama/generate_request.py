"""POST /api/generate: the request's JSON fields, and its translation into a ChatRequest or a bare prompt.

A field that Outrider cannot honour is an error that names the field.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from outrider.api.errors import ApiError, refused
from outrider.api.limits import JSON_VALUES, AtMost
from outrider.api.ollama.chat_request import AnswerFields, Images, parts, think_kwargs, think_limit
from outrider.api.ollama.options import format_grammar, options_params
from outrider.api.request_fields import documented
from outrider.api.thinking_fields import thinking_budget
from outrider.chat.conversation import ChatRequest, Message, TextPart
from outrider.request import SamplingDefaults, SamplingParams

IMAGE_GENERATION = "not supported: this server generates text, not images"
REFUSED = {
    "_debug_render_only": "not supported: this server does not show prompts",
    "width": IMAGE_GENERATION,
    "height": IMAGE_GENERATION,
    "steps": IMAGE_GENERATION,
}
NO_SUFFIX = "not supported: models continue prompts here and do not fill in the middle"
NO_TEMPLATE = "not supported: the model's own chat template is used. With raw: true none is used"
NO_CONTEXT = "deprecated in Ollama, and not supported: send the conversation to /api/chat"


class OllamaGenerateRequest(AnswerFields):
    prompt: str | None = Field(
        None, description="Without a prompt nothing is generated: the answer says that the model is loaded"
    )
    system: str | None = None
    images: Images | None = None
    raw: bool | None = Field(None, description="The prompt is used as it is, without the chat template")
    suffix: str | None = documented(f"Refused: {NO_SUFFIX}", maxLength=0)
    template: str | None = documented(f"Refused: {NO_TEMPLATE}", maxLength=0)
    context: Annotated[list[int], AtMost(JSON_VALUES)] | None = documented(
        f"Refused: {NO_CONTEXT}", maxItems=0
    )


def check_fields(body: OllamaGenerateRequest) -> None:
    for name, reason in (("suffix", NO_SUFFIX), ("template", NO_TEMPLATE), ("context", NO_CONTEXT)):
        if getattr(body, name):
            raise refused(name, reason)
    if body.raw and body.system:
        raise ApiError(400, "raw mode does not support template, system, or context", param="system")
    if body.raw and body.images:
        raise refused("images", "not supported with raw: true. Leave raw out, or use /api/chat")
    if body.raw and body.think:
        raise refused("think", "not supported with raw: true, where no chat template starts the thinking")


def generate_request(
    body: OllamaGenerateRequest, default_max_tokens: int | None, sampling: SamplingDefaults
) -> ChatRequest:
    system = [Message("system", (TextPart(body.system),))] if body.system else []
    return ChatRequest(
        messages=[*system, Message("user", parts(body.prompt, body.images))],
        params=options_params(
            body.options,
            default_max_tokens,
            sampling,
            logprobs=body.num_logprobs,
            thinking=think_limit(body),
        ),
        grammar=format_grammar(body.format),
        template_kwargs=think_kwargs(body),
    )


def raw_params(
    body: OllamaGenerateRequest, default_max_tokens: int | None, sampling: SamplingDefaults
) -> SamplingParams:
    """Of a bare prompt."""
    return options_params(
        body.options,
        default_max_tokens,
        sampling,
        logprobs=body.num_logprobs,
        thinking=thinking_budget(body),
        grammar=format_grammar(body.format),
    )
