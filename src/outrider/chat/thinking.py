"""Owns what a request's thinking budget means for a model: its reasoning format, and the tokens that end it.

Must not know how a budget is enforced: see engine/thinking_budget.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from outrider.answer_form import Grammar, ReasoningMarks
from outrider.chat.formats import REASONING_FORMATS, think
from outrider.chat.formats.reasoning_format import Framing, ReasoningFormat
from outrider.chat.grammars import Constraint
from outrider.chat.special_tokens import Vocabulary
from outrider.config import InvalidConfig
from outrider.request import InvalidRequest, SamplingParams

# Most tokens of reasoning by effort, if the template does not know reasoning_effort. Efforts that are not
# listed have no limit. Chosen by hand; docs/SERVING.md has the same table.
EFFORT_BUDGETS = {"minimal": 512, "low": 2048, "medium": 8192}

# Names of reasoning parsers in vLLM and SGLang, by our format.
_OTHER_NAMES = {
    "think": (
        "deepseek_r1",
        "deepseek-r1",
        "deepseek_v3",
        "qwen3",
        "glm45",
        "glm47",
        "poolside_v1",
        "mimo",
        "step3p5",
        "step5",
        "granite_thinking_parser",
        "glm4_moe",
        "minimax_m2",
        "kimi_k2",
        "step3",
        "hunyuan_a13b",
        "hunyuan",
        "hy_v3",
        "hy_v4",
        "deepseek_v4",
        "deepseek_v41",
        "ling3",
        "nemotron_v3",
        "olmo3",
        "holo2",
    ),
    "harmony": ("openai_gptoss", "gpt_oss", "gpt-oss"),
    "magistral": ("mistral",),
    "seed_think": ("seed_oss",),
    "muse": ("muse_glimmer", "musespark1x"),
    "cohere": ("cohere_command3", "cohere_command4"),
}
PARSERS: dict[str, ReasoningFormat | None] = {**REASONING_FORMATS, "none": None} | {
    other: REASONING_FORMATS[name] for name, others in _OTHER_NAMES.items() for other in others
}
AUTO_PARSER = "auto"  # the chat template shows the format


def check_parser(name: str) -> None:
    """Raises InvalidConfig for a reasoning parser that does not exist."""
    if name != AUTO_PARSER and name not in PARSERS:
        known = ", ".join((AUTO_PARSER, *REASONING_FORMATS, "none"))
        raise InvalidConfig(
            f"{name!r} is not a reasoning parser. Use one of {known}, or vLLM's name for one of them."
        )


def check_most(most: int | None) -> None:
    """Raises InvalidConfig for a bad limit of all requests."""
    if most is not None and most < 0:
        raise InvalidConfig(f"max_thinking_tokens must be 0 or more, not {most}")


def reasoning_format(
    name: str, detected: ReasoningFormat | None, tokens: Collection[str] = ()
) -> ReasoningFormat | None:
    """The format of a reasoning parser. None: reasoning stays in the text. `tokens`: the added ones."""
    check_parser(name)
    if name != AUTO_PARSER and PARSERS[name] is None:
        return None
    return think.for_tokens(detected if name == AUTO_PARSER else PARSERS[name], tokens)


class ThinkingBudgets:
    """Adds to sampling parameters what the engine needs to enforce their thinking budget."""

    def __init__(
        self,
        format: ReasoningFormat | None,
        vocabulary: Vocabulary,
        message: str = "",
        most: int | None = None,
    ) -> None:
        """`message`: written before the forced end of the reasoning. `most`: the limit of every request."""
        check_most(most)
        self._format = format
        self._vocabulary = vocabulary
        self._message = message
        self._most = most

    def apply(
        self,
        params: SamplingParams,
        *,
        starts_inside: bool,
        constraint: Constraint | None = None,
        has_tools: bool = False,
        effort: object = None,
    ) -> SamplingParams:
        """`effort`: the request's reasoning_effort, if its budget is to be used."""
        budget = params.thinking_token_budget
        if budget is None and isinstance(effort, str):
            budget = EFFORT_BUDGETS.get(effort)
        budget = min((limit for limit in (budget, self._most) if limit is not None), default=None)
        if self._format is None or budget is None:
            return params
        marks = self._marks(self._format, starts_inside, constraint or Constraint(), has_tools)
        return replace(params, thinking_token_budget=budget, reasoning=marks)

    def _marks(
        self, format: ReasoningFormat, starts_inside: bool, constraint: Constraint, has_tools: bool
    ) -> ReasoningMarks:
        framing = format.framing
        if framing is None:
            end, banned_ids = self._end(format, constraint)
        else:
            end, banned_ids = self._message_end(format, framing, constraint, has_tools)
        close_ids = self._vocabulary.encode(self._message + end)
        if not close_ids:
            raise InvalidRequest("this tokenizer cannot write the end of the model's reasoning")
        return ReasoningMarks(
            opening=format.opening,
            closings=(format.closing,) if framing is None else (*framing.starts, *framing.ends),
            close_ids=tuple(close_ids),
            banned_ids=tuple(banned_ids),
            starts_inside=starts_inside,
            may_repeat=framing is not None,
            splits_closing=format.closing not in self._vocabulary.added,
        )

    def _end(self, format: ReasoningFormat, constraint: Constraint) -> tuple[str, Sequence[int]]:
        """The text that ends the reasoning, and the tokens that would open it again.

        A grammar starts right after the closing, so nothing is forced behind it.
        """
        before, after = format.blanks
        if _begins_after_reasoning(constraint.grammar):
            return before + format.closing, ()
        return before + format.closing + after, self._vocabulary.ids_of([format.opening])

    def _message_end(
        self, format: ReasoningFormat, framing: Framing, constraint: Constraint, has_tools: bool
    ) -> tuple[str, Sequence[int]]:
        """On to the message of the answer. With tools the model chooses the next one, except reasoning."""
        if constraint.streams_calls and _begins_after_reasoning(constraint.grammar):  # a forced call
            return format.closing, ()
        next_message = format.closing + framing.next_message
        if _begins_after_reasoning(constraint.grammar) or not has_tools:
            return next_message + format.answer, ()
        banned_ids = self._vocabulary.encode(framing.reasoning_name)[:1]
        return next_message + framing.recipient, banned_ids


def _begins_after_reasoning(grammar: Grammar | None) -> bool:
    """Whether a grammar holds the answer from the end of the reasoning on. A lazy one waits for a call."""
    return grammar is not None and grammar.triggers is None
