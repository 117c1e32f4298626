"""OpenAI's responses request in canonical form. What cannot be honoured is refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.api.errors import invalid, refused
from outrider.api.openai import responses_schema as schema
from outrider.api.openai.chat_input import allowed_tools, check_verbosity, named_tool, plain_choice
from outrider.api.params import check_stop, format_grammar, grammar_of, sampling_params, template_kwargs
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
from outrider.request import Grammar

LOGPROBS = "message.output_text.logprobs"
# Reasoning is given as text, which goes back as text: nothing is encrypted, and nothing is lost without.
INCLUDABLE = {LOGPROBS, "reasoning.encrypted_content"}


def response_request(
    body: schema.ResponsesRequest, messages: Sequence[Message], default_max_tokens: int | None
) -> ChatRequest:
    """`messages`: the conversation so far, this request's input included."""
    _check_options(body)
    tools = [_tool(i, tool) for i, tool in enumerate(body.tools or ())]
    tools, choice = _choose(tools, body.tool_choice)
    effort = body.reasoning.effort if body.reasoning else None
    max_tokens = default_max_tokens if body.max_output_tokens is None else body.max_output_tokens
    opening = [Message("system", (TextPart(body.instructions),))] if body.instructions else []
    return ChatRequest(
        messages=[*opening, *messages],
        params=sampling_params(body, max_tokens=max_tokens, stop=body.stop, logprobs=_logprobs(body)),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        grammar=grammar_of(body, ("text.format", _format(body.text))),
        template_kwargs=template_kwargs(body, effort),
    )


def _check_options(body: schema.ResponsesRequest) -> None:
    check_stop(body.stop)
    for name in body.include or ():
        if name not in INCLUDABLE:
            raise refused("include", f"{name!r} is not supported")
    if body.truncation not in (None, "disabled"):
        raise refused("truncation", "prompts are never cut: only 'disabled' is supported")
    if body.stream_options and body.stream_options.include_obfuscation:
        raise refused("stream_options.include_obfuscation", "events are not padded here")
    check_verbosity("text.verbosity", body.text.verbosity if body.text else None)
    _check_reasoning(body.reasoning)


def _check_reasoning(reasoning: schema.Reasoning | None) -> None:
    if reasoning is None:
        return
    for name in ("summary", "generate_summary"):
        if getattr(reasoning, name) not in (None, "auto"):
            raise refused(f"reasoning.{name}", "reasoning is given whole, not summarised: leave it 'auto'")
    if reasoning.context not in (None, "auto"):
        raise refused("reasoning.context", "the chat template decides which reasoning the model sees again")
    if reasoning.mode not in (None, "standard"):
        raise refused("reasoning.mode", "there is one mode: standard")


def _logprobs(body: schema.ResponsesRequest) -> int | None:
    if body.top_logprobs is None and LOGPROBS not in (body.include or ()):
        return None
    return body.top_logprobs or 0


def _format(text: schema.TextConfig | None) -> Grammar | None:
    if text is None or text.format is None:
        return None
    return format_grammar("text.format", text.format.type, text.format.schema_)


def _tool(index: int, tool: schema.FunctionTool) -> Tool:
    if tool.type != "function":
        raise refused(f"tools[{index}]", f"tools of type {tool.type!r} are not supported, only functions")
    if tool.name is None:
        raise invalid(f"tools[{index}].name", "is missing")
    return Tool(tool.name, tool.description or "", tool.parameters or {}, strict=bool(tool.strict))


def _choose(tools: list[Tool], choice: str | schema.ToolChoiceObject | None) -> tuple[list[Tool], ToolChoice]:
    if isinstance(choice, schema.ToolChoiceObject):
        if choice.type == "function" and choice.name is not None:
            return tools, named_tool(tools, choice.name)
        if choice.type == "allowed_tools" and choice.tools is not None:
            names = [tool.get("name") for tool in choice.tools]
            return allowed_tools(tools, names, choice.mode or "auto")
        raise refused("tool_choice", f"choices of type {choice.type!r} are not supported")
    return tools, plain_choice(tools, choice)


# -- items -----------------------------------------------------------------------------------------------


def input_messages(given: str | Sequence[schema.InputItem]) -> list[Message]:
    """Items as messages. What an assistant thought, said and called in a row is one message."""
    if isinstance(given, str):
        return [Message("user", (TextPart(given),))]
    messages: list[Message] = []
    turn = _Turn()
    for i, item in enumerate(given):
        if turn.take(item, f"input[{i}]"):
            continue
        messages += turn.end()
        messages.append(_other(item, f"input[{i}]"))
    return [*messages, *turn.end()]


def input_items(given: str | Sequence[schema.InputItem]) -> list[dict[str, Any]]:
    """The items as they were given, for whoever asks for them later."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    return [item.model_dump(exclude_none=True) for item in given]


class _Turn:
    """The assistant's items since the last message of anyone else."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._reasoning: list[str] = []
        self._content: list[Part] = []
        self._calls: list[ToolCall] = []

    def take(self, item: Any, where: str) -> bool:
        """Whether the item is the assistant's."""
        if isinstance(item, schema.ReasoningItem):
            self._reasoning += [part.text for part in item.content or item.summary or ()]
        elif isinstance(item, schema.FunctionCallItem):
            self._calls.append(ToolCall(item.call_id, item.name, item.arguments))
        elif isinstance(item, schema.MessageItem) and item.role == "assistant":
            self._content += _parts(item.content, where)
        else:
            return False
        return True

    def end(self) -> list[Message]:
        reasoning = "".join(self._reasoning) or None
        message = Message("assistant", tuple(self._content), reasoning, tuple(self._calls))
        is_empty = not (self._content or self._calls or reasoning)
        self._clear()
        return [] if is_empty else [message]


def _other(item: Any, where: str) -> Message:
    if isinstance(item, schema.FunctionCallOutputItem):
        return Message("tool", tuple(_parts(item.output, where)), tool_call_id=item.call_id)
    role: Role = "user" if item.role == "user" else "system"
    return Message(role, tuple(_parts(item.content, where)))


def _parts(content: str | Sequence[Any], where: str) -> list[Part]:
    if isinstance(content, str):
        return [TextPart(content)] if content else []
    return [_part(part, where) for part in content]


def _part(part: Any, where: str) -> Part:
    if isinstance(part, schema.TextContent):
        return TextPart(part.text)
    if isinstance(part, schema.RefusalContent):
        return TextPart(part.refusal)
    if part.image_url is None:
        raise refused(f"{where}.content", "pictures need an image_url: no files are kept here")
    return MediaPart("image", part.image_url)
