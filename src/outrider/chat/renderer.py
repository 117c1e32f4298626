"""Turns a chat request into everything that the engine and the answer's reader need.

HTTP, `LLM.chat`, the benchmark and the training of heads all render here, so that the same conversation gives
the same tokens everywhere. Must not know HTTP, asyncio or the engine.

    ChatRequest ── tools as text, if the template mentions none ── template, special tokens escaped ── ids
                └─ grammar, stop tokens, parser of the answer                                ── ChatPrompt
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from outrider.chat.conversation import ChatRequest, Message
from outrider.chat.formats import DEFAULT_TOOL_FORMAT, detect
from outrider.chat.formats.tool_format import ToolsByName
from outrider.chat.grammars import Constraint, Thinking, constraint_for
from outrider.chat.messages import calls_as_text, describe_tools
from outrider.chat.output_parser import OutputParser, PlainSplitter, new_splitter
from outrider.chat.prompt_limit import NO_LIMIT, PromptLimit
from outrider.chat.special_tokens import Vocabulary
from outrider.chat.template import ChatTemplate, RenderedMessages, template_source
from outrider.media.image_reader import ImageReader
from outrider.prompt_media import PromptMedia
from outrider.request import InvalidRequest, SamplingParams


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered request."""

    ids: tuple[int, ...]
    params: SamplingParams  # with the grammar, stop tokens and drafts that the request implies
    new_parser: Callable[[], OutputParser]  # makes the reader of one answer: it has a state
    continues_prompt: bool  # True: the answer's text continues the prompt's text
    media: PromptMedia | None = None  # the prompt's images


class ChatRenderer:
    """Renders the requests of one model. Not thread-safe: a tokenizer must not encode two texts at once."""

    def __init__(
        self,
        tokenizer: Any,
        image_reader: ImageReader | None = None,
        no_images_reason: str | None = None,
        max_context: int | None = None,
    ) -> None:
        """`image_reader`: None for a model that reads text only, with the reason if it is a vision model.

        `max_context`: prompts far longer than this are refused before they are rendered.
        """
        self.image_reader = image_reader
        self.limit = NO_LIMIT if max_context is None else PromptLimit(max_context)
        self._vocabulary = Vocabulary(tokenizer)
        tool_format, self._reasoning = detect(template_source(tokenizer), tokenizer)
        self._tool_format = tool_format or DEFAULT_TOOL_FORMAT
        self._template = ChatTemplate(
            tokenizer,
            self._vocabulary,
            assistant_tokens=self._reasoning.markers if self._reasoning is not None else (),
            placeholder=image_reader.placeholder if image_reader is not None else None,
            no_images_reason=no_images_reason,
            limit=self.limit,
        )

    @property
    def has_template(self) -> bool:
        return self._template.exists

    def render(self, request: ChatRequest) -> ChatPrompt:
        """The prompt of a conversation. Raises InvalidRequest if the model cannot take the conversation."""
        rendered = self.render_messages(request)
        thinking = self._thinking(request, rendered)
        constraint = Constraint()
        if request.is_constrained:
            constraint = constraint_for(
                request, self._tool_format, self._reasoning, thinking, self._vocabulary
            )
        prompt_ids = rendered.ids
        if constraint.opens_reasoning and self._reasoning is not None:
            prompt_ids += tuple(self._vocabulary.encode(self._reasoning.opening))
            thinking = "inside"
        media = None
        if self.image_reader is not None and rendered.images:
            media = self.image_reader.place(prompt_ids, rendered.images)
        return ChatPrompt(
            prompt_ids,
            self._params(request, constraint),
            partial(self._new_parser, request, constraint, starts_inside=thinking == "inside"),
            continues_prompt=bool(request.template_kwargs.get("continue_final_message")),
            media=media,
        )

    def render_text(self, prompt: str | Sequence[int], params: SamplingParams) -> ChatPrompt:
        """A bare prompt. The answer is text: no reasoning and no calls are looked for."""
        if isinstance(prompt, str):
            self.limit.check_characters(len(prompt))
            ids: Sequence[int] = self.limit.encode([prompt], self._vocabulary.encode_prompt)
        else:
            ids = prompt
        return ChatPrompt(
            tuple(ids), params, lambda: OutputParser(PlainSplitter(), {}), continues_prompt=True
        )

    def render_messages(self, request: ChatRequest) -> RenderedMessages:
        """The messages and tools of a request as token ids, without the parts that a grammar adds."""
        tools = request.active_tools
        if request.tools and len({tool.name for tool in request.tools}) < len(request.tools):
            raise InvalidRequest("two tools have the same name")
        messages: Sequence[Message] = request.messages
        has_calls = any(message.tool_calls or message.role == "tool" for message in messages)
        if (tools or has_calls) and not self._template.mentions_tools:
            messages = calls_as_text(messages)
            if tools:
                instructions = self._tool_format.instructions or DEFAULT_TOOL_FORMAT.instructions or ""
                messages = describe_tools(messages, tuple(tools.values()), instructions)
        return self._template.render(messages, tuple(tools.values()), request.template_kwargs)

    def count_tokens(self, text: str) -> int:
        return len(self._vocabulary.encode(text))

    def _thinking(self, request: ChatRequest, rendered: RenderedMessages) -> Thinking:
        end = rendered.text.rstrip()
        if self._reasoning is not None and end.endswith(self._reasoning.opening):
            return "inside"
        is_closed = self._reasoning is not None and end.endswith(self._reasoning.closing)
        is_wanted = request.template_kwargs.get("enable_thinking", True)
        return "free" if self._template.has_thinking_switch and is_wanted and not is_closed else "off"

    def _params(self, request: ChatRequest, constraint: Constraint) -> SamplingParams:
        tools = request.active_tools
        params = replace(request.params, grammar=constraint.grammar)
        if request.prediction:
            prediction_ids = self.limit.encode([request.prediction], self._vocabulary.encode)
            params = replace(params, prediction_ids=tuple(prediction_ids))
        if tools and self._tool_format.stops:
            stop_ids = (*params.stop_token_ids, *self._vocabulary.ids_of(self._tool_format.stops))
            params = replace(params, stop_token_ids=stop_ids)
        return replace(params, skip_special_tokens=False) if self._special_markers(tools) else params

    def _new_parser(self, request: ChatRequest, constraint: Constraint, starts_inside: bool) -> OutputParser:
        tools = request.active_tools
        splitter = new_splitter(
            self._tool_format,
            self._reasoning,
            tools,
            starts_inside=starts_inside,
            streams_calls=constraint.forces_call,
        )
        markers = self._special_markers(tools)
        hides_special = bool(markers) and request.params.skip_special_tokens
        return OutputParser(
            splitter,
            tools,
            is_parallel=request.parallel_tool_calls,
            hidden=self._vocabulary.special - markers if hides_special else (),
        )

    def _special_markers(self, tools: ToolsByName) -> frozenset[str]:
        """The special tokens that the parser needs. If there are any, the engine must not skip them."""
        markers = self._tool_format.region.markers if tools else ()
        if self._reasoning is not None:
            markers += self._reasoning.markers
        return frozenset(
            token for token in self._vocabulary.special if any(token in marker for marker in markers)
        )
