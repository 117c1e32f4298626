"""POST /v1/messages and /v1/messages/count_tokens: the requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from outrider.api.decoding_schema import ChatDecoding, Shape


class TextBlock(Shape):
    type: Literal["text"]
    text: str


class Source(Shape):
    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    content: str | list[TextBlock] | None = None


class ImageBlock(Shape):
    type: Literal["image"]
    source: Source


class DocumentBlock(Shape):
    type: Literal["document"]
    source: Source
    title: str | None = None
    context: str | None = None


class ThinkingBlock(Shape):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(Shape):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


ResultPart = Annotated[TextBlock | ImageBlock | DocumentBlock, Field(discriminator="type")]


class ToolResultBlock(Shape):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[ResultPart] | None = None
    is_error: bool | None = None


UserBlock = Annotated[TextBlock | ImageBlock | DocumentBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class UserMessage(Shape):
    role: Literal["user"]
    content: str | list[UserBlock]


class AssistantMessage(Shape):
    role: Literal["assistant"]
    content: str | list[AssistantBlock]


class SystemMessage(Shape):
    role: Literal["system"]
    content: str | list[TextBlock]


MessageParam = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class ToolParam(Shape):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoiceParam(Shape):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingParam(Shape):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, description="Given to the chat template as thinking_budget")
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Shape):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Shape):
    effort: str | None = Field(None, description="Given to the chat template as reasoning_effort")
    format: OutputFormat | None = None


class CountTokensRequest(ChatDecoding):
    model: str | None = None
    messages: list[MessageParam] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputConfig | None = None

    cache_control: dict[str, Any] | None = Field(
        None, description="Caching is automatic: this has it counted"
    )
    speed: str | None = Field(None, description="No effect: there is one speed")
    user_profile_id: str | None = Field(None, description="No effect")
    workspace_id: str | None = Field(None, description="No effect")


class MessagesRequest(CountTokensRequest):
    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None

    metadata: dict[str, Any] | None = Field(None, description="No effect")
    service_tier: str | None = Field(None, description="There is one tier: standard")
    inference_geo: str | None = Field(None, description="No effect")
    diagnostics: dict[str, Any] | None = Field(None, description="No effect")
