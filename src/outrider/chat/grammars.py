"""Owns the choice of a grammar for a request: the form of the answer, and where the grammar starts.

Writes llguidance's dialect of Lark. Must not know how a grammar is enforced.

A reasoning model reasons first, so its grammar starts where the reasoning ends. If the model is free to skip
the reasoning, the prompt opens the reasoning: otherwise its end, and so the grammar, might never come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from outrider.answer_form import Grammar, Marker, Triggers
from outrider.chat.closed_schema import without_notes
from outrider.chat.conversation import ChatRequest, NamedTool, Tool
from outrider.chat.formats import harmony
from outrider.chat.formats.call_grammar import (
    CallGrammar,
    Element,
    FreeText,
    JsonValue,
    OneOf,
    OptionalElements,
    Pattern,
    Repeated,
    RequiredElement,
    Separated,
)
from outrider.chat.formats.reasoning_format import ReasoningFormat
from outrider.chat.formats.tool_format import ToolFormat
from outrider.chat.special_tokens import Vocabulary
from outrider.request import InvalidRequest

# inside: the prompt has opened the reasoning. free: the model may reason. off: the model does not reason.
Thinking = Literal["inside", "free", "off"]

Items = Sequence[tuple[tuple[RequiredElement, ...], bool]]  # of a Separated

_ANYTHING = "/(?s:.*)/"
_BLANK = r"/[ \n]{0,4}/"
_START = re.compile(r"^start\s*:", re.MULTILINE)
_BARE_SLASH = re.compile(r"(?<!\\)/")
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


@dataclass(frozen=True)
class Constraint:
    grammar: Grammar | None = None
    opens_reasoning: bool = False  # the reasoning's opening must be added to the prompt
    streams_calls: bool = False  # every call is under a grammar


def constraint_for(
    request: ChatRequest,
    tool_format: ToolFormat | None,
    reasoning: ReasoningFormat | None,
    thinking: Thinking,
    vocabulary: Vocabulary,
) -> Constraint:
    """The constraint on a constrained request. Raises InvalidRequest if it cannot be enforced."""
    grammar = request.grammar or request.params.grammar
    tools = () if request.tool_choice == "none" else request.tools
    forced = _forced_tools(request)
    if forced:
        allows_many = request.parallel_tool_calls and request.tool_choice == "required"
        calls = _Writer(vocabulary).calls(_required(tool_format), forced, allows_many)
        return _after_reasoning(Grammar("lark", calls), reasoning, thinking, vocabulary, forces_call=True)
    assert grammar is not None, "the request is not constrained"
    is_framed = reasoning is not None and reasoning.framing is not None  # calls are messages of their own
    if tools and tool_format is not None and not is_framed:
        either = _Writer(vocabulary).calls_or(tool_format, tools, request.parallel_tool_calls, grammar)
        grammar = Grammar("lark", either)
    return _after_reasoning(grammar, reasoning, thinking, vocabulary)


def free_calls(
    tools: Sequence[Tool],
    format: ToolFormat,
    reasoning: ReasoningFormat | None,
    starts_inside: bool,
    allows_many: bool,
    vocabulary: Vocabulary,
) -> Constraint:
    """The constraint on an answer that may have calls: a lazy grammar takes over where a call starts.

    Raises InvalidRequest if no grammar can be written for the model's format.
    """
    writer = _Writer(vocabulary)
    text = writer.free_calls(_required(format), tools, allows_many)
    markers = writer.free_markers(format, tools)
    thoughts = None
    if reasoning is not None and reasoning is not harmony.REASONING:
        thoughts = writer.marker(reasoning.opening.lstrip()), writer.marker(reasoning.closing)
    triggers = Triggers(
        markers,
        at_start=format.region.opens_answer_only,
        reasoning=thoughts,
        starts_inside=starts_inside and thoughts is not None,
        in_reasoning=bool(interrupting(format, vocabulary)),
    )
    streams = not format.region.opens_answer_only
    return Constraint(Grammar("lark", text, triggers=triggers), streams_calls=streams)


def interrupting(format: ToolFormat, vocabulary: Vocabulary) -> tuple[str, ...]:
    """The markers that open calls inside reasoning too, and so end it: only if all are special tokens.

    Other markers are plain text there: models mention them while they think.
    """
    markers = (*format.region.before, *format.region.opening)
    return markers if all(marker in vocabulary.special for marker in markers) else ()


def _forced_tools(request: ChatRequest) -> Sequence[Tool]:
    """The tools of which the model must call one; empty if no call is forced."""
    choice = request.tool_choice
    if choice == "required" and not request.tools:
        raise InvalidRequest('tool_choice "required" needs tools, and the request has none')
    if isinstance(choice, NamedTool):
        named = [tool for tool in request.tools if tool.name == choice.name]
        if not named:
            raise InvalidRequest(f"tool_choice names {choice.name!r}, which is not among the tools")
        return named
    return request.tools if choice == "required" else ()


def _required(format: ToolFormat | None) -> ToolFormat:
    if format is None or format.call_grammar is None:
        name = "which is unknown" if format is None else f'"{format.name}"'
        raise InvalidRequest(
            f"this model writes tool calls in a format ({name}) that a grammar cannot force: "
            'use tool_choice "auto", and no response format beside tools'
        )
    return format


def _after_reasoning(
    grammar: Grammar,
    reasoning: ReasoningFormat | None,
    thinking: Thinking,
    vocabulary: Vocabulary,
    forces_call: bool = False,
) -> Constraint:
    if reasoning is not None and reasoning.framing is not None:
        return _after_message(grammar, reasoning, thinking, vocabulary, forces_call)
    if reasoning is None or thinking == "off":
        return Constraint(grammar, streams_calls=forces_call)
    if reasoning.closing in vocabulary.added:
        grammar = replace(grammar, after_ids=(vocabulary.added[reasoning.closing],))
    else:  # the closing may be tokenized in several ways: match its text
        grammar = Grammar("lark", _Writer(vocabulary).after_text(reasoning.closing, grammar))
    return Constraint(grammar, opens_reasoning=thinking == "free", streams_calls=forces_call)


def _after_message(
    grammar: Grammar, format: ReasoningFormat, thinking: Thinking, vocabulary: Vocabulary, forces_call: bool
) -> Constraint:
    """Lists of messages: a forced call follows the reasoning, which the prompt opens.

    An answer has a message of its own.
    """
    mark = format.closing if forces_call else format.answer
    grammar = replace(grammar, after_ids=tuple(vocabulary.encode(mark)))
    return Constraint(
        grammar, opens_reasoning=forces_call and thinking != "inside", streams_calls=forces_call
    )


class _Writer:
    """Writes Lark rules. Added tokens are written by id: as text they would not match."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._added = vocabulary.added
        tokens = sorted(filter(None, self._added), key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, tokens)) or "(?!)")
        self._rules: list[str] = []

    def calls(self, format: ToolFormat, tools: Sequence[Tool], allows_many: bool) -> str:
        """One call of one of the tools, or several calls."""
        return self._grammar(f"blank {self._calls(format, tools, allows_many)}", f"blank: {_BLANK}")

    def free_calls(self, format: ToolFormat, tools: Sequence[Tool], allows_many: bool) -> str:
        """What a lazy grammar enforces: calls with all their tags, or a call without the optional ones."""
        if format.free_grammar is not None:
            self._tools(format.free_grammar, tools)
            starts = " | ".join(map(self._text, format.free_starts))
            return self._grammar("free_start call", f"free_start: {starts}")
        has_frame = format.around != ("", "")
        whole = self._calls(format, tools, allows_many and has_frame)
        if format.region.opens_answer_only:
            leads = " | ".join(self._text(lead) for lead in self._leads(format) if lead)
            return self._grammar(f"lead? {whole}", f"lead: {leads}") if leads else self._grammar(whole)
        has_bare = bool(format.region.before) and (has_frame or format.tags != ("", ""))
        return self._grammar(f"whole{' | call' if has_bare else ''}", f"whole: {whole}")

    def free_markers(self, format: ToolFormat, tools: Sequence[Tool]) -> tuple[Marker, ...]:
        """The texts with which these calls start."""
        if format.free_grammar is not None:
            return tuple(map(self.marker, format.free_starts))
        if not format.region.opens_answer_only:
            return tuple(map(self.marker, (*format.region.before, *format.region.opening)))
        assert format.call_grammar is not None
        starts = [format.call_grammar(tool)[0] for tool in tools]
        texts = (f"{lead}{format.around[0]}{start}" for lead in self._leads(format) for start in starts)
        return tuple(self.marker(text.rstrip()) for text in texts)  # half of all tokens start with a blank

    def _leads(self, format: ToolFormat) -> list[str]:
        """What may stand between the start of the answer, or the last call, and a call."""
        return ["", *format.region.before, *(f"{after} " for after in format.region.after)]

    def calls_or(self, format: ToolFormat, tools: Sequence[Tool], allows_many: bool, answer: Grammar) -> str:
        """Calls, or an answer under its own grammar."""
        calls = self._calls(_required(format), tools, allows_many)
        return self._grammar("blank (calls | answer)", f"blank: {_BLANK}", f"calls: {calls}", _answer(answer))

    def after_text(self, text: str, answer: Grammar) -> str:
        """Any text up to and including `text`, then the answer."""
        thought = f"thought[suffix={_quoted(text)}]: {_ANYTHING}"
        if answer.kind == "lark":
            return self._grammar("thought answer", thought, _START.sub("answer:", answer.text))
        return self._grammar("thought blank answer", thought, f"blank: {_BLANK}", _answer(answer))

    def _grammar(self, start: str, *rules: str) -> str:
        return "\n".join([f"start: {start}", *rules, *self._rules, ""])

    def _calls(self, format: ToolFormat, tools: Sequence[Tool], allows_many: bool) -> str:
        assert format.call_grammar is not None
        self._tools(format.call_grammar, tools)
        tagged = f"{self._text(format.tags[0])} call {self._text(format.tags[1])}".strip()
        more = f" ({self._text(format.between)} {tagged})*" if allows_many and not format.is_single else ""
        start, after = format.around[0], self._text(format.around[1])
        before = self._text(start) if isinstance(start, str) else self._elements(start, "before")
        return f"{before} {tagged}{more} {after}".strip()

    def _tools(self, call_grammar: Callable[[Tool], CallGrammar], tools: Sequence[Tool]) -> None:
        """The rule `call`: a call of one of the tools."""
        names = []
        for i, tool in enumerate(tools):
            names.append(f"call_{i}")
            self._rules.append(f"call_{i}: {self._elements(call_grammar(tool), f'part_{i}')}")
        self._rules.append(f"call: {' | '.join(names)}")

    def _elements(self, elements: Sequence[Element], name: str) -> str:
        return " ".join(self._element(element, f"{name}_{i}") for i, element in enumerate(elements))

    def _element(self, element: Element, name: str) -> str:
        match element:
            case str():
                return self._text(element)
            case JsonValue(schema, is_strict):
                style = {**_JSON_STYLE, "lenient": not is_strict}
                written = json.dumps({**without_notes(schema), "x-guidance": style})
                self._rules.append(f"{name}: %json {written}")
                return name
            case FreeText(until):
                return self._free_text(until, name)
            case OneOf(choices):
                return f"({' | '.join(map(_quoted, choices))})"
            case Pattern(expression):
                return f"/{expression}/"
            case OptionalElements(inner):
                return f"({self._elements(inner, name)})?"
            case Separated(items, separator):
                return self._separated(items, separator, name)
            case Repeated(item, separator):
                self._rules.append(f"{name}: {self._elements(item, f'{name}_item')}")
                return f"({name} ({self._text(separator)} {name})*)?"

    def _separated(self, items: Items, separator: str, name: str) -> str:
        """Two rules for each item: `first`, while nothing is written, and `more`, after something is."""
        self._rules += [f'{name}_first_{len(items)}: ""', f'{name}_more_{len(items)}: ""']
        for i, (elements, is_required) in enumerate(items):
            self._rules.append(f"{name}_item_{i}: {self._elements(elements, f'{name}_{i}')}")
            first = f"{name}_item_{i} {name}_more_{i + 1}"
            more = f"{self._text(separator)} {first}"
            or_skip = ("", "") if is_required else (f" | {name}_first_{i + 1}", f" | {name}_more_{i + 1}")
            self._rules.append(f"{name}_first_{i}: {first}{or_skip[0]}")
            self._rules.append(f"{name}_more_{i}: {more}{or_skip[1]}")
        return f"{name}_first_0"

    def _free_text(self, until: str, name: str) -> str:
        """Any text up to and including `until`. Text never contains an added token."""
        token = self._tokens.search(until)
        text, rest = (until[: token.start()], until[token.start() :]) if token else (until, "")
        self._rules.append(f"{name}[suffix={_quoted(text)}]: {_ANYTHING}" if text else f"{name}: {_ANYTHING}")
        return f"{name} {self._text(rest)}".strip()

    def _text(self, text: str) -> str:
        """Literal text, with added tokens written by their ids."""
        parts = self.marker(text)
        return " ".join(_quoted(part) if isinstance(part, str) else f"<[{part}]>" for part in parts)

    def marker(self, text: str) -> Marker:
        """A text, cut at its added tokens."""
        parts: list[str | int] = []
        at = 0
        for found in self._tokens.finditer(text):
            parts += [text[at : found.start()], self._added[found.group()]]
            at = found.end()
        return tuple(part for part in (*parts, text[at:]) if part != "")


def _answer(grammar: Grammar) -> str:
    """A client's grammar as the rule `answer`."""
    if grammar.kind == "json_object":
        return 'answer: %json {"type": "object"}'
    if grammar.kind == "json_schema":
        return f"answer: %json {grammar.text}"
    if grammar.kind == "regex":
        expression = _BARE_SLASH.sub(r"\\/", grammar.text)
        return f"answer: /{expression}/"
    raise InvalidRequest("a Lark grammar cannot be combined with tools: leave one of them out")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
