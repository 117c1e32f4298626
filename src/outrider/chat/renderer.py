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

from outrider.chat.conversation import ChatRequest, Message, Tool
from outrider.chat.formats import DEFAULT_TOOL_FORMAT, detect
from outrider.chat.formats.tool_format import ToolFormat, ToolsByName
from outrider.chat.grammars import Constraint, Thinking, constraint_for, free_calls, interrupting
from outrider.chat.messages import calls_as_text, describe_tools
from outrider.chat.output_parser import OutputParser, PlainSplitter, new_splitter
from outrider.chat.prompt_limit import NO_LIMIT, PromptLimit
from outrider.chat.special_tokens import Vocabulary
from outrider.chat.template import NO_AUDIO, ChatTemplate, RenderedMessages, template_source
from outrider.chat.thinking import AUTO_PARSER, ThinkingBudgets, reasoning_format
from outrider.media.image_reader import ImageReader, VideoReader
from outrider.prompt_media import PromptMedia
from outrider.request import InvalidRequest, SamplingParams

# Tools of a format in which each tool has a start of its own. Chosen by hand: 100 take some 0.3 s to compile.
MAX_NAMES_AT_START = 100
ANY_OBJECT = {"type": "object", "additionalProperties": True}


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered request."""

    ids: tuple[int, ...]
    params: SamplingParams  # with the grammar, stop tokens and drafts that the request implies
    new_parser: Callable[[], OutputParser]  # makes the reader of one answer: it has a state
    continues_prompt: bool  # True: the answer's text continues the prompt's text
    media: PromptMedia | None = None  # the prompt's images
    num_images: int = 0  # frames of videos included
    # The same prompt with less of a grammar, if its own grammar cannot be used.
    relaxed: Callable[[], ChatPrompt] | None = None


class ChatRenderer:
    """Renders the requests of one model. Not thread-safe: a tokenizer must not encode two texts at once."""

    def __init__(
        self,
        tokenizer: Any,
        image_reader: ImageReader | None = None,
        no_images_reason: str | None = None,
        max_context: int | None = None,
        tool_format: ToolFormat | None = None,
        has_tool_grammar: bool = True,
        *,
        reasoning_parser: str = AUTO_PARSER,
        budget_message: str = "",
        max_thinking_tokens: int | None = None,
        no_audio_reason: str = NO_AUDIO,
    ) -> None:
        """`image_reader`: None for a model that reads text only, with the reason if it is a vision model.

        `max_context`: prompts far longer than this are refused before they are rendered.
        `tool_format`: None for the format that template and tokenizer show.
        `has_tool_grammar`: calls that are not forced are under a grammar too.
        `reasoning_parser`: a name of `chat/thinking.py`.
        `budget_message`: written before the end of reasoning that has used up its budget.
        `max_thinking_tokens`: most tokens of reasoning of every answer; None: no limit.
        `no_audio_reason`: why audio is not read.
        """
        self.image_reader = image_reader
        self.limit = NO_LIMIT if max_context is None else PromptLimit(max_context)
        self._has_tool_grammar = has_tool_grammar
        self._vocabulary = Vocabulary(tokenizer)
        detected, self._reasoning = detect(template_source(tokenizer), tokenizer)
        self._tool_format = tool_format or detected or DEFAULT_TOOL_FORMAT
        if self._tool_format.for_tokens is not None:
            self._tool_format = self._tool_format.for_tokens(self._vocabulary.added)
        self._reasoning = reasoning_format(reasoning_parser, self._reasoning, self._vocabulary.added)
        self._budgets = ThinkingBudgets(
            self._reasoning, self._vocabulary, budget_message, max_thinking_tokens
        )
        videos = image_reader.videos if image_reader is not None else None
        self._template = ChatTemplate(
            tokenizer,
            self._vocabulary,
            assistant_tokens=self._reasoning.markers if self._reasoning is not None else (),
            placeholder=image_reader.placeholder if image_reader is not None else None,
            no_images_reason=no_images_reason,
            limit=self.limit,
            video_placeholder=videos.placeholder if videos is not None else None,
            no_audio_reason=no_audio_reason,
        )

    @property
    def has_template(self) -> bool:
        return self._template.exists

    @property
    def video_reader(self) -> VideoReader | None:
        """None: the model, or its chat template, knows no videos. They are read as separate images."""
        if self.image_reader is None or not self._template.shows_videos:
            return None
        return self.image_reader.videos

    @property
    def template(self) -> str:
        """The template's Jinja source; empty if there is none."""
        return self._template.source

    @property
    def thinks(self) -> bool:
        """True if the model's answers have reasoning that is told from their text."""
        return self._reasoning is not None

    def render(self, request: ChatRequest) -> ChatPrompt:
        """The prompt of a conversation. Raises InvalidRequest if the model cannot take the conversation."""
        rendered = self.render_messages(request)
        thinking = self._thinking(request, rendered)
        constraint, starts_inside = Constraint(), thinking == "inside"
        is_lazy = not request.is_constrained and self._may_constrain(request)
        if request.is_constrained:
            constraint = constraint_for(
                request, self._tool_format, self._reasoning, thinking, self._vocabulary
            )
        elif is_lazy:
            constraint = self._free_calls(tuple(request.active_tools.values()), request, starts_inside)
        prompt_ids = rendered.ids
        if constraint.opens_reasoning and self._reasoning is not None:
            prompt_ids += tuple(self._vocabulary.encode(self._reasoning.opening))
            starts_inside = True
        prompt_ids = self.cut(prompt_ids, request.params, has_images=bool(rendered.images))
        media = None
        if self.image_reader is not None and rendered.images:
            media = self.image_reader.place(prompt_ids, rendered.images)
        prompt = ChatPrompt(
            prompt_ids,
            self._budgets.apply(
                self._params(request, constraint),
                starts_inside=starts_inside,
                constraint=constraint,
                has_tools=bool(request.active_tools),
                effort=self._effort(request),
            ),
            partial(self._new_parser, request, constraint, starts_inside=starts_inside),
            continues_prompt=bool(request.template_kwargs.get("continue_final_message")),
            media=media,
            num_images=sum(image.num_frames or 1 for image in rendered.images),
        )
        return (
            replace(prompt, relaxed=partial(self._relaxed, prompt, request, starts_inside))
            if is_lazy
            else prompt
        )

    def _may_constrain(self, request: ChatRequest) -> bool:
        """True if calls that are not forced get a grammar."""
        format, num_tools = self._tool_format, len(request.active_tools)
        if not self._has_tool_grammar or format.call_grammar is None:
            return False
        if request.params.min_tokens or request.params.allowed_token_ids:
            return False
        return num_tools > 0 and (num_tools <= MAX_NAMES_AT_START or not format.region.opens_answer_only)

    def _free_calls(self, tools: Sequence[Tool], request: ChatRequest, starts_inside: bool) -> Constraint:
        tools = [replace(tool, parameters=ANY_OBJECT) if tool.strict is False else tool for tool in tools]
        is_parallel, vocabulary = request.parallel_tool_calls, self._vocabulary
        return free_calls(tools, self._tool_format, self._reasoning, starts_inside, is_parallel, vocabulary)

    def _relaxed(
        self, prompt: ChatPrompt, request: ChatRequest, starts_inside: bool, has_names: bool = True
    ) -> ChatPrompt:
        """The prompt without the schemas of its tools, except strict ones; or without any grammar."""
        constraint, relaxed = Constraint(), None
        if has_names:
            tools = [
                tool if tool.strict else replace(tool, strict=False) for tool in request.active_tools.values()
            ]
            constraint = self._free_calls(tools, request, starts_inside)
            relaxed = partial(self._relaxed, prompt, request, starts_inside, has_names=False)
        if any(tool.strict for tool in request.active_tools.values()):
            relaxed = None
        return replace(
            prompt,
            params=replace(prompt.params, grammar=constraint.grammar),
            new_parser=partial(self._new_parser, request, constraint, starts_inside=starts_inside),
            relaxed=relaxed,
        )

    def render_text(self, prompt: str | Sequence[int], params: SamplingParams) -> ChatPrompt:
        """A bare prompt. The answer is text: no reasoning and no calls are looked for."""
        if isinstance(prompt, str):
            self.limit.check_characters(len(prompt))
            is_cut = params.truncate_prompt_tokens is not None
            ids: Sequence[int] = self.limit.encode([prompt], self._vocabulary.encode_prompt, is_cut)
        else:
            ids = prompt
        ids, params = self.cut(tuple(ids), params), self._with_bad_words(params)
        if params.thinking_token_budget is not None:  # else nothing is looked for in a bare prompt's answer
            params = self._budgets.apply(params, starts_inside=self._ends_inside(ids))
        return ChatPrompt(
            tuple(ids), params, lambda: OutputParser(PlainSplitter(), {}), continues_prompt=True
        )

    def render_messages(self, request: ChatRequest) -> RenderedMessages:
        """The messages and tools of a request as token ids, without the parts that a grammar adds."""
        tools = request.active_tools
        if request.tools and len({tool.name for tool in request.tools}) < len(request.tools):
            raise InvalidRequest("two tools have the same name")
        shown = tuple(tool for tool in tools.values() if not tool.is_deferred) or tuple(tools.values())
        messages: Sequence[Message] = request.messages
        has_calls = any(message.tool_calls or message.role == "tool" for message in messages)
        if (tools or has_calls) and not self._template.mentions_tools:
            messages = calls_as_text(messages)
            if tools:
                instructions = self._tool_format.instructions or DEFAULT_TOOL_FORMAT.instructions or ""
                messages = describe_tools(messages, shown, instructions)
        is_cut = request.params.truncate_prompt_tokens is not None
        return self._template.render(messages, shown, request.template_kwargs, is_cut)

    def text_ids(self, text: str, add_special_tokens: bool) -> list[int]:
        """The tokens of a bare prompt. `add_special_tokens`: with those that the tokenizer adds (BOS)."""
        vocabulary = self._vocabulary
        return self.limit.encode(
            [text], vocabulary.encode_prompt if add_special_tokens else vocabulary.encode
        )

    def count_tokens(self, text: str) -> int:
        return len(self._vocabulary.encode(text))

    def _thinking(self, request: ChatRequest, rendered: RenderedMessages) -> Thinking:
        end = rendered.text.rstrip()
        if self._reasoning is not None and end.endswith(self._reasoning.opening):
            return "inside"
        is_closed = self._reasoning is not None and end.endswith(self._reasoning.closing)
        is_wanted = request.template_kwargs.get("enable_thinking", True)
        return "free" if self._template.has_thinking_switch and is_wanted and not is_closed else "off"

    def _effort(self, request: ChatRequest) -> object:
        """The effort whose budget is enforced: a template that knows efforts tells the model instead."""
        return None if self._template.knows_effort else request.template_kwargs.get("reasoning_effort")

    def _ends_inside(self, prompt_ids: Sequence[int]) -> bool:
        """True if the last reasoning of a bare prompt is open."""
        if self._reasoning is None:
            return False
        text = self._vocabulary.decode(prompt_ids)
        return text.rfind(self._reasoning.opening) > text.rfind(self._reasoning.closing)

    def _params(self, request: ChatRequest, constraint: Constraint) -> SamplingParams:
        tools = request.active_tools
        params = self._with_bad_words(replace(request.params, grammar=constraint.grammar))
        if request.prediction:
            prediction_ids = self.limit.encode([request.prediction], self._vocabulary.encode)
            params = replace(params, prediction_ids=tuple(prediction_ids))
        if tools and self._tool_format.stops:
            stop_ids = (*params.stop_token_ids, *self._vocabulary.ids_of(self._tool_format.stops))
            params = replace(params, stop_token_ids=stop_ids)
        return replace(params, skip_special_tokens=False) if self._special_markers(tools) else params

    def _with_bad_words(self, params: SamplingParams) -> SamplingParams:
        """With the ids of the bad words: each as the tokenizer writes it after a space, and without one."""
        texts = [space + word.lstrip() for word in params.bad_words for space in ("", " ")]
        ids = dict.fromkeys(filter(None, (tuple(self._vocabulary.encode(text)) for text in texts)))
        return replace(params, bad_word_ids=(*params.bad_word_ids, *ids)) if ids else params

    def cut(self, ids: tuple[int, ...], params: SamplingParams, has_images: bool = False) -> tuple[int, ...]:
        """The last tokens of a prompt, as many as `truncate_prompt_tokens` allows."""
        most = params.truncate_prompt_tokens
        if most == -1:
            most = max(1, self.limit.max_tokens - (params.max_tokens or 1))
        if most is None or len(ids) <= most:
            return ids
        if has_images:
            raise InvalidRequest("truncate_prompt_tokens cannot cut a prompt with images: shorten it")
        return ids[-most:]

    def _new_parser(self, request: ChatRequest, constraint: Constraint, starts_inside: bool) -> OutputParser:
        tools = request.active_tools
        splitter = new_splitter(
            self._tool_format,
            self._reasoning,
            tools,
            starts_inside=starts_inside,
            streams_calls=constraint.streams_calls,
            interrupting=interrupting(self._tool_format, self._vocabulary),
        )
        markers = self._special_markers(tools)
        hides_special = bool(markers) and request.params.skip_special_tokens
        hidden = self._vocabulary.special - markers if hides_special else frozenset()
        layout = self._reasoning.layout if self._reasoning is not None else ()
        return OutputParser(
            splitter,
            tools,
            is_parallel=request.parallel_tool_calls,
            hidden=hidden.union(layout),
        )

    def _special_markers(self, tools: ToolsByName) -> frozenset[str]:
        """The special tokens that the parser needs. If there are any, the engine must not skip them."""
        markers = self._tool_format.region.markers if tools else ()
        if self._reasoning is not None:
            markers += self._reasoning.markers
        return frozenset(
            token for token in self._vocabulary.special if any(token in marker for marker in markers)
        )
