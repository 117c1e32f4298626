"""POST /v1/responses: the request's JSON fields, and its translation into a ChatRequest.

A field that Outrider cannot honour is an error that names the field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from outrider.answer_form import Grammar
from outrider.api.errors import refused
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
from outrider.api.openai.chat_request import AudioData
from outrider.api.openai.responses_tools import (
    ResponseTool,
    ResponseToolChoice,
    choose,
    joined_name,
    tools_of,
)
from outrider.api.request_fields import (
    NOT_NULL,
    ChatFields,
    NumLogprobs,
    RequestModel,
    Whole,
    check_verbosity,
    documented,
    format_grammar,
    grammar_of,
    one_of_types,
    sampling_params,
    template_kwargs,
)
from outrider.api.thinking_fields import effort_limit
from outrider.chat.conversation import (
    ChatRequest,
    MediaPart,
    Message,
    Part,
    Role,
    TextPart,
    ToolCall,
)
from outrider.request import SamplingDefaults

LOGPROBS = "message.output_text.logprobs"
# Reasoning is returned as plain text and read back as plain text, so no encrypted copy is needed.
INCLUDABLE = {LOGPROBS, "reasoning.encrypted_content"}
Includable = Annotated[Word, Field(json_schema_extra={"enum": sorted(INCLUDABLE)})]


class InputTextContent(RequestModel):
    type: Literal["input_text", "output_text", "text"]
    text: str


class InputRefusalContent(RequestModel):
    type: Literal["refusal"]
    refusal: str


class InputImageContent(RequestModel):
    model_config = ConfigDict(json_schema_extra={"required": ["type", "image_url"]})

    type: Literal["input_image"]
    image_url: str | None = documented(**NOT_NULL)
    file_id: Word | None = Field(None, description="No effect: this server stores no files")
    detail: Word | None = None


class InputVideoContent(RequestModel):
    type: Literal["input_video"]
    video_url: str


class InputAudioContent(RequestModel):
    type: Literal["input_audio"]
    input_audio: AudioData


InputContent = Annotated[
    InputTextContent | InputRefusalContent | InputImageContent | InputVideoContent | InputAudioContent,
    Field(discriminator="type"),
]


class MessageItem(RequestModel):
    type: Literal["message"] = "message"
    id: Word | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[InputContent], AtMost(MESSAGES)]
    status: Word | None = None


class FunctionCallItem(RequestModel):
    type: Literal["function_call"]
    id: Word | None = None
    call_id: Word
    name: Name
    namespace: Name | None = None
    arguments: str
    status: Word | None = None


class FunctionCallOutputItem(RequestModel):
    type: Literal["function_call_output"]
    id: Word | None = None
    call_id: Word
    output: str | Annotated[list[InputContent], AtMost(MESSAGES)]
    status: Word | None = None


class ReasoningText(RequestModel):
    type: Word
    text: str


class ReasoningItem(RequestModel):
    type: Literal["reasoning"]
    id: Word | None = None
    summary: Annotated[list[ReasoningText], AtMost(MESSAGES)] | None = None
    content: Annotated[list[ReasoningText], AtMost(MESSAGES)] | None = None
    encrypted_content: str | None = None
    status: Word | None = None


class ItemReference(RequestModel):
    """An output item of a stored response, by its id. `Responses` replaces it by the item."""

    type: Literal["item_reference"]
    id: Word


def _item_kind(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return "message" if kind is None else str(kind)


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_item_kind),
]


class ResponseTextFormat(RequestModel):
    model_config = ConfigDict(json_schema_extra=one_of_types(text=[], json_object=[], json_schema=["schema"]))

    type: Literal["text", "json_object", "json_schema"]
    name: Word | None = None
    description: str | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseTextConfig(RequestModel):
    format: ResponseTextFormat | None = None
    verbosity: Word | None = documented(enum=["medium", None])


class ReasoningConfig(RequestModel):
    effort: Word | None = None
    summary: Word | None = documented(enum=["auto", None])
    generate_summary: Word | None = documented(enum=["auto", None])
    context: Word | None = documented(enum=["auto", None])
    mode: Word | None = documented(enum=["standard", None])


class ResponseStreamOptions(RequestModel):
    include_obfuscation: bool | None = documented("Not supported", enum=[False, None])


class ResponsesRequest(ChatFields):
    model: Word | None = None
    input: str | Annotated[list[InputItem], AtMost(MESSAGES)]
    instructions: str | None = None
    previous_response_id: Word | None = None
    max_output_tokens: Whole | None = documented(minimum=1)
    max_tool_calls: Whole | None = Field(
        None, description="No effect: it limits built-in tools, and there are none"
    )
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    stop: StopStrings | None = Field(None, description="Extension")
    tools: Annotated[list[ResponseTool], AtMost(TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: ResponseTextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: Annotated[list[Includable], AtMost(OPTIONS)] | None = None
    top_logprobs: NumLogprobs | None = None
    truncation: Word | None = documented(enum=["disabled", None])
    store: bool | None = Field(None, description="Stored in memory, up to a limit, unless false")

    metadata: Metadata | None = Field(None, description="Echoed")
    service_tier: Word | None = Field(None, description="There is one tier: default")
    user: Word | None = Field(None, description="Echoed")
    safety_identifier: Word | None = Field(None, description="Echoed")
    prompt_cache_key: Word | None = Field(None, description="Echoed; no effect: caching needs no key")
    prompt_cache_retention: Word | None = Field(None, description="No effect")
    prompt_cache_options: JsonObject | None = Field(None, description="No effect")


# -- translation -----------------------------------------------------------------------------------------


def response_request(
    body: ResponsesRequest,
    messages: Sequence[Message],
    default_max_tokens: int | None,
    sampling: SamplingDefaults,
) -> ChatRequest:
    """`messages`: the whole conversation, with the input of this request at its end.

    `default_max_tokens`, `sampling`: for requests that leave the values out.
    """
    _check_options(body)
    tools, choice = choose(tools_of(body.tools), body.tool_choice)
    effort = body.reasoning.effort if body.reasoning else None
    max_tokens = default_max_tokens if body.max_output_tokens is None else body.max_output_tokens
    params = sampling_params(
        body,
        sampling,
        max_tokens=max_tokens,
        stop=body.stop,
        logprobs=_logprobs(body),
        thinking=effort_limit(effort),
    )
    instructions = [Message("system", (TextPart(body.instructions),))] if body.instructions else []
    return ChatRequest(
        messages=[*instructions, *messages],
        params=params,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        grammar=grammar_of(body, ("text.format", _format(body.text))),
        template_kwargs=template_kwargs(body, effort),
    )


def _check_options(body: ResponsesRequest) -> None:
    check_stops("stop", body.stop)
    for name in body.include or ():
        if name not in INCLUDABLE:
            raise refused("include", f"{name!r} is not supported")
    if body.truncation not in (None, "disabled"):
        raise refused("truncation", "only 'disabled' is supported: prompts are never truncated")
    if body.stream_options and body.stream_options.include_obfuscation:
        raise refused("stream_options.include_obfuscation", "not supported: events are not padded")
    check_verbosity("text.verbosity", body.text.verbosity if body.text else None)
    _check_reasoning(body.reasoning)


def _check_reasoning(reasoning: ReasoningConfig | None) -> None:
    if reasoning is None:
        return
    for name in ("summary", "generate_summary"):
        if getattr(reasoning, name) not in (None, "auto"):
            raise refused(
                f"reasoning.{name}", "only 'auto' is supported: reasoning is returned in full, not summarised"
            )
    if reasoning.context not in (None, "auto"):
        raise refused(
            "reasoning.context",
            "not supported: the chat template decides which earlier reasoning the prompt contains",
        )
    if reasoning.mode not in (None, "standard"):
        raise refused("reasoning.mode", "only 'standard' is supported")


def _logprobs(body: ResponsesRequest) -> int | None:
    if body.top_logprobs is None and LOGPROBS not in (body.include or ()):
        return None
    return body.top_logprobs or 0


def _format(text: ResponseTextConfig | None) -> Grammar | None:
    if text is None or text.format is None:
        return None
    return format_grammar("text.format", text.format.type, text.format.schema_)


def input_messages(given: str | Sequence[InputItem]) -> list[Message]:
    """Input items as messages. Consecutive reasoning, text and calls of the assistant become one message."""
    if isinstance(given, str):
        return [Message("user", (TextPart(given),))]
    messages: list[Message] = []
    turn = _AssistantTurn()
    for i, item in enumerate(given):
        if not turn.add(item, f"input[{i}]"):
            messages += turn.end()
            messages.append(_other_message(item, f"input[{i}]"))
    return [*messages, *turn.end()]


def input_items(given: str | Sequence[InputItem]) -> list[dict[str, Any]]:
    """The items in the form that GET /v1/responses/{id}/input_items returns."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    return [item.model_dump(exclude_none=True) for item in given]


class _AssistantTurn:
    """Collects consecutive items of the assistant."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._reasoning: list[str] = []
        self._content: list[Part] = []
        self._calls: list[ToolCall] = []

    def add(self, item: Any, where: str) -> bool:
        """Add the item if it is the assistant's. Returns False for any other item."""
        if isinstance(item, ReasoningItem):
            self._reasoning += [part.text for part in item.content or item.summary or ()]
        elif isinstance(item, FunctionCallItem):
            self._calls.append(ToolCall(item.call_id, joined_name(item.namespace, item.name), item.arguments))
        elif isinstance(item, MessageItem) and item.role == "assistant":
            self._content += _parts(item.content, where)
        else:
            return False
        return True

    def end(self) -> list[Message]:
        """The collected message, if there is one; the next turn starts empty."""
        reasoning = "".join(self._reasoning) or None
        message = Message("assistant", tuple(self._content), reasoning, tuple(self._calls))
        is_empty = not (self._content or self._calls or reasoning)
        self._clear()
        return [] if is_empty else [message]


def _other_message(item: Any, where: str) -> Message:
    if isinstance(item, FunctionCallOutputItem):
        return Message("tool", tuple(_parts(item.output, where)), tool_call_id=item.call_id)
    role: Role = "user" if item.role == "user" else "system"
    return Message(role, tuple(_parts(item.content, where)))


def _parts(content: str | Sequence[Any], where: str) -> list[Part]:
    if isinstance(content, str):
        return [TextPart(content)] if content else []
    return [_part(part, where) for part in content]


def _part(part: Any, where: str) -> Part:
    if isinstance(part, InputTextContent):
        return TextPart(part.text)
    if isinstance(part, InputRefusalContent):
        return TextPart(part.refusal)
    if isinstance(part, InputVideoContent):
        return MediaPart("video", part.video_url)
    if isinstance(part, InputAudioContent):
        return part.input_audio.media_part()
    if part.image_url is None:
        raise refused(f"{where}.content", "an image needs an image_url: this server stores no files")
    return MediaPart("image", part.image_url)
