"""The JSON that Anthropic's routes send, for /openapi.json only: no answer is validated."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict


class AnswerText(TypedDict):
    type: Literal["text"]
    text: str


class AnswerThinking(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class AnswerToolUse(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = AnswerText | AnswerThinking | AnswerToolUse
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class ThinkingTokens(TypedDict):
    thinking_tokens: int


class MessageUsage(TypedDict):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens
    skipped_input_tokens: NotRequired[int]


class MessageAnswer(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(TypedDict):
    """Anthropic's stream events. `type` tells which of the optional fields an event has."""

    type: Literal[
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]
    message: NotRequired[MessageAnswer]
    index: NotRequired[int]
    content_block: NotRequired[AnswerBlock]
    delta: NotRequired[dict[str, Any]]
    usage: NotRequired[MessageUsage]
    error: NotRequired[dict[str, Any]]
    request_id: NotRequired[str | None]


class TokenCount(TypedDict):
    input_tokens: int
