"""POST /v1/chat/completions: the request's JSON fields, and its translation into a ChatRequest.

A field that Outrider cannot honour is an error that names the field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from outrider.answer_form import Grammar
from outrider.api.errors import invalid, refused
from outrider.api.limits import (
    MESSAGES,
    OPTIONS,
    TOOLS,
    AtMost,
    JsonObject,
    Metadata,
    Name,
    StopStrings,
    Word,
    check_stops,
)
from outrider.api.request_fields import (
    NOT_NULL,
    ChatFields,
    NumAnswers,
    NumLogprobs,
    RequestModel,
    StreamOptions,
    Whole,
    check_stream_options,
    check_verbosity,
    documented,
    format_grammar,
    grammar_of,
    one_of_types,
    sampling_params,
    template_kwargs,
)
from outrider.api.thinking_fields import effort_limit
from outrider.api.tool_fields import (
    ToolName,
    allowed_functions,
    callable_tools,
    keep_allowed,
    named_tool,
    tool_choice_of,
    tool_of,
)
from outrider.chat.conversation import (
    ChatRequest,
    MediaPart,
    Message,
    Part,
    Role,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
)
from outrider.request import NO_DEFAULTS, SamplingDefaults


class ChatTextPart(RequestModel):
    type: Literal["text"]
    text: str


class ChatRefusalPart(RequestModel):
    type: Literal["refusal"]
    refusal: str


class MediaUrl(RequestModel):
    url: str


class ChatImagePart(RequestModel):
    type: Literal["image_url"]
    image_url: MediaUrl


class ChatVideoPart(RequestModel):
    type: Literal["video_url"]
    video_url: MediaUrl


class AudioData(RequestModel):
    """Refused: this server reads no audio."""

    data: str = Field(description="base64")
    format: Word

    def media_part(self) -> MediaPart:
        return MediaPart("audio", f"data:audio/{self.format};base64,{self.data}")


class ChatAudioPart(RequestModel):
    type: Literal["input_audio"]
    input_audio: AudioData


UserPart = Annotated[
    ChatTextPart | ChatImagePart | ChatVideoPart | ChatAudioPart, Field(discriminator="type")
]
ToolPart = Annotated[ChatTextPart | ChatImagePart | ChatVideoPart, Field(discriminator="type")]
AssistantPart = Annotated[ChatTextPart | ChatRefusalPart, Field(discriminator="type")]


class ChatSystemMessage(RequestModel):
    role: Literal["system", "developer"]
    content: str | Annotated[list[ChatTextPart], AtMost(MESSAGES)]
    name: Word | None = None


class ChatUserMessage(RequestModel):
    role: Literal["user"]
    content: str | Annotated[list[UserPart], AtMost(MESSAGES)]
    name: Word | None = None


class ChatFunctionCall(RequestModel):
    name: Name
    arguments: str


class ChatToolCall(RequestModel):
    id: Word
    type: Literal["function"] = "function"
    function: ChatFunctionCall


class ChatAssistantMessage(RequestModel):
    role: Literal["assistant"]
    content: str | Annotated[list[AssistantPart], AtMost(MESSAGES)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="Another name of reasoning_content")
    refusal: str | None = None
    tool_calls: Annotated[list[ChatToolCall], AtMost(MESSAGES)] | None = None
    name: Word | None = None
    function_call: JsonObject | None = documented("Refused: use tool_calls", type="null")
    audio: JsonObject | None = documented("Refused", type="null")


class ChatToolMessage(RequestModel):
    role: Literal["tool"]
    content: str | Annotated[list[ToolPart], AtMost(MESSAGES)]
    tool_call_id: Word
    name: Word | None = None


ChatMessage = Annotated[
    ChatSystemMessage | ChatUserMessage | ChatAssistantMessage | ChatToolMessage, Field(discriminator="role")
]


class FunctionSpec(RequestModel):
    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ToolSpec(RequestModel):
    model_config = ConfigDict(json_schema_extra=tool_of("function", require="function"))

    type: Word = Field(description="function; tools of other types are left out")
    function: FunctionSpec | None = None


class NamedFunction(RequestModel):
    name: Name


class AllowedTools(RequestModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[JsonObject], AtMost(TOOLS)]


class ChatToolChoice(RequestModel):
    model_config = ConfigDict(
        json_schema_extra=one_of_types(function=["function"], allowed_tools=["allowed_tools"])
    )

    type: Word
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


class JsonSchema(RequestModel):
    model_config = ConfigDict(json_schema_extra={"required": ["schema"]})

    name: Word | None = None
    description: str | None = None
    schema_: JsonObject | None = Field(None, alias="schema", json_schema_extra=NOT_NULL)
    strict: bool | None = None


class ResponseFormat(RequestModel):
    model_config = ConfigDict(
        json_schema_extra=one_of_types(text=[], json_object=[], json_schema=["json_schema"])
    )

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Prediction(RequestModel):
    type: Literal["content"]
    content: str | Annotated[list[ChatTextPart], AtMost(MESSAGES)]


class ChatCompletionRequest(ChatFields):
    model: Word | None = None
    messages: Annotated[list[ChatMessage], AtMost(MESSAGES)] = Field(min_length=1)
    n: NumAnswers | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Whole | None = documented("The deprecated name of max_completion_tokens", minimum=1)
    max_completion_tokens: Whole | None = documented(minimum=1)
    stop: StopStrings | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = Field(None, description="Needs logprobs: true")
    return_token_origins: bool | None = Field(
        None, description="Extension: say of each token whether it was a draft, and of which kind"
    )
    return_progress: bool | None = Field(
        None, description="Extension: chunks with prompt_progress while the prompt is computed; needs stream"
    )
    tools: Annotated[list[ToolSpec], AtMost(TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None
    reasoning_effort: Word | None = Field(
        None, description="For the chat template, or a limit of the reasoning's tokens; none: no thinking"
    )
    modalities: Annotated[list[Word], AtMost(OPTIONS)] | None = documented(enum=[["text"], None])
    verbosity: Word | None = documented(enum=["medium", None])

    metadata: Metadata | None = Field(None, description="Echoed")
    service_tier: Word | None = Field(None, description="There is one tier: default")
    store: bool | None = Field(None, description="Chat completions are not stored")
    user: Word | None = Field(None, description="No effect")
    safety_identifier: Word | None = Field(None, description="No effect")
    prompt_cache_key: Word | None = Field(None, description="No effect: caching needs no key")
    prompt_cache_retention: Word | None = Field(None, description="No effect")
    prompt_cache_options: JsonObject | None = Field(None, description="No effect")


# -- translation -----------------------------------------------------------------------------------------


def chat_request(
    body: ChatCompletionRequest,
    default_max_tokens: int | None = None,
    sampling: SamplingDefaults = NO_DEFAULTS,
) -> ChatRequest:
    """`default_max_tokens`, `sampling`: for requests that leave the values out."""
    _check_options(body)
    tools = [_tool(i, tool) for i, tool in callable_tools(body.tools, "function")]
    tools, choice = _choose(tools, body.tool_choice)
    params = sampling_params(
        body,
        sampling,
        max_tokens=_max_tokens(body, default_max_tokens),
        stop=body.stop,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        token_origins=bool(body.return_token_origins),
        prompt_progress=bool(body.return_progress),
        thinking=effort_limit(body.reasoning_effort),
    )
    prediction = None if body.prediction is None else body.prediction.content
    if isinstance(prediction, list):
        prediction = "".join(part.text for part in prediction)
    return ChatRequest(
        messages=[_message(i, message) for i, message in enumerate(body.messages)],
        params=params,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        grammar=grammar_of(body, ("response_format", _format(body.response_format))),
        prediction=prediction,
        template_kwargs=template_kwargs(body, body.reasoning_effort),
    )


def _check_options(body: ChatCompletionRequest) -> None:
    check_stops("stop", body.stop)
    check_stream_options(body.stream_options, body.stream)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "needs logprobs: true")
    if body.modalities not in (None, ["text"]):
        raise refused("modalities", "this server answers in text only")
    check_verbosity("verbosity", body.verbosity)
    if body.return_progress and not body.stream:
        raise invalid("return_progress", "is allowed only with stream: true")


def _max_tokens(body: ChatCompletionRequest, default: int | None) -> int | None:
    given = {value for value in (body.max_tokens, body.max_completion_tokens) if value is not None}
    if len(given) > 1:
        raise invalid("max_completion_tokens", "differs from max_tokens, its deprecated name: send only one")
    return given.pop() if given else default


def _format(response_format: ResponseFormat | None) -> Grammar | None:
    if response_format is None:
        return None
    inner = response_format.json_schema
    schema = inner.schema_ if inner else None
    return format_grammar("response_format", response_format.type, schema, where="json_schema.schema")


def _tool(index: int, tool: ToolSpec) -> Tool:
    if tool.function is None:
        raise invalid(f"tools[{index}].function", "is missing")
    function = tool.function
    return Tool(function.name, function.description or "", function.parameters or {}, strict=function.strict)


def _choose(tools: list[Tool], choice: str | ChatToolChoice | None) -> tuple[list[Tool], ToolChoice]:
    """The tools that the prompt shows, and the choice among them."""
    if isinstance(choice, ChatToolChoice):
        if choice.type == "function" and choice.function is not None:
            return tools, named_tool(tools, choice.function.name)
        if choice.type == "allowed_tools" and choice.allowed_tools is not None:
            functions = [tool.get("function") for tool in allowed_functions(choice.allowed_tools.tools)]
            names = [function.get("name") if isinstance(function, dict) else None for function in functions]
            return keep_allowed(tools, names, choice.allowed_tools.mode)
        raise refused("tool_choice", f"choices of type {choice.type!r} are not supported")
    return tools, tool_choice_of(tools, choice)


def _message(index: int, message: ChatMessage) -> Message:
    if isinstance(message, ChatAssistantMessage):
        return _assistant(index, message)
    if isinstance(message, ChatToolMessage):
        content = _parts(message.content)
        return Message("tool", content, tool_call_id=message.tool_call_id, name=message.name)
    role: Role = "system" if isinstance(message, ChatSystemMessage) else "user"
    return Message(role, _parts(message.content), name=message.name)


def _assistant(index: int, message: ChatAssistantMessage) -> Message:
    for name in ("function_call", "audio"):
        if getattr(message, name) is not None:
            raise refused(f"messages[{index}].{name}", "not supported")
    calls = [
        ToolCall(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()
    ]
    content = _parts(message.content or "")
    if message.refusal and not content:
        content = (TextPart(message.refusal),)
    reasoning = message.reasoning_content or message.reasoning
    return Message("assistant", content, reasoning=reasoning, tool_calls=tuple(calls), name=message.name)


def _parts(content: str | Sequence[Any]) -> tuple[Part, ...]:
    if isinstance(content, str):
        return (TextPart(content),) if content else ()
    return tuple(_part(part) for part in content)


def _part(part: Any) -> Part:
    match part:
        case ChatTextPart():
            return TextPart(part.text)
        case ChatRefusalPart():
            return TextPart(part.refusal)
        case ChatImagePart():
            return MediaPart("image", part.image_url.url)
        case ChatVideoPart():
            return MediaPart("video", part.video_url.url)
        case _:
            return part.input_audio.media_part()
