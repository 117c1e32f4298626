"""Thinking budgets from the request to the answer, in every reasoning format; the choice of the format."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from outrider import LLM, SamplingParams
from outrider.answer_form import Grammar
from outrider.chat.conversation import ChatRequest, Message, TextPart, Tool
from outrider.chat.events import Finished, ReasoningDelta, TextDelta
from outrider.chat.formats import REASONING_FORMATS
from outrider.chat.renderer import ChatRenderer
from outrider.chat.service import ChatService
from outrider.chat.thinking import EFFORT_BUDGETS, PARSERS
from outrider.config import InvalidConfig
from tiny_models import write_checkpoint, write_tokenizer

SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>", "<think>", "</think>")
HARMONY = ("<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|constrain|>")
MESSAGES = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
OPENED = MESSAGES + "<think>\n"  # as models that always reason have it
UNOPENED = MESSAGES + "{# <think></think> #}"
HARMONY_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if tools %}tools{% endif %}<|start|>assistant{# <|channel|> #}"
)
USER = [{"role": "user", "content": "why?"}]
QUIET = dict.fromkeys(range(len(SPECIAL)), -50.0)  # a model that never stops to think by itself
PARAMS = SamplingParams(max_tokens=30, temperature=1, seed=3, ignore_eos=True, logit_bias=QUIET)
CLOSE = "\n</think>\n\n"
CALL = Tool("look", "", {"type": "object", "properties": {}, "additionalProperties": False})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("thinker")
    write_checkpoint(folder, "llama", max_position_embeddings=1024)
    write_tokenizer(folder, SPECIAL, OPENED)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, drafter="ngram", max_rows=4) as llm:
        yield llm


def with_template(llm: LLM, template: str, **settings: Any) -> ChatRenderer:
    """A renderer of the same tokenizer for another template."""
    tokenizer = TokenizerWrapper(copy.deepcopy(llm.tokenizer._tokenizer))
    tokenizer._tokenizer.chat_template = template
    return ChatRenderer(tokenizer, **settings)


def ids(llm: LLM, text: str) -> list[int]:
    return list(llm.tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("budget", [0, 1, 7])
@pytest.mark.parametrize("depth", [0, 5, "auto"])
def test_reasoning_ends_at_its_budget_whatever_is_drafted(llm: LLM, budget: int, depth: Any) -> None:
    params = replace(PARAMS, draft_depth=depth)
    plain = llm.chat(USER, params)
    answer = llm.chat(USER, replace(params, thinking_token_budget=budget))
    assert answer.token_ids[:budget] == plain.token_ids[:budget]
    close_ids = ids(llm, CLOSE)
    assert list(answer.token_ids[budget : budget + len(close_ids)]) == close_ids
    assert SPECIAL.index("</think>") not in answer.token_ids[budget + len(close_ids) :]
    assert (plain.text, answer.finish_reason) == ("", "length")
    assert answer.text.strip() == llm.tokenizer.decode(answer.token_ids[budget + len(close_ids) :]).strip()
    assert answer.reasoning == (llm.tokenizer.decode(answer.token_ids[:budget]).strip(" \n\t\r") or None)
    undrafted = llm.chat(USER, replace(params, thinking_token_budget=budget, draft_depth=0))
    assert answer.token_ids == undrafted.token_ids


def test_a_block_that_the_model_opens_itself_is_closed_and_not_opened_again(llm: LLM) -> None:
    """With a model that wants to open a block at every token."""
    open_id = SPECIAL.index("<think>")
    params = replace(PARAMS, logit_bias=QUIET | {open_id: 60.0}, thinking_token_budget=4)
    prompt = with_template(llm, UNOPENED).render(ChatRequest([Message("user", (TextPart("?"),))], params))
    (answer,) = llm._answer([prompt])
    close_ids = ids(llm, CLOSE)
    assert list(answer.token_ids[: 5 + len(close_ids)]) == [open_id] * 5 + close_ids
    assert answer.token_ids[5 + len(close_ids)] != open_id  # what follows the forced end is the answer
    assert answer.reasoning == "<think>" * 4


def test_a_model_that_ends_its_reasoning_in_time_is_not_touched(llm: LLM) -> None:
    params = replace(PARAMS, logit_bias=QUIET | {SPECIAL.index("</think>"): 60.0})
    answer = llm.chat(USER, params)
    assert answer.token_ids[0] == SPECIAL.index("</think>")
    assert llm.chat(USER, replace(params, thinking_token_budget=3)).token_ids == answer.token_ids


def test_a_grammar_begins_after_the_forced_end(llm: LLM) -> None:
    grammar = Grammar("json_schema", json.dumps({"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3}))
    params = replace(PARAMS, thinking_token_budget=5, max_tokens=60, ignore_eos=False, draft_depth=4)
    params = replace(params, grammar=grammar)
    answer = llm.chat(USER, params)
    assert list(answer.token_ids[5:7]) == ids(llm, "\n</think>")
    assert set(json.loads(answer.text)) <= {1, 2}
    assert answer.token_ids == llm.chat(USER, replace(params, draft_depth=0)).token_ids


def test_a_call_is_forced_after_the_forced_end(llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": dict(CALL.parameters)}}
    params = replace(PARAMS, thinking_token_budget=3, max_tokens=90, ignore_eos=False)
    answer = llm.chat(USER, params, tools=[tool], tool_choice="required")
    assert [call.name for call in answer.tool_calls] == ["look"]
    assert list(answer.token_ids[3:5]) == ids(llm, "\n</think>")


def test_stop_strings_length_and_minimum_hold_with_a_budget(llm: LLM) -> None:
    params = replace(PARAMS, thinking_token_budget=6)
    assert len(llm.chat(USER, replace(params, max_tokens=4)).token_ids) == 4
    inside_close = llm.chat(USER, replace(params, max_tokens=7))
    assert list(inside_close.token_ids[6:]) == ids(llm, CLOSE)[:1]
    stopped = llm.chat(USER, replace(params, stop="</think>"))
    assert (stopped.finish_reason, len(stopped.token_ids)) == ("stop", 8)
    detailed = llm.chat(USER, replace(params, logprobs=2, min_tokens=20, frequency_penalty=0.5))
    assert [one.token_id for one in detailed.logprobs or ()] == list(detailed.token_ids)
    assert list(detailed.token_ids[6:10]) == ids(llm, CLOSE)


def test_what_was_thought_counts_in_the_usage(llm: LLM) -> None:
    params = replace(PARAMS, thinking_token_budget=7)
    request = ChatRequest([Message("user", (TextPart("why?"),))], params)

    async def read() -> list[Any]:
        service = ChatService(llm.async_engine, llm.renderer)
        prepared = await service.prepare(request, num_answers=2)
        return [[event async for event in stream] for stream in prepared.start()]

    for events in asyncio.run(read()):
        reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
        assert any(isinstance(event, TextDelta) for event in events)
        assert isinstance(events[-1], Finished)
        assert events[-1].usage.num_reasoning == len(ids(llm, reasoning)) <= 7


def test_a_bare_prompt_has_a_budget_too(llm: LLM) -> None:
    params = replace(PARAMS, thinking_token_budget=2)
    (answer,) = llm.generate("Hm. <think>so", params)
    assert list(answer.token_ids[2:6]) == ids(llm, CLOSE)
    (past,) = llm.generate("Hm. <think>so</think>", params)
    assert past.token_ids[2:6] != answer.token_ids[2:6]


def test_contradictions_are_refused(llm: LLM) -> None:
    close_id = SPECIAL.index("</think>")
    budget = replace(PARAMS, thinking_token_budget=2)
    with pytest.raises(ValueError, match="logit_bias forbids"):
        llm.chat(USER, replace(budget, logit_bias={close_id: -float("inf")}))
    with pytest.raises(ValueError, match="min_tokens forbids"):
        llm.chat(USER, replace(budget, min_tokens=9, stop_token_ids=[close_id]))
    with pytest.raises(ValueError, match="thinking_token_budget must be 0 or more"):
        replace(PARAMS, thinking_token_budget=-2)


# -- formats ---------------------------------------------------------------------------------------------


def harmony_answer(folder: Path, num_tokens: int, **request: Any) -> tuple[str, int]:
    """What a model writes that thinks for ever: the whole text, and the length of its reasoning."""
    write_checkpoint(folder, "gpt_oss", max_position_embeddings=1024)
    write_tokenizer(folder, HARMONY, HARMONY_TEMPLATE)
    ends = {HARMONY.index(token): -60.0 for token in HARMONY}
    with LLM(folder, drafter="ngram") as llm:
        params = replace(PARAMS, max_tokens=60, thinking_token_budget=num_tokens, logit_bias=ends)
        chat = ChatRequest([Message("user", (TextPart("why?"),))], params, **request)
        prompt = llm.renderer.render(chat)
        opened = (*prompt.ids, *ids(llm, "<|channel|>analysis<|message|>"))
        reasoning = replace(prompt.params.reasoning, starts_inside=True)
        prompt = replace(prompt, ids=opened, params=replace(prompt.params, reasoning=reasoning))
        (answer,) = llm._answer([prompt])
        return llm.tokenizer.decode(answer.token_ids), num_tokens


def test_harmony_goes_on_to_the_final_channel(tmp_path: Path) -> None:
    text, _ = harmony_answer(tmp_path, 5)
    thought, _, answer = text.partition("<|end|><|start|>assistant<|channel|>final<|message|>")
    assert len(thought) == 5
    assert len(answer) > 0
    assert "<|" not in answer


def test_harmony_with_tools_chooses_another_channel(tmp_path: Path) -> None:
    text, _ = harmony_answer(tmp_path, 5, tools=(CALL,))
    thought, _, after = text.partition("<|end|><|start|>assistant<|channel|>")
    assert len(thought) == 5
    assert after
    assert not after.startswith("a")  # the first token of "analysis"


@pytest.mark.parametrize("name", [name for name in REASONING_FORMATS if name != "harmony"])
def test_every_format_has_an_end_that_its_parser_reads(llm: LLM, name: str) -> None:
    """Also where the markers are no tokens of the vocabulary: each is spelt in characters."""
    format = REASONING_FORMATS[name]
    renderer = with_template(llm, MESSAGES + format.opening, reasoning_parser=name)
    params = replace(PARAMS, thinking_token_budget=4, max_tokens=80)
    prompt = renderer.render(ChatRequest([Message("user", (TextPart("why?"),))], params))
    assert prompt.params.reasoning is not None
    assert prompt.params.reasoning.starts_inside
    (answer,) = llm._answer([prompt])
    close_ids = prompt.params.reasoning.close_ids
    framing = format.framing
    rest = f"{framing.next_message}{format.answer}" if framing is not None else ""  # on to the answer
    assert llm.tokenizer.decode(close_ids).strip() == format.closing + rest
    assert tuple(answer.token_ids[4 : 4 + len(close_ids)]) == close_ids
    assert answer.text.strip() == llm.tokenizer.decode(answer.token_ids[4 + len(close_ids) :]).strip()


def test_a_message_can_stand_before_the_forced_end(llm: LLM) -> None:
    renderer = with_template(llm, OPENED, budget_message=" Time is up.")
    params = replace(PARAMS, thinking_token_budget=4)
    prompt = renderer.render(ChatRequest([Message("user", (TextPart("why?"),))], params))
    (answer,) = llm._answer([prompt])
    assert (answer.reasoning or "").endswith(" Time is up.")


# -- efforts and parsers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("effort", "budget"), [*EFFORT_BUDGETS.items(), ("high", None), ("xhigh", None), (None, None), (7, None)]
)
def test_an_effort_is_a_budget_unless_the_template_knows_it(
    llm: LLM, effort: Any, budget: int | None
) -> None:
    kwargs = {} if effort is None else {"reasoning_effort": effort}
    request = ChatRequest([Message("user", (TextPart("?"),))], PARAMS, template_kwargs=kwargs)
    assert with_template(llm, OPENED).render(request).params.thinking_token_budget == budget
    knowing = with_template(llm, "{{ reasoning_effort }}" + OPENED)
    assert knowing.render(request).params.thinking_token_budget is None
    explicit = replace(request, params=replace(PARAMS, thinking_token_budget=9))
    assert with_template(llm, OPENED).render(explicit).params.thinking_token_budget == 9


def test_the_limit_of_the_server_holds_for_every_request(llm: LLM) -> None:
    def budget(given: int | None, effort: str | None = None) -> int | None:
        kwargs = {} if effort is None else {"reasoning_effort": effort}
        params = replace(PARAMS, thinking_token_budget=given)
        request = ChatRequest([Message("user", (TextPart("?"),))], params, template_kwargs=kwargs)
        renderer = with_template(llm, OPENED, max_thinking_tokens=700)
        return renderer.render(request).params.thinking_token_budget

    assert [budget(None), budget(900), budget(5)] == [700, 700, 5]
    assert [budget(None, "minimal"), budget(None, "low"), budget(None, "high")] == [512, 700, 700]


def test_the_parser_is_really_chosen(llm: LLM) -> None:
    request = ChatRequest([Message("user", (TextPart("?"),))], replace(PARAMS, thinking_token_budget=3))
    whole = "[THINK]so[/THINK]<think>hm</think>yes"

    def events(name: str) -> list[Any]:
        parser = with_template(llm, UNOPENED, reasoning_parser=name).render(request).new_parser()
        return [*parser.push(whole), *parser.finish()]

    assert events("think") == events("auto") == events("qwen3") == [TextDelta(whole)]
    reasoning, text = events("mistral")
    assert (reasoning, text) == (ReasoningDelta("so"), TextDelta("<think>hm</think>yes"))
    assert events("none") == [TextDelta(whole)]
    plain = with_template(llm, OPENED, reasoning_parser="none").render(request)
    assert plain.params.reasoning is None


def test_an_unknown_parser_is_refused_with_the_known_ones(llm: LLM) -> None:
    with pytest.raises(InvalidConfig, match=r"'qwen99' is not a reasoning parser\. Use one of auto, harmony"):
        with_template(llm, OPENED, reasoning_parser="qwen99")
    assert set(REASONING_FORMATS) <= set(PARSERS)
    with pytest.raises(InvalidConfig, match="max_thinking_tokens must be 0 or more, not -5"):
        with_template(llm, OPENED, max_thinking_tokens=-5)
