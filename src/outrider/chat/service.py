"""Owns a chat request up to the engine's door: render, constrain, queue. The APIs stand on this.

Must not know HTTP. Work with the tokenizer (long prompts take a while) runs on one thread of its own: the
event loop is never held up, and a tokenizer never encodes for two at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from outrider.chat.conversation import ChatRequest, Message, Tool
from outrider.chat.formats import DEFAULT_TOOL_FORMAT, detect
from outrider.chat.formats.tool_format import Toolbox
from outrider.chat.grammars import Constraint, Thinking, constraint_for
from outrider.chat.images import Pictures
from outrider.chat.output_parser import OutputParser, new_splitter
from outrider.chat.pieces import PlainSplitter
from outrider.chat.reasoning_splitter import ends_outside, starts_inside
from outrider.chat.stream import ChatStream, Prepared
from outrider.chat.template import ChatTemplate, Rendered, template_source
from outrider.chat.tool_text import calls_as_text, with_tools_told
from outrider.chat.vocabulary import Vocabulary
from outrider.engine.async_engine import AsyncEngine
from outrider.request import InvalidRequest, SamplingParams

T = TypeVar("T")


class ChatService:
    """One model's chat: `start` an answer, `complete` a bare prompt, `count_tokens`."""

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: Any,
        model_name: str,
        pictures: Pictures | None = None,
        no_images_reason: str | None = None,
    ) -> None:
        """`pictures`: of a model that reads them. `blind`: why a vision model does not."""
        self.model_name = model_name
        self._engine = engine
        self._vocabulary = Vocabulary(tokenizer)
        tool_format, self._reasoning = detect(template_source(tokenizer), tokenizer)
        self._tool_format = tool_format or DEFAULT_TOOL_FORMAT
        spared = self._reasoning.markers if self._reasoning is not None else ()
        self._pictures = pictures
        placeholder = pictures.placeholder if pictures is not None else None
        self._template = ChatTemplate(tokenizer, self._vocabulary, spared, placeholder, no_images_reason)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outrider-chat")

    async def start(self, request: ChatRequest) -> ChatStream:
        """Queue a conversation. Raises InvalidRequest, before anything is queued, if it cannot be served."""
        return self._stream(await self._off_loop(self._prepare, await self.with_pictures(request)))

    async def with_pictures(self, request: ChatRequest) -> ChatRequest:
        """The request with its pictures loaded, so that several answers load them once."""
        return request if self._pictures is None else await self._pictures.load(request)

    async def complete(self, prompt: str | Sequence[int], params: SamplingParams) -> ChatStream:
        """Queue a bare prompt. Its stream has text, logprobs and the end."""
        return self._stream(await self._off_loop(self._prepare_prompt, prompt, params))

    async def count_tokens(self, request: ChatRequest) -> int:
        """How many tokens the request's prompt has."""
        return len((await self._off_loop(self._render, await self.with_pictures(request))).ids)

    def close(self) -> None:
        """Let the service's thread end. The engine is not closed."""
        self._thread.shutdown(wait=False)
        if self._pictures is not None:
            self._pictures.close()

    def _stream(self, prepared: Prepared) -> ChatStream:
        return ChatStream(self._engine, prepared, self._count)

    async def _count(self, text: str) -> int:
        return len(await self._off_loop(self._vocabulary.encode, text))

    async def _off_loop(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    # -- on the service's thread ---------------------------------------------------------------------------

    def _prepare(self, request: ChatRequest) -> Prepared:
        tools = _active_tools(request)
        rendered = self._render(request)
        thinking = self._thinking(request, rendered)
        constraint = constraint_for(request, self._tool_format, self._reasoning, thinking, self._vocabulary)
        prompt_ids = rendered.ids
        if constraint.opens_reasoning and self._reasoning is not None:
            prompt_ids += tuple(self._vocabulary.encode(self._reasoning.opening))
            thinking = "inside"
        params = self._params(request, tools, constraint)
        media = self._pictures.place(prompt_ids, rendered.pictures) if self._pictures is not None else None
        self._engine.engine.check(prompt_ids, params)  # compiles the grammar: here, not on the event loop
        parser = self._parser(request, tools, constraint, is_inside=thinking == "inside")
        continues = bool(request.template_kwargs.get("continue_final_message"))
        return Prepared(prompt_ids, params, parser, continues, media)

    def _prepare_prompt(self, prompt: str | Sequence[int], params: SamplingParams) -> Prepared:
        prompt_ids = tuple(self._vocabulary.encode_prompt(prompt) if isinstance(prompt, str) else prompt)
        self._engine.engine.check(prompt_ids, params)
        return Prepared(prompt_ids, params, OutputParser(PlainSplitter(), {}), continues_prompt=True)

    def _render(self, request: ChatRequest) -> Rendered:
        """A model whose template does not mention tools is told of them in the system message."""
        tools = tuple(_active_tools(request).values())
        messages: Sequence[Message] = request.messages
        if not self._template.mentions_tools:
            messages = calls_as_text(messages)
            if tools:
                instructions = self._tool_format.instructions or DEFAULT_TOOL_FORMAT.instructions or ""
                messages = with_tools_told(messages, tools, instructions)
        return self._template.render(messages, tools, request.template_kwargs)

    def _thinking(self, request: ChatRequest, rendered: Rendered) -> Thinking:
        if starts_inside(self._reasoning, rendered.text):
            return "inside"
        is_wanted = request.template_kwargs.get("enable_thinking", True)
        is_free = self._template.has_thinking_switch and not ends_outside(self._reasoning, rendered.text)
        return "free" if is_free and is_wanted else "off"

    def _params(self, request: ChatRequest, tools: Toolbox, constraint: Constraint) -> SamplingParams:
        params = replace(request.params, grammar=constraint.grammar)
        if request.prediction:
            params = replace(params, prediction_ids=tuple(self._vocabulary.encode(request.prediction)))
        if tools and self._tool_format.stops:
            stop_ids = (*params.stop_token_ids, *self._vocabulary.ids_of(self._tool_format.stops))
            params = replace(params, stop_token_ids=stop_ids)
        return replace(params, skip_special_tokens=False) if self._special_markers(tools) else params

    def _parser(
        self, request: ChatRequest, tools: Toolbox, constraint: Constraint, is_inside: bool
    ) -> OutputParser:
        splitter = new_splitter(
            self._tool_format, self._reasoning, tools, is_inside=is_inside, streams=constraint.forces_call
        )
        markers = self._special_markers(tools)
        hides = bool(markers) and request.params.skip_special_tokens
        return OutputParser(
            splitter,
            tools,
            is_parallel=request.parallel_tool_calls,
            silenced=self._vocabulary.special - markers if hides else (),
        )

    def _special_markers(self, tools: Toolbox) -> frozenset[str]:
        """The special tokens that the answer is read by, which the engine would not show."""
        markers = self._tool_format.region.markers if tools else ()
        if self._reasoning is not None:
            markers += self._reasoning.markers
        return frozenset(
            token for token in self._vocabulary.special if any(token in marker for marker in markers)
        )


def _active_tools(request: ChatRequest) -> dict[str, Tool]:
    """The tools that may be called, by name."""
    tools = {tool.name: tool for tool in request.tools}
    if len(tools) < len(request.tools):
        raise InvalidRequest("two tools have the same name")
    return {} if request.tool_choice == "none" else tools
