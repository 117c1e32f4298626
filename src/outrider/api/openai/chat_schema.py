"""POST /v1/chat/completions: the request."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from outrider.api.decoding_schema import ChatDecoding, JsonSchema, Shape, StreamOptions


class TextPart(Shape):
    type: Literal["text"]
    text: str


class RefusalPart(Shape):
    type: Literal["refusal"]
    refusal: str


class MediaUrl(Shape):
    url: str


class ImagePart(Shape):
    type: Literal["image_url"]
    image_url: MediaUrl


class VideoPart(Shape):
    type: Literal["video_url"]
    video_url: MediaUrl


class AudioData(Shape):
    data: str = Field(description="base64")
    format: str


class AudioPart(Shape):
    type: Literal["input_audio"]
    input_audio: AudioData


UserPart = Annotated[TextPart | ImagePart | VideoPart | AudioPart, Field(discriminator="type")]
ToolPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]
AssistantPart = Annotated[TextPart | RefusalPart, Field(discriminator="type")]


class SystemMessage(Shape):
    role: Literal["system", "developer"]
    content: str | list[TextPart]
    name: str | None = None


class UserMessage(Shape):
    role: Literal["user"]
    content: str | list[UserPart]
    name: str | None = None


class CalledFunction(Shape):
    name: str
    arguments: str


class MessageToolCall(Shape):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(Shape):
    role: Literal["assistant"]
    content: str | list[AssistantPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="The same under its other name")
    refusal: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    name: str | None = None
    function_call: dict[str, Any] | None = Field(None, description="Refused: use tool_calls")
    audio: dict[str, Any] | None = Field(None, description="Refused")


class ToolMessage(Shape):
    role: Literal["tool"]
    content: str | list[ToolPart]
    tool_call_id: str
    name: str | None = None


ChatMessage = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


class FunctionSpec(Shape):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(Shape):
    type: str
    function: FunctionSpec | None = None


class NamedFunction(Shape):
    name: str


class AllowedTools(Shape):
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class ToolChoiceObject(Shape):
    type: str
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


class ResponseFormat(Shape):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Prediction(Shape):
    type: Literal["content"]
    content: str | list[TextPart]


class ChatCompletionRequest(ChatDecoding):
    model: str | None = None
    messages: list[ChatMessage] = Field(min_length=1)
    n: int | None = Field(None, ge=1, le=128)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[ToolSpec] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceObject | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None
    reasoning_effort: str | None = Field(None, description="Given to the chat template; none: no thinking")
    modalities: list[str] | None = None
    verbosity: str | None = None

    metadata: dict[str, str] | None = Field(None, description="Echoed")
    service_tier: str | None = Field(None, description="There is one tier: default")
    store: bool | None = Field(None, description="Chat completions are not stored")
    user: str | None = Field(None, description="No effect")
    safety_identifier: str | None = Field(None, description="No effect")
    prompt_cache_key: str | None = Field(None, description="No effect: caching needs no key")
    prompt_cache_retention: str | None = Field(None, description="No effect")
    prompt_cache_options: dict[str, Any] | None = Field(None, description="No effect")
