"""POST /v1/responses: the request."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from outrider.api.decoding_schema import ChatDecoding, Shape


class TextContent(Shape):
    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalContent(Shape):
    type: Literal["refusal"]
    refusal: str


class ImageContent(Shape):
    type: Literal["input_image"]
    image_url: str | None = None
    file_id: str | None = Field(None, description="Refused: no files are kept here")
    detail: str | None = None


Content = Annotated[TextContent | RefusalContent | ImageContent, Field(discriminator="type")]


class MessageItem(Shape):
    type: Literal["message"] = "message"
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Content]
    status: str | None = None


class FunctionCallItem(Shape):
    type: Literal["function_call"]
    id: str | None = None
    call_id: str
    name: str
    arguments: str
    status: str | None = None


class FunctionCallOutputItem(Shape):
    type: Literal["function_call_output"]
    id: str | None = None
    call_id: str
    output: str | list[Content]
    status: str | None = None


class ReasoningText(Shape):
    type: str
    text: str


class ReasoningItem(Shape):
    type: Literal["reasoning"]
    id: str | None = None
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: str | None = None


def _item_kind(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return "message" if kind is None else str(kind)


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_item_kind),
]


class FunctionTool(Shape):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoiceObject(Shape):
    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[dict[str, Any]] | None = None


class TextFormat(Shape):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(Shape):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Shape):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class ResponseStreamOptions(Shape):
    include_obfuscation: bool | None = None


class ResponsesRequest(ChatDecoding):
    model: str | None = None
    input: str | list[InputItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = Field(None, description="Concerns built-in tools, of which there are none")
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    stop: str | list[str] | None = Field(None, description="Extension")
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceObject | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    truncation: str | None = None
    store: bool | None = Field(None, description="Kept in memory, within a bound, unless false")

    metadata: dict[str, str] | None = Field(None, description="Echoed")
    service_tier: str | None = Field(None, description="There is one tier: default")
    user: str | None = Field(None, description="Echoed")
    safety_identifier: str | None = Field(None, description="Echoed")
    prompt_cache_key: str | None = Field(None, description="Echoed: caching needs no key")
    prompt_cache_retention: str | None = Field(None, description="No effect")
    prompt_cache_options: dict[str, Any] | None = Field(None, description="No effect")
