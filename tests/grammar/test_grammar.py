"""Grammar-constrained rows: they keep their form, speculate, and their neighbours do not notice."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, InvalidRequest, SamplingParams
from outrider.answer_form import Grammar
from outrider.grammar import compiler as compiler_module
from outrider.grammar.backend import tokenizer_source
from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.matcher import GrammarStuck
from patience import PATIENCE_S
from tiny_models import write_checkpoint

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMA = Grammar("json_schema", json.dumps(PERSON))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, "llama")
    with LLM(folder, max_rows=6, drafter="ngram") as llm:
        yield llm


@pytest.fixture(scope="module")
def compiler(llm: LLM) -> GrammarCompiler:
    facts = llm.engine.facts
    return GrammarCompiler(lambda: tokenizer_source(llm.tokenizer, facts.vocab_size, facts.eos_ids))


def params(grammar: Grammar | None, seed: int = 1, **changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=120, temperature=1.0, seed=seed, grammar=grammar, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", [0, 3, "auto"])
def test_answer_fits_the_schema(llm: LLM, depth: object) -> None:
    for seed in range(4):
        asked = replace(params(SCHEMA, seed, draft_depth=depth), max_tokens=400)  # a name may be long
        (out,) = llm.generate("a person: ", asked)
        assert out.finish_reason == "stop"
        person = json.loads(out.text)
        assert set(person) == {"name", "age"}
        assert isinstance(person["age"], int)


def test_regex_and_lark_and_any_object(llm: LLM) -> None:
    (out,) = llm.generate("x", params(Grammar("regex", "[a-c]{3}-[0-9]{2}")))
    assert re.fullmatch("[a-c]{3}-[0-9]{2}", out.text)
    (out,) = llm.generate("x", params(Grammar("lark", 'start: "yes" | "no"')))
    assert out.text in ("yes", "no")
    (out,) = llm.generate("x", params(Grammar("json_object"), logit_bias={}))
    assert out.text.startswith("{")


def test_depth_and_neighbours_do_not_change_a_constrained_answer(llm: LLM) -> None:
    alone = [llm.generate("p", params(SCHEMA, seed, draft_depth=0))[0].token_ids for seed in range(3)]
    free = llm.generate("q", params(None, 9, ignore_eos=True))[0].token_ids
    together = llm.generate(
        ["p", "q", "p", "p"],
        [
            params(SCHEMA, 0, draft_depth=8),
            params(None, 9, ignore_eos=True),
            params(SCHEMA, 1, draft_depth=2),
            params(SCHEMA, 2),
        ],
    )
    assert [together[i].token_ids for i in (0, 2, 3)] == alone
    assert together[1].token_ids == free


def test_forced_tokens_are_free_drafts(llm: LLM) -> None:
    (plain,) = llm.generate("p", params(SCHEMA, 5, draft_depth=0))
    (drafted,) = llm.generate("p", params(SCHEMA, 5, draft_depth=8))
    assert drafted.token_ids == plain.token_ids
    assert sum(drafted.stats.accepted) >= 10  # {"name":" and ","age": leave no choice
    assert drafted.stats.steps < plain.stats.steps


def test_grammar_starts_after_the_reasoning(llm: LLM) -> None:
    end = tuple(llm.tokenizer.encode("z", add_special_tokens=False))
    grammar = Grammar("regex", "[0-9]{4}", after_ids=end)
    for depth in (0, 4):
        bias = {end[0]: 3.0}
        (out,) = llm.generate("think", params(grammar, 3, logit_bias=bias, draft_depth=depth))
        reasoning, answer = out.text.split("z", 1)
        assert re.fullmatch("[0-9]{4}", answer)
        assert not re.fullmatch("[0-9]*", reasoning)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", "{not json"),
        Grammar("json_schema", '{"type": "nonsense"}'),
        Grammar("json_schema", '{"$ref": "#/nowhere"}'),
        Grammar("json_schema", '{"$ref": "#"}'),
        Grammar("regex", "(unclosed"),
        Grammar("lark", "no start rule here"),
    ],
)
def test_bad_grammar_is_refused_with_a_reason_and_the_engine_serves_on(llm: LLM, grammar: Grammar) -> None:
    with pytest.raises(InvalidRequest, match="grammar"):
        llm.generate("x", params(grammar))
    assert llm.generate("x", params(None, ignore_eos=True))[0].finish_reason == "length"


def test_ignore_eos_is_refused_with_a_grammar(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="ignore_eos"):
        llm.generate("x", params(SCHEMA, ignore_eos=True))


def test_masks_of_a_window_are_those_of_plain_steps(llm: LLM, compiler: GrammarCompiler) -> None:
    tokens = llm.tokenizer.encode('{"name":"ab","age":7}', add_special_tokens=False)
    walker, window = compiler.new_row(SCHEMA), compiler.new_row(SCHEMA)
    for start in range(0, len(tokens), 3):
        drafts = tokens[start : start + 3]
        masks = window.masks(drafts)
        assert masks is not None
        for i, draft in enumerate([*drafts, None]):
            expected = walker.masks(())
            assert expected is not None
            assert (masks[i] == expected[0]).all()
            if draft is not None:
                walker.commit(draft)
        for draft in drafts:
            window.commit(draft)


def test_drafts_that_the_grammar_forbids_are_cut(llm: LLM, compiler: GrammarCompiler) -> None:
    row = compiler.new_row(Grammar("regex", "abcd"))
    ids = [llm.tokenizer.encode(c, add_special_tokens=False)[0] for c in "abxd"]
    assert row.num_allowed(ids) == 2
    assert row.num_allowed(ids[2:]) == 0
    row.commit(ids[0])
    assert row.num_allowed(ids[1:]) == 1
    with pytest.raises(GrammarStuck):
        row.commit(ids[2])


def test_drafted_end_is_left_to_the_bonus(llm: LLM, compiler: GrammarCompiler) -> None:
    """llguidance does not step back over an end: drafting one would break a row whose earlier draft falls."""
    row = compiler.new_row(Grammar("regex", "a[bc]{1,2}"))
    a, b, c = (llm.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abc")
    end = min(llm.engine.facts.eos_ids)
    for drafts in ([a, b, end], [a, b, b, end], [a, b, b, end, a]):
        num = row.num_allowed(drafts)
        assert drafts[num] == end
        row.masks(drafts[:num])
    row.commit(a)
    row.commit(c)  # not what was drafted
    assert row.num_allowed([end]) == 0
    row.commit(end)


def test_end_in_the_drafts_changes_nothing(llm: LLM) -> None:
    """The prediction is right but for a part, and holds the end that the grammar asks for."""
    grammar = Grammar("regex", "[a-c]{6}")
    end = min(llm.engine.facts.eos_ids)
    letters = [llm.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abc"]
    for seed in range(6):
        (plain,) = llm.generate("p", params(grammar, seed, draft_depth=0))
        for wrong in range(6):
            prediction = list(plain.token_ids)
            prediction[wrong] = next(i for i in letters if i != prediction[wrong])
            assert prediction[-1] == end
            (drafted,) = llm.generate("p", params(grammar, seed, prediction_ids=prediction))
            assert (drafted.token_ids, drafted.finish_reason) == (plain.token_ids, "stop")


def test_slow_grammar_of_one_client_does_not_hold_up_the_rows_of_others(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling, may_go_on = threading.Event(), threading.Event()
    new_matcher = compiler_module.new_matcher

    def slow_new_matcher(tokenizer: Any, grammar: Grammar) -> Any:
        if grammar.text == "slow":
            compiling.set()
            assert may_go_on.wait(PATIENCE_S)
        return new_matcher(tokenizer, grammar)

    monkeypatch.setattr(compiler_module, "new_matcher", slow_new_matcher)
    compiler.new_row(SCHEMA)
    slow = threading.Thread(target=compiler.new_row, args=(Grammar("regex", "slow"),))
    slow.start()
    assert compiling.wait(PATIENCE_S)
    others = threading.Thread(target=compiler.new_row, args=(SCHEMA,), daemon=True)
    others.start()
    others.join(PATIENCE_S)
    hung = others.is_alive()
    may_go_on.set()
    slow.join(PATIENCE_S)
    assert not hung


def test_waiting_grammar_lets_no_draft_past_the_marker(compiler: GrammarCompiler) -> None:
    row = compiler.new_row(Grammar("regex", "a", after_ids=(50, 51)))
    assert row.masks([1, 2]) is None
    assert row.num_allowed([1, 50, 51, 2]) == 2
    row.commit(50)
    assert row.num_allowed([51, 2]) == 0
    assert row.num_allowed([50, 51]) == 1
    row.commit(51)
    assert row.masks(()) is not None


def test_prediction_becomes_drafts_and_changes_nothing(llm: LLM) -> None:
    def ask(**changes: object) -> SamplingParams:
        return SamplingParams(max_tokens=40, temperature=0.7, seed=4, ignore_eos=True, **changes)  # type: ignore[arg-type]

    (plain,) = llm.generate("predict", ask(draft_depth=0))
    prediction = list(plain.token_ids)
    prediction[10:12] = [7, 7, 7]  # a part that was edited
    (drafted,) = llm.generate("predict", ask(prediction_ids=prediction, draft_depth=8))
    assert drafted.token_ids == plain.token_ids
    assert sum(drafted.stats.accepted) >= 25
    assert drafted.stats.steps < 15


def test_a_validated_request_with_a_grammar_can_be_submitted_again(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, temperature=0, grammar=Grammar("regex", "[0-9]{4}"))
    validated = llm.engine.validate(llm.tokenizer.encode("a year:"), params)
    texts = []
    for _ in range(2):
        outbox, text, reason = llm.engine.submit(validated), "", None
        while reason is None:
            delta = outbox.take(timeout_s=PATIENCE_S)
            assert delta is not None
            text, reason = text + delta.text, delta.finish_reason
        texts.append(text)
        assert reason == "stop"
    assert texts[0] == texts[1]
    assert len(texts[0]) == 4
