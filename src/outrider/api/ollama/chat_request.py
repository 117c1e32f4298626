"""POST /api/chat: the request's JSON fields, and its translation into a ChatRequest.

A field that Outrider cannot honour is an error that names the field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from outrider.api.errors import ApiError, invalid
from outrider.api.keep_alive import KeepAlive
from outrider.api.limits import MESSAGES, TOOLS, AtMost, JsonObject, Name, Word
from outrider.api.ollama.options import Format, Options, format_grammar, options_params
from outrider.api.openai.chat_request import FunctionSpec
from outrider.api.request_fields import NumLogprobs, RequestModel, Whole, documented
from outrider.api.thinking_fields import thinking_budget
from outrider.api.tool_fields import callable_tools, tool_choice_of, tool_of
from outrider.chat.conversation import ChatRequest, MediaPart, Message, Part, TextPart, Tool, ToolCall
from outrider.chat.json_text import dumps
from outrider.request import NO_DEFAULTS, SamplingDefaults

REFUSED = {"_debug_render_only": "not supported: this server does not show prompts"}


def _lower(role: Any) -> Any:
    return role.lower() if isinstance(role, str) else role


Role = Annotated[Literal["system", "user", "assistant", "tool"], BeforeValidator(_lower)]
Images = Annotated[list[Annotated[str, Field(description="base64")]], AtMost(MESSAGES)]
Think = bool | Literal["low", "medium", "high", "max"]
ModelName = Annotated[Word, Field(json_schema_extra={"minLength": 1})]


class OllamaMessageFunction(RequestModel):
    name: Name
    arguments: JsonObject = Field(default_factory=dict)


class MessageToolCall(RequestModel):
    id: Word | None = None
    function: OllamaMessageFunction


class OllamaMessage(RequestModel):
    role: Role
    content: str | None = None
    thinking: str | None = Field(None, description="Of an assistant's message")
    images: Images | None = None
    tool_calls: Annotated[list[MessageToolCall], AtMost(MESSAGES)] | None = Field(
        None, description="Of an assistant's message"
    )
    tool_name: Word | None = Field(None, description="Of a tool's message: the tool that gave the result")
    tool_call_id: Word | None = Field(None, description="Of a tool's message: the call that it answers")


class OllamaTool(RequestModel):
    model_config = ConfigDict(json_schema_extra=tool_of(None, "function", require="function"))

    type: Word | None = Field(None, description="function; tools of other types are left out")
    function: FunctionSpec | None = None


class AnswerFields(RequestModel):
    """Fields of chat and generate."""

    model: ModelName
    stream: bool | None = Field(None, description="Default: true")
    format: Format | None = Field(None, description='"json", or a JSON schema')
    options: Options | None = None
    think: Think | None = Field(None, description="Default: what the model's chat template does")
    thinking_token_budget: Whole | None = documented(
        "Extension: most tokens of reasoning; at the limit its end is forced. -1: no limit", minimum=-1
    )
    max_thinking_tokens: Whole | None = documented(
        "Extension: another name of thinking_token_budget", minimum=-1
    )
    keep_alive: KeepAlive | None = Field(
        None, description="How long the model stays loaded after its last use"
    )
    adapter: Word | None = Field(
        None, description="Extension: a loaded adapter; the model's name may also be base:adapter"
    )
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = Field(None, description="Only with logprobs")
    truncate: bool | None = Field(None, description="No effect: a prompt that is too long is refused")
    shift: bool | None = Field(None, description="No effect: an answer ends where the context is full")

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to each token. None: no log-probabilities are asked for."""
        return (self.top_logprobs or 0) if self.logprobs else None


class OllamaChatRequest(AnswerFields):
    messages: Annotated[list[OllamaMessage], AtMost(MESSAGES)] | None = Field(
        None, description="Without messages nothing is generated: the answer says that the model is loaded"
    )
    tools: Annotated[list[OllamaTool], AtMost(TOOLS)] | None = None


# -- translation -----------------------------------------------------------------------------------------


def chat_request(
    body: OllamaChatRequest,
    default_max_tokens: int | None = None,
    sampling: SamplingDefaults = NO_DEFAULTS,
) -> ChatRequest:
    """`default_max_tokens`, `sampling`: for requests that leave the values out."""
    tools = [_tool(i, tool) for i, tool in callable_tools(body.tools, None, "function")]
    messages = _messages(body.messages or ())
    kwargs = think_kwargs(body)
    if messages and messages[-1].role == "assistant" and not messages[-1].tool_calls:
        kwargs["continue_final_message"] = True
    return ChatRequest(
        messages=messages,
        params=options_params(
            body.options,
            default_max_tokens,
            sampling,
            logprobs=body.num_logprobs,
            thinking=think_limit(body),
        ),
        tools=tools,
        tool_choice=tool_choice_of(tools, None),
        grammar=format_grammar(body.format),
        template_kwargs=kwargs,
    )


def think_kwargs(body: AnswerFields) -> dict[str, Any]:
    """Variables for the chat template."""
    found: dict[str, Any] = {}
    if isinstance(body.think, str):
        found = {"enable_thinking": True, "reasoning_effort": body.think}
    elif body.think is not None:
        found = {"enable_thinking": body.think}
    if (budget := thinking_budget(body)) is not None:
        found["thinking_budget"] = budget
    return found


def think_limit(body: AnswerFields) -> int | None:
    """Most tokens of reasoning. What the template cannot switch off is ended at once."""
    return thinking_budget(body, 0 if body.think is False else None)


def check_thinks(think: Think | None, model: str, thinks: bool | None) -> None:
    """`thinks`: whether the model reasons; None: not known."""
    if think and thinks is False:
        raise ApiError(400, f'"{model}" does not support thinking', param="think")


def _tool(index: int, tool: OllamaTool) -> Tool:
    if tool.function is None:
        raise invalid(f"tools[{index}].function", "is missing")
    function = tool.function
    return Tool(function.name, function.description or "", function.parameters or {}, strict=function.strict)


def parts(text: str | None, images: Sequence[str] | None) -> tuple[Part, ...]:
    """The images come first, as Ollama places them. They are data, never addresses."""
    media = [MediaPart("image", f"data:;base64,{image}") for image in images or ()]
    return (*media, TextPart(text)) if text else tuple(media)


def _messages(messages: Sequence[OllamaMessage]) -> list[Message]:
    found: list[Message] = []
    unanswered: list[ToolCall] = []
    num_calls = 0
    for message in messages:
        content = parts(message.content, message.images)
        if message.role == "tool":
            call_id = _answered_call(message, unanswered)
            found.append(Message("tool", content, tool_call_id=call_id, name=message.tool_name))
        elif message.role == "assistant":
            calls = _calls(message, num_calls)
            num_calls += len(calls)
            unanswered += calls
            found.append(Message("assistant", content, message.thinking or None, tuple(calls)))
        else:
            found.append(Message(message.role, content))
    return found


def _calls(message: OllamaMessage, num_before: int) -> list[ToolCall]:
    """Clients of Ollama may drop the ids of calls: such calls are numbered, the same in every turn."""
    return [
        ToolCall(call.id or f"call_{i}", call.function.name, dumps(call.function.arguments))
        for i, call in enumerate(message.tool_calls or (), num_before)
    ]


def _answered_call(message: OllamaMessage, unanswered: list[ToolCall]) -> str | None:
    """The id of the call that a tool's message answers: the named one, or the first of its tool, or any."""
    if message.tool_call_id is not None:
        unanswered[:] = [call for call in unanswered if call.id != message.tool_call_id]
        return message.tool_call_id
    of_tool = [call for call in unanswered if call.name == message.tool_name]
    answered = next(iter(of_tool or unanswered), None)
    if answered is None:
        return None
    unanswered.remove(answered)
    return answered.id
