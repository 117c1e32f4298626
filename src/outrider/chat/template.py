"""Owns the way from a conversation to a prompt, through the tokenizer's own chat template.

Must not know what the answer will look like. A conversation is rendered as it is; only if the template
rejects it, or loses what the system said, are changes tried (see messages).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

from jinja2 import Environment, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables

from outrider.chat.conversation import MediaPart, Message, PicturePart, TextPart, Tool, ToolCall
from outrider.chat.guard import Guard
from outrider.chat.json_text import loads
from outrider.chat.messages import names_of_calls, variants
from outrider.chat.vocabulary import Vocabulary
from outrider.media.image_reader import ReadPicture
from outrider.request import InvalidRequest

# What the template gets from us, or what would let a client do more than fill in a template.
RESERVED = frozenset(
    {
        "conversation",
        "messages",
        "tools",
        "chat_template",
        "tokenize",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)

PROBE = "outrider"  # what a message says when a template is tried out

ArgumentsAs = Literal["mapping", "text"]


@dataclass(frozen=True)
class Rendered:
    ids: tuple[int, ...]
    text: str
    pictures: tuple[ReadPicture, ...] = ()  # in the order in which the prompt shows them


class ChatTemplate:
    """`spared`: special tokens that an assistant's turns may hold, since the template looks for them.

    `placeholder`: what the template writes for a picture; None for a model that reads text only, with the
    reason in `blind` where it could read them elsewhere.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocabulary: Vocabulary,
        spared: Sequence[str] = (),
        placeholder: str | None = None,
        no_images_reason: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._placeholder = placeholder
        self._no_images_reason = no_images_reason
        self._vocabulary = vocabulary
        self.source = template_source(tokenizer)
        self._exists = bool(self.source) or bool(getattr(tokenizer, "has_chat_template", False))
        # What a client's words must not turn into: special tokens, and those that the template writes.
        written = {token for token in vocabulary.added if token in self.source and not token.isspace()}
        self._guarded = vocabulary.special | written
        self._spared = frozenset(spared) | (written - vocabulary.special)

    @property
    def mentions_tools(self) -> bool:
        """A template that is not Jinja is a model's own code, which knows its tools."""
        return not self.source or "tools" in _variables(self.source)

    @cached_property
    def _takes_lists_only(self) -> bool:
        """Some vision templates look for parts and would drop a message that is a string."""
        if self._placeholder is None:
            return False
        lists = [{"type": "text", "text": PROBE}]
        return not self._shows(PROBE) and self._shows(lists)

    def _shows(self, content: Any) -> bool:
        try:
            return PROBE in self._tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], tokenize=False
            )
        except Exception:  # a template raises what it likes
            return False

    @property
    def has_thinking_switch(self) -> bool:
        return "enable_thinking" in _variables(self.source)

    @property
    def _calls_switch_thinking(self) -> bool:
        """Some templates have the same switch under another name."""
        return not self.has_thinking_switch and "thinking" in _variables(self.source)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Rendered:
        """The prompt for a conversation. InvalidRequest, with the template's own words, if it takes none."""
        settings = self._settings(kwargs or {})
        self._check(messages)
        fallback: Rendered | None = None
        error: Exception | None = None
        for candidate, arguments_as in _candidates(messages):
            try:
                rendered = self._render(candidate, tools, settings, arguments_as)
            except Exception as failure:  # a template raises what it likes
                error = failure
                continue
            if _keeps(rendered.text, candidate, arguments_as):
                return rendered
            fallback = fallback or rendered
        if fallback is None:
            raise InvalidRequest(f"the model's chat template rejects this conversation: {error}") from error
        return fallback

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        settings: Mapping[str, Any],
        arguments_as: ArgumentsAs,
    ) -> Rendered:
        dicts = _as_dicts(messages, arguments_as, self._takes_lists_only)
        described = [_tool_dict(tool) for tool in tools]
        guard = Guard(self._guarded, [dicts, described, dict(settings)])
        text = self._tokenizer.apply_chat_template(
            [guard.marked(m, self._spared if m["role"] == "assistant" else frozenset()) for m in dicts],
            tools=guard.marked(described) or None,
            tokenize=False,
            **guard.marked(settings),
        )
        pictures = tuple(p for message in messages for part in message.pictures for p in part.pictures)
        text = self._with_pictures(text, pictures)
        return Rendered(tuple(guard.encode(text, self._vocabulary.encode)), guard.unmarked(text), pictures)

    def _with_pictures(self, text: str, pictures: Sequence[ReadPicture]) -> str:
        """What the model wants to read for each picture, where the template says that there is one."""
        if not pictures or self._placeholder is None:
            return text
        between = text.split(self._placeholder)
        if len(between) != len(pictures) + 1:
            raise ValueError(f"{len(pictures)} pictures were to be shown, and {len(between) - 1} were")
        return between[0] + "".join(p.text + t for p, t in zip(pictures, between[1:], strict=True))

    def _settings(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        refused = RESERVED & kwargs.keys()
        if refused:
            raise InvalidRequest(f"chat_template_kwargs may not set {', '.join(sorted(refused))}")
        settings = {"add_generation_prompt": not kwargs.get("continue_final_message", False), **kwargs}
        if "enable_thinking" in settings and self._calls_switch_thinking:
            settings.setdefault("thinking", settings["enable_thinking"])
        return settings

    def _check(self, messages: Sequence[Message]) -> None:
        if not self._exists:
            raise InvalidRequest("this model has no chat template: use plain completions instead")
        if not messages:
            raise InvalidRequest("messages is empty: there must be at least one")
        parts = [part for message in messages for part in message.content]
        media = [part.kind for part in parts if isinstance(part, MediaPart)]
        if media or (self._placeholder is None and any(isinstance(part, PicturePart) for part in parts)):
            kind = media[0] if media else "image"
            reason = f" ({self._no_images_reason})" if self._no_images_reason else ""
            raise InvalidRequest(f"this model reads text only{reason}, and a message holds {_article(kind)}")


@lru_cache(maxsize=8)
def _variables(source: str) -> frozenset[str]:
    """What a template reads of what it is given."""
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
    except TemplateSyntaxError:  # a tag that only the tokenizer knows: take every word of it
        return frozenset(re.findall(r"\w+", source))
    return frozenset(find_undeclared_variables(tree))


def template_source(tokenizer: Any) -> str:
    """The Jinja source of a tokenizer's template, or of all of them; empty where there is none."""
    source = getattr(tokenizer, "chat_template", None)
    if isinstance(source, Mapping):
        return "\n".join(map(str, source.values()))
    return source if isinstance(source, str) else ""


def _candidates(messages: Sequence[Message]) -> Iterator[tuple[Sequence[Message], ArgumentsAs]]:
    """What to try, the conversation as it is first. Calls' arguments are mappings, or text if need be."""
    for variant in variants(messages):
        yield variant, "mapping"
        if any(message.tool_calls for message in variant):
            yield variant, "text"


def _keeps(text: str, messages: Sequence[Message], arguments_as: ArgumentsAs) -> bool:
    """Whether a rendering holds what the system said, and arguments as JSON rather than as Python."""
    system = [part for m in messages if m.role == "system" for part in m.content]
    if any(isinstance(part, TextPart) and part.text.strip() not in text for part in system):
        return False
    if arguments_as == "text":
        return True
    mappings = [_arguments(call, "mapping") for message in messages for call in message.tool_calls]
    return not any("'" in str(mapping) and str(mapping) in text for mapping in mappings)


def _as_dicts(
    messages: Sequence[Message], arguments_as: ArgumentsAs, as_lists: bool = False
) -> list[dict[str, Any]]:
    names = names_of_calls(messages)
    return [_as_dict(message, names, arguments_as, as_lists) for message in messages]


def _as_dict(
    message: Message, names: Mapping[str, str], arguments_as: ArgumentsAs, as_lists: bool
) -> dict[str, Any]:
    content: Any = _content_list(message) if as_lists or message.pictures else message.text
    written: dict[str, Any] = {"role": message.role, "content": content}
    name = message.name
    if message.role == "tool" and message.tool_call_id is not None:
        written["tool_call_id"] = message.tool_call_id
        name = name or names.get(message.tool_call_id)
    if name is not None:
        written["name"] = name
    if message.reasoning is not None:
        written["reasoning_content"] = message.reasoning
    if message.tool_calls:
        written["tool_calls"] = [_call_dict(call, arguments_as) for call in message.tool_calls]
    return written


def _content_list(message: Message) -> list[dict[str, str]]:
    listed: list[dict[str, str]] = []
    for part in message.content:
        if isinstance(part, TextPart):
            listed.append({"type": "text", "text": part.text})
        elif isinstance(part, PicturePart):
            listed += [{"type": "image"}] * len(part.pictures)
    return listed or [{"type": "text", "text": ""}]


def _call_dict(call: ToolCall, arguments_as: ArgumentsAs) -> dict[str, Any]:
    function = {"name": call.name, "arguments": _arguments(call, arguments_as)}
    return {"id": call.id, "type": "function", "function": function}


def _arguments(call: ToolCall, arguments_as: ArgumentsAs) -> Any:
    """As a mapping where they are one: a client may have kept arguments that never were JSON."""
    text = call.arguments.strip() or "{}"
    if arguments_as == "text":
        return text
    try:
        value = loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def _tool_dict(tool: Tool) -> dict[str, Any]:
    parameters = dict(tool.parameters) or {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def _article(kind: str) -> str:
    return "a video" if kind == "video" else f"an {kind}"
