"""Turns messages into a prompt with the tokenizer's own chat template.

Must not know how the answer is read. The conversation is rendered unchanged first. Only if the template
rejects it, or drops a system message, are the variants of messages.py tried.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

from jinja2 import Environment, TemplateError, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables

from outrider.chat.conversation import ImagePart, MediaPart, Message, TextPart, Tool, ToolCall
from outrider.chat.json_text import loads
from outrider.chat.messages import variants
from outrider.chat.prompt_limit import NO_LIMIT, PromptLimit
from outrider.chat.special_tokens import SpecialTokenEscape, Vocabulary
from outrider.media.image_reader import ProcessedImage
from outrider.request import InvalidRequest

log = logging.getLogger(__name__)

# Arguments of apply_chat_template that a client may not set: Outrider sets them, or they would let a client
# do more than fill in a template.
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

MAX_REASON = 500  # characters of a template's message that are shown; chosen by hand
NO_AUDIO = "this model has no audio encoder"
PROBE = "outrider"  # the content of the message that probes a template

ArgumentsAs = Literal["mapping", "text"]  # how a template gets the arguments of earlier calls


@dataclass(frozen=True)
class RenderedMessages:
    ids: tuple[int, ...]
    text: str
    images: tuple[ProcessedImage, ...] = ()  # in the order of the prompt


class ChatTemplate:
    """Renders messages with one tokenizer's template.

    `assistant_tokens`: special tokens that assistant messages may contain, because the template looks for
    them. `placeholder`: the text that the template writes for an image; None for a model that reads text
    only. `video_placeholder`: the same for a video. `no_images_reason`: why a vision model reads text only.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocabulary: Vocabulary,
        assistant_tokens: Sequence[str] = (),
        placeholder: str | None = None,
        no_images_reason: str | None = None,
        limit: PromptLimit = NO_LIMIT,
        video_placeholder: str | None = None,
        no_audio_reason: str = NO_AUDIO,
    ) -> None:
        self._tokenizer = tokenizer
        self._limit = limit
        self._placeholder = placeholder
        self._video_placeholder = video_placeholder
        self._no_images_reason = no_images_reason
        self._no_audio_reason = no_audio_reason
        self._vocabulary = vocabulary
        self.source = template_source(tokenizer)
        self.exists = bool(self.source) or bool(getattr(tokenizer, "has_chat_template", False))
        # Client text must not turn into special tokens, nor into added tokens that the template writes.
        written = {token for token in vocabulary.added if token in self.source and not token.isspace()}
        self._escaped = vocabulary.special | written
        self._assistant_tokens = frozenset(assistant_tokens) | (written - vocabulary.special)

    @property
    def mentions_tools(self) -> bool:
        """True without Jinja source too: such a template is the model's own code, which knows its tools."""
        return not self.source or "tools" in _variables(self.source)

    @property
    def has_thinking_switch(self) -> bool:
        return "enable_thinking" in _variables(self.source)

    @property
    def knows_effort(self) -> bool:
        """True if the template tells the model its effort of reasoning."""
        return "reasoning_effort" in _variables(self.source)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        kwargs: Mapping[str, Any] | None = None,
        is_cut: bool = False,
    ) -> RenderedMessages:
        """Raises InvalidRequest, with the template's message, if the template accepts no variant.

        `is_cut`: the prompt will be cut, so it may be longer than the context.
        """
        settings = self._settings(kwargs or {})
        self._check(messages)
        fallback: RenderedMessages | None = None
        error: Exception | None = None
        for candidate, arguments_as in _candidates(messages):
            try:
                rendered = self._render(candidate, tools, settings, arguments_as, is_cut)
            except InvalidRequest:  # too long, in any variant
                raise
            except Exception as failure:  # a template may raise anything
                error = failure
                continue
            if _is_complete(rendered.text, candidate, arguments_as):
                return rendered
            fallback = fallback or rendered
        if fallback is None:
            raise InvalidRequest(
                f"the model's chat template rejects this conversation: {_reason(error)}"
            ) from error
        return fallback

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        settings: Mapping[str, Any],
        arguments_as: ArgumentsAs,
        is_cut: bool,
    ) -> RenderedMessages:
        names = _names_of_calls(messages)
        dicts = [_message_dict(m, names, arguments_as, self._takes_lists_only) for m in messages]
        tool_dicts = [tool_dict(tool) for tool in tools]
        special = SpecialTokenEscape(self._escaped, dicts, [tool_dicts, dict(settings)])
        nothing: frozenset[str] = frozenset()
        text = self._tokenizer.apply_chat_template(
            [
                special.escape_message(m, self._assistant_tokens if m["role"] == "assistant" else nothing)
                for m in dicts
            ],
            tools=special.escape(tool_dicts) or None,
            tokenize=False,
            **special.escape(settings),
        )
        images = tuple(image for message in messages for part in message.image_parts for image in part.images)
        if images and self._placeholder is not None:
            text = _with_images(text, self._placeholder, self._video_placeholder, images)
        ids = self._limit.encode(special.chunks(text), self._vocabulary.encode, is_cut)
        return RenderedMessages(tuple(ids), special.unescape(text), images)

    def _settings(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        refused = RESERVED & kwargs.keys()
        if refused:
            raise InvalidRequest(f"chat_template_kwargs may not set {', '.join(sorted(refused))}")
        settings = {"add_generation_prompt": not kwargs.get("continue_final_message", False), **kwargs}
        names = _variables(self.source)
        if "enable_thinking" in settings and "enable_thinking" not in names and "thinking" in names:
            settings.setdefault("thinking", settings["enable_thinking"])  # the same switch under another name
        return settings

    def _check(self, messages: Sequence[Message]) -> None:
        if not self.exists:
            raise InvalidRequest("this model has no chat template: use plain completions instead")
        if not messages:
            raise InvalidRequest("messages is empty: there must be at least one")
        parts = [part for message in messages for part in message.content]
        media = [part.kind for part in parts if isinstance(part, MediaPart)]
        if "audio" in media:
            raise InvalidRequest(f"a message has audio, which is not read: {self._no_audio_reason}")
        if media or (self._placeholder is None and any(isinstance(part, ImagePart) for part in parts)):
            kind = media[0] if media else "image"
            article = "a" if kind == "video" else "an"
            reason = f" ({self._no_images_reason})" if self._no_images_reason else ""
            raise InvalidRequest(f"this model reads text only{reason}, and a message has {article} {kind}")

    @cached_property
    def _takes_lists_only(self) -> bool:
        """Some vision templates expect a list of content parts and would drop a message that is a string."""
        if self._placeholder is None:
            return False
        return not self._shows(PROBE) and self._shows([{"type": "text", "text": PROBE}])

    @cached_property
    def shows_videos(self) -> bool:
        """True if the template has a place for videos."""
        placeholder = self._video_placeholder
        return placeholder is not None and self._shows([{"type": "video"}], placeholder)

    def _shows(self, content: Any, text: str = PROBE) -> bool:
        try:
            return text in self._tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], tokenize=False
            )
        except Exception:  # a template may raise anything
            return False


def _reason(error: Exception | None) -> str:
    """The template's own words. The text of any other exception is for the log only."""
    if isinstance(error, TemplateError):
        return str(error)[:MAX_REASON]
    log.warning("the chat template failed", exc_info=error)
    return "it fails on it, and the log has the details"


def template_source(tokenizer: Any) -> str:
    """The Jinja source of the tokenizer's template, or of all of its templates; empty if there is none."""
    source = getattr(tokenizer, "chat_template", None)
    if isinstance(source, Mapping):
        return "\n".join(map(str, source.values()))
    return source if isinstance(source, str) else ""


@lru_cache(maxsize=8)
def _variables(source: str) -> frozenset[str]:
    """The names of the variables that a template reads."""
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
    except TemplateSyntaxError:  # a tag that only the tokenizer knows: take every word of the source
        return frozenset(re.findall(r"\w+", source))
    return frozenset(find_undeclared_variables(tree))


def _candidates(messages: Sequence[Message]) -> Iterator[tuple[Sequence[Message], ArgumentsAs]]:
    yield from _argument_forms(messages)
    for variant in variants(messages):
        yield from _argument_forms(variant)


def _argument_forms(messages: Sequence[Message]) -> Iterator[tuple[Sequence[Message], ArgumentsAs]]:
    yield messages, "mapping"
    if any(message.tool_calls for message in messages):
        yield messages, "text"


def _is_complete(text: str, messages: Sequence[Message], arguments_as: ArgumentsAs) -> bool:
    """False if a system message is missing, or if arguments were written as a Python dict, not as JSON."""
    system = [part for m in messages if m.role == "system" for part in m.content]
    if any(isinstance(part, TextPart) and part.text.strip() not in text for part in system):
        return False
    if arguments_as == "text":
        return True
    mappings = [_arguments(call, "mapping") for message in messages for call in message.tool_calls]
    return not any("'" in str(mapping) and str(mapping) in text for mapping in mappings)


def _with_images(
    text: str, placeholder: str, video_placeholder: str | None, images: Sequence[ProcessedImage]
) -> str:
    """Replace each placeholder by the text that the model needs for that image or video."""
    wanted = [video_placeholder if image.is_video else placeholder for image in images]
    pattern = "|".join(map(re.escape, filter(None, (placeholder, video_placeholder))))
    between, shown = re.split(pattern, text), re.findall(pattern, text)
    if shown != wanted:
        raise TemplateError(f"the template shows {len(shown)} of {len(images)} images")
    return between[0] + "".join(image.text + t for image, t in zip(images, between[1:], strict=True))


def _message_dict(
    message: Message, names: Mapping[str, str], arguments_as: ArgumentsAs, as_list: bool
) -> dict[str, Any]:
    content: Any = _content_list(message) if as_list or message.image_parts else message.text
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
        written["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call, arguments_as)},
            }
            for call in message.tool_calls
        ]
    return written


def _content_list(message: Message) -> list[dict[str, str]]:
    listed: list[dict[str, str]] = []
    for part in message.content:
        if isinstance(part, TextPart):
            listed.append({"type": "text", "text": part.text})
        elif isinstance(part, ImagePart):
            listed += [{"type": "video" if image.is_video else "image"} for image in part.images]
    return listed or [{"type": "text", "text": ""}]


def _names_of_calls(messages: Sequence[Message]) -> dict[str, str]:
    """The function name of each call id."""
    return {call.id: call.name for message in messages for call in message.tool_calls}


def _arguments(call: ToolCall, arguments_as: ArgumentsAs) -> Any:
    """As a mapping if the text is a JSON object; else as text: a client may send back broken arguments."""
    text = call.arguments.strip() or "{}"
    if arguments_as == "text":
        return text
    try:
        value = loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def tool_dict(tool: Tool) -> dict[str, Any]:
    parameters = dict(tool.parameters) or {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}
