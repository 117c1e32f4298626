"""Owns the choice of a grammar for a request: the form of the answer, and where the grammar starts.

Writes llguidance's dialect of Lark. Must not know how a grammar is enforced.

A reasoning model reasons first, so its grammar starts where the reasoning ends. If the model is free to skip
the reasoning, the prompt opens the reasoning: otherwise its end, and so the grammar, might never come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from outrider.chat.conversation import ChatRequest, NamedTool, Tool
from outrider.chat.formats import harmony
from outrider.chat.formats.call_grammar import Element, FreeText, JsonValue, OneOf, OptionalElements
from outrider.chat.formats.reasoning_format import ReasoningFormat
from outrider.chat.formats.tool_format import ToolFormat
from outrider.chat.special_tokens import Vocabulary
from outrider.request import Grammar, InvalidRequest

# inside: the prompt has opened the reasoning. free: the model may reason. off: the model does not reason.
Thinking = Literal["inside", "free", "off"]

_ANYTHING = "/(?s:.*)/"
_BLANK = r"/[ \n]{0,4}/"
_START = re.compile(r"^start\s*:", re.MULTILINE)
_BARE_SLASH = re.compile(r"(?<!\\)/")
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


@dataclass(frozen=True)
class Constraint:
    grammar: Grammar | None = None
    opens_reasoning: bool = False  # the reasoning's opening must be added to the prompt
    forces_call: bool = False


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
    if tools and tool_format is not None and reasoning is not harmony.REASONING:
        either = _Writer(vocabulary).calls_or(tool_format, tools, request.parallel_tool_calls, grammar)
        grammar = Grammar("lark", either)
    return _after_reasoning(grammar, reasoning, thinking, vocabulary)


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
    if reasoning is harmony.REASONING:
        return _after_channel(grammar, thinking, vocabulary, forces_call)
    if reasoning is None or thinking == "off":
        return Constraint(grammar, forces_call=forces_call)
    if reasoning.closing in vocabulary.added:
        grammar = replace(grammar, after_ids=(vocabulary.added[reasoning.closing],))
    else:  # the closing may be tokenized in several ways: match its text
        grammar = Grammar("lark", _Writer(vocabulary).after_text(reasoning.closing, grammar))
    return Constraint(grammar, opens_reasoning=thinking == "free", forces_call=forces_call)


def _after_channel(
    grammar: Grammar, thinking: Thinking, vocabulary: Vocabulary, forces_call: bool
) -> Constraint:
    """Harmony: a forced call follows the analysis, which the prompt opens; an answer has its own channel."""
    format = harmony.REASONING
    mark = format.closing if forces_call else format.answer
    grammar = replace(grammar, after_ids=tuple(vocabulary.encode(mark)))
    return Constraint(grammar, opens_reasoning=forces_call and thinking != "inside", forces_call=forces_call)


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
        names = []
        for i, tool in enumerate(tools):
            names.append(f"call_{i}")
            elements = self._elements(format.call_grammar(tool), f"part_{i}")
            self._rules.append(f"call_{i}: {elements}")
        self._rules.append(f"call: {' | '.join(names)}")
        more = f" ({self._text(format.between)} call)*" if allows_many and not format.is_single else ""
        before, after = map(self._text, format.around)
        return f"{before} call{more} {after}".strip()

    def _elements(self, elements: Sequence[Element], name: str) -> str:
        return " ".join(self._element(element, f"{name}_{i}") for i, element in enumerate(elements))

    def _element(self, element: Element, name: str) -> str:
        match element:
            case str():
                return self._text(element)
            case JsonValue(schema, is_strict):
                style = {**_JSON_STYLE, "lenient": not is_strict}
                self._rules.append(f"{name}: %json {json.dumps({**schema, 'x-guidance': style})}")
                return name
            case FreeText(until):
                return self._free_text(until, name)
            case OneOf(choices):
                return f"({' | '.join(map(_quoted, choices))})"
            case OptionalElements(inner):
                return f"({self._elements(inner, name)})?"

    def _free_text(self, until: str, name: str) -> str:
        if until in self._added:
            self._rules.append(f"{name}: {_ANYTHING}")
            return f"{name} {self._text(until)}"
        if self._tokens.search(until):
            raise InvalidRequest("this model's tool calls end in a way that a grammar cannot force")
        self._rules.append(f"{name}[suffix={_quoted(until)}]: {_ANYTHING}")
        return name

    def _text(self, text: str) -> str:
        """Literal text, with added tokens written by their ids."""
        written, at = [], 0
        for found in self._tokens.finditer(text):
            written += [_quoted(text[at : found.start()])] if found.start() > at else []
            written.append(f"<[{self._added[found.group()]}]>")
            at = found.end()
        written += [_quoted(text[at:])] if at < len(text) else []
        return " ".join(written)


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
