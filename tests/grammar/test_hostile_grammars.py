"""Grammars that are meant to do harm: each is refused or served; the process and the other rows live on."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import llguidance
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hostile_grammars import ambiguous, lark, reference_chain, rule_chain, schema, wide_schema
from outrider import LLM, InvalidRequest, SamplingParams
from outrider.answer_form import Grammar
from outrider.engine.draft_state import DraftState, Proposal
from outrider.grammar import backend, child, matcher
from outrider.grammar import checker as checker_module
from outrider.grammar import compiler as compiler_module
from outrider.grammar.backend import TokenizerSource, new_matcher, tokenizer_source
from outrider.grammar.checker import GrammarChecker
from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.matcher import CompiledGrammar, GrammarStuck, RowGrammar
from outrider.isolation.messages import Message
from outrider.isolation.worker import IsolatedWorker, JobTimedOut
from outrider.llm import GenerationFailed
from tiny_models import write_checkpoint

EXPLODING = Grammar("regex", "(a|b)*a(a|b){12}c")  # its lexer has thousands of states


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, "llama")
    with LLM(folder, max_rows=4, drafter="ngram") as llm:
        yield llm


@pytest.fixture(scope="module")
def source(llm: LLM) -> TokenizerSource:
    return tokenizer_source(llm.tokenizer, llm.engine.facts.vocab_size, llm.engine.facts.eos_ids)


@pytest.fixture(scope="module")
def compiler(source: TokenizerSource) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(lambda: source)
    yield compiler
    compiler.close()


def row_of(source: TokenizerSource, grammar: Grammar) -> RowGrammar:
    """A row whose grammar the worker has not seen."""
    tokenizer = source.build()
    compiled = CompiledGrammar(lambda: new_matcher(tokenizer, grammar))
    return RowGrammar(compiled, source.vocab_size, source.eos_ids)


def allowed(row: RowGrammar) -> list[int]:
    masks = row.masks(())
    assert masks is not None
    return [int(i) for i in np.unpackbits(masks[0].view(np.uint8), bitorder="little").nonzero()[0]]


@pytest.mark.parametrize("grammar", [lark(rule_chain(10_000)), schema(reference_chain(3_000))])
def test_chain_that_overflows_the_stack_is_refused(compiler: GrammarCompiler, grammar: Grammar) -> None:
    for _ in range(2):  # the second time by the verdict
        with pytest.raises(InvalidRequest, match="too complex"):
            compiler.new_row(grammar)
    assert allowed(compiler.new_row(Grammar("regex", "[ab]")))


@pytest.mark.parametrize(
    "grammar", [lark(rule_chain(3_000)), schema(reference_chain(1_000)), schema(wide_schema(500))]
)
def test_large_grammar_is_served(compiler: GrammarCompiler, grammar: Grammar) -> None:
    row = compiler.new_row(grammar)
    for _ in range(6):
        row.commit(allowed(row)[0])


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (schema(wide_schema(10_000)), "10,000 optional properties; the limit is 1,000"),
        (schema({"items": {"anyOf": [wide_schema(1_001)]}}), "1,001 optional properties"),
        (lark(f"start: %json {json.dumps(wide_schema(3_000))}"), "too complex"),
        (schema({"enum": ["x" * 600_000]}), "the limit is 524,288"),
        (lark(ambiguous(400)), "too complex"),
        (Grammar("regex", "\ud800"), "Unicode"),
        (Grammar("regex", ""), "empty answer"),
    ],
)
def test_grammar_that_takes_too_much_is_refused(
    compiler: GrammarCompiler, grammar: Grammar, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(reason)):
        compiler.new_row(grammar)


def test_required_properties_are_not_bounded(compiler: GrammarCompiler) -> None:
    wide = wide_schema(3_000)
    assert allowed(compiler.new_row(schema({**wide, "required": list(wide["properties"])})))


def test_cached_grammars_have_a_bound_in_bytes(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = [schema({"enum": [letter * 2_000]}) for letter in "abcd"]
    for grammar in grammars:
        compiler.new_row(grammar)
    sizes = [compiler._compiled[grammar][1] for grammar in grammars]
    assert min(sizes) > 2_000
    monkeypatch.setattr(compiler_module, "MAX_CACHED_BYTES", sum(sizes[1:]) - 1)
    compiler.new_row(schema({"enum": ["e"]}))
    assert len([grammar for grammar in grammars if grammar in compiler._compiled]) < len(grammars)
    compiler.new_row(grammars[0])


def test_rows_go_on_when_their_shared_lexer_is_full(
    source: TokenizerSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matchers of a grammar share lexer states: without a new lexer one row would end them all."""
    unlimited = [row_of(source, EXPLODING) for _ in range(3)]
    monkeypatch.setattr(backend, "MAX_LEXER_STATES", 300)
    tokenizer, num_compiled = source.build(), 0

    def compile() -> Any:
        nonlocal num_compiled
        num_compiled += 1
        return new_matcher(tokenizer, EXPLODING)

    compiled = CompiledGrammar(compile)
    rows = [RowGrammar(compiled, source.vocab_size, source.eos_ids) for _ in range(3)]
    choice = np.random.default_rng(0)
    for _ in range(60):
        for row, reference in zip(rows, unlimited, strict=True):
            expected = allowed(reference)
            assert allowed(row) == expected
            token_id = int(choice.choice(expected[:2]))  # a or b
            row.commit(token_id)
            reference.commit(token_id)
    assert num_compiled > 1


def test_lexer_that_one_row_has_worn_out_ends_that_row_only(
    source: TokenizerSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step may build a limited number of expressions. Beyond it the shared lexer fails for good."""
    limits = partial(llguidance.LLParserLimits, step_lexer_fuel=300)
    monkeypatch.setattr(llguidance, "LLParserLimits", limits)
    costly = Grammar("regex", "c+|(a|b)*a(a|b){60}")  # each a makes later steps more costly
    tokenizer = source.build()
    compiled = CompiledGrammar(lambda: new_matcher(tokenizer, costly))
    first, neighbour = (RowGrammar(compiled, source.vocab_size, source.eos_ids) for _ in range(2))
    a, b, c = expected = allowed(neighbour)[:3]
    neighbour.commit(c)

    def go_on() -> None:
        for token_id in random.Random(0).choices([a, b], k=100):
            first.masks(())
            first.commit(token_id)

    with pytest.raises(GrammarStuck, match="too many expressions"):
        go_on()
    assert c in allowed(neighbour)
    neighbour.commit(c)
    assert allowed(RowGrammar(compiled, source.vocab_size, source.eos_ids))[:3] == expected


def test_grammar_that_fails_after_a_draft_cuts_the_drafts(llm: LLM, source: TokenizerSource) -> None:
    """The engine plans with these masks: an error there would end all rows."""
    row = row_of(source, lark(f'start: "x" (wide | "y")\nwide: %json {json.dumps(wide_schema(3_000))}'))
    drafts = llm.tokenizer.encode('x{"p1":', add_special_tokens=False)
    masks = row.masks(drafts)
    assert masks is not None
    assert len(masks) == 2  # before "x" and before "{"
    assert row.masks(drafts[:1]) is not None  # the row is as before
    row.commit(drafts[0])
    with pytest.raises(GrammarStuck, match="items"):
        row.commit(drafts[1])


def test_grammar_that_fails_over_its_drafts_costs_the_drafts_only(source: TokenizerSource) -> None:
    """The engine plans all rows here: an error would end them all."""
    row = row_of(source, Grammar("regex", "[ab]*"))
    (a, *_) = allowed(row)
    drafting = DraftState(grammar=row, proposals=[Proposal("ngram", [a, a])])
    masks = drafting.masks
    failing = Mock(wraps=row)
    failing.masks.side_effect = GrammarStuck("too many expressions")
    drafting.grammar = failing
    drafting.use(0, 2)
    assert not drafting.drafts
    assert masks is not None
    assert drafting.masks is not None
    assert np.array_equal(drafting.masks, masks)


def test_row_whose_masks_take_too_long_ends(source: TokenizerSource, monkeypatch: pytest.MonkeyPatch) -> None:
    row = row_of(source, Grammar("regex", "[ab]*"))
    monkeypatch.setattr(matcher, "MAX_CALL_S", 0.0)
    (first, *_) = allowed(row)
    with pytest.raises(GrammarStuck, match="too complex"):
        row.commit(first)


def test_number_of_drafts_does_not_end_a_row(
    source: TokenizerSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each position has the time limit for itself."""
    row = row_of(source, Grammar("regex", "[ab]*"))
    (first, *_) = allowed(row)
    clock_s = 0.0
    compute_bitmask = row._matcher.compute_bitmask

    def compute_slowly() -> bytes:
        nonlocal clock_s
        clock_s += 0.9 * matcher.MAX_CALL_S
        return bytes(compute_bitmask())

    slow = Mock(wraps=row._matcher, compute_bitmask=compute_slowly)
    monkeypatch.setattr(row, "_matcher", slow)
    monkeypatch.setattr(matcher.time, "thread_time", lambda: clock_s)
    masks = row.masks([first] * 4)
    assert masks is not None
    assert (len(masks), clock_s) == (5, pytest.approx(4.5 * matcher.MAX_CALL_S))
    row.commit(first)


@pytest.mark.parametrize("took_too_long", [True, False])
def test_refusal_of_a_busy_machine_is_not_remembered(
    source: TokenizerSource, monkeypatch: pytest.MonkeyPatch, took_too_long: bool
) -> None:
    replies = iter([{"refused": "no", "took_too_long": took_too_long}, {"num_bytes": 7}])
    monkeypatch.setattr(IsolatedWorker, "call", lambda *_: Message(next(replies)))
    checker, grammar = GrammarChecker(lambda: source), Grammar("regex", "a")
    with pytest.raises(InvalidRequest, match="no"):
        checker.check(grammar)
    if took_too_long:
        assert checker.check(grammar) == 7
    else:
        with pytest.raises(InvalidRequest, match="no"):
            checker.check(grammar)


def test_time_out_is_not_remembered(source: TokenizerSource, monkeypatch: pytest.MonkeyPatch) -> None:
    def time_out(*_: object) -> Message:
        raise JobTimedOut("it took more than 60 s")

    checker, grammar = GrammarChecker(lambda: source), Grammar("regex", "a")
    monkeypatch.setattr(IsolatedWorker, "call", time_out)
    with pytest.raises(InvalidRequest, match="60 s"):
        checker.check(grammar)
    monkeypatch.setattr(IsolatedWorker, "call", lambda *_: Message({"num_bytes": 7}))
    assert checker.check(grammar) == 7


def test_child_says_if_its_refusal_is_a_matter_of_time(
    source: TokenizerSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = child.new_handler(checker_module._set_up(source))
    job = Message({"kind": "regex"}, b"[ab]*")
    assert "refused" not in handle(job)[0]
    assert handle(Message({"kind": "regex"}, b""))[0]["took_too_long"] is False
    monkeypatch.setattr(child, "MAX_STEP_S", -1.0)
    assert handle(job)[0]["took_too_long"] is True


def test_grammar_that_fails_in_an_answer_ends_that_answer_only(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker sees the first positions only; a later one fails here."""
    params = SamplingParams(max_tokens=60, temperature=0, seed=1)
    free = SamplingParams(max_tokens=40, temperature=1, seed=3, ignore_eos=True)
    (alone,) = llm.generate("q", free)
    late = lark(f"start: /[x-z]{{40}}/ %json {json.dumps(wide_schema(3_000))}")
    streams = [llm.stream("p", SamplingParams(max_tokens=60, grammar=late)), llm.stream("q", free)]
    with pytest.raises(GenerationFailed, match="items"):
        list(streams[0])
    assert tuple(i for delta in streams[1] for i in delta.token_ids) == tuple(alone.token_ids)
    assert llm.generate("x", params)[0].finish_reason in ("length", "stop")


def test_answer_of_a_model_with_fewer_ids_than_its_tokenizer(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    more = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    first = len(tokenizer["model"]["vocab"])
    tokenizer["added_tokens"] += [{**more, "id": first + i, "content": f"<ab{i}>"} for i in range(60)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with LLM(tmp_path, max_rows=1) as llm:
        assert len(llm.tokenizer.get_vocab()) > llm.engine.facts.vocab_size
        params = SamplingParams(max_tokens=30, seed=1, grammar=Grammar("regex", "<ab[0-9]{2}>"))
        (out,) = llm.generate("x", params)
    assert re.fullmatch("<ab[0-9]{2}>", out.text)


def test_masks_are_cut_to_the_ids_of_the_model(source: TokenizerSource) -> None:
    small = TokenizerSource(source.text, source.vocab_size - 20, source.eos_ids)
    compiler = GrammarCompiler(lambda: small)
    row = compiler.new_row(Grammar("regex", "[ -~]{5}"))
    for _ in range(5):
        ids = allowed(row)
        assert ids
        assert max(ids) < small.vocab_size
        row.commit(ids[-1])
    compiler.close()


SOAK_S = float(os.environ.get("OUTRIDER_SOAK_SECONDS", 0))
NAMES = st.sampled_from(["a", "b", "name", "x y", "é", "$ref", ""])
LEAVES = st.one_of(
    st.sampled_from([True, {}, {"type": "string"}, {"type": "integer"}, {"type": "null"}, {"$ref": "#"}]),
    st.builds(lambda n, m: {"type": "string", "minLength": n, "maxLength": m}, *[st.integers(0, 10**6)] * 2),
    st.builds(lambda n, m: {"type": "number", "minimum": n, "maximum": m}, *[st.floats(-1e9, 1e9)] * 2),
    st.builds(lambda n: {"type": "integer", "multipleOf": n}, st.integers(1, 10**7)),
    st.builds(lambda values: {"enum": values}, st.lists(st.text(max_size=6) | st.integers(), max_size=30)),
    st.builds(lambda format: {"type": "string", "format": format}, st.sampled_from(["date", "uuid", "no"])),
    st.builds(lambda name: {"$ref": f"#/properties/{name}"}, NAMES),
)
REGEXES = st.recursive(
    st.sampled_from(["a", "b", ".", "[^a]", "\\d", "[a-z0-9]", "\\w", "é", "x*", ""]),
    lambda inner: st.one_of(
        st.builds(lambda a, b: a + b, inner, inner),
        st.builds(lambda a, b: f"(?:{a}|{b})", inner, inner),
        st.builds(lambda a, n, m: f"(?:{a}){{{n},{n + m}}}", inner, st.integers(0, 99), st.integers(0, 999)),
        st.builds(lambda a, how: f"({a}){how}", inner, st.sampled_from("*+?")),
    ),
    max_leaves=12,
)
SCHEMAS = st.recursive(
    LEAVES | st.builds(lambda pattern: {"type": "string", "pattern": pattern}, REGEXES),
    lambda inner: st.one_of(
        st.builds(
            lambda properties, required, others: {
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": others,
            },
            st.dictionaries(NAMES, inner, max_size=6),
            st.lists(NAMES, max_size=3, unique=True),
            st.booleans() | inner,
        ),
        st.builds(
            lambda items, n, m: {"type": "array", "items": items, "minItems": n, "maxItems": m},
            inner,
            st.integers(0, 1000),
            st.integers(0, 1000),
        ),
        st.builds(
            lambda word, parts: {word: parts},
            st.sampled_from(["anyOf", "oneOf", "allOf", "prefixItems"]),
            st.lists(inner, max_size=5),
        ),
    ),
    max_leaves=20,
)
PARTS = st.one_of(
    st.sampled_from(['"a"', '"b"', "start", "r1", "r2", "T1", "T2", '""', "<[3]>", "/./", "%json {}", "("]),
    REGEXES.map(lambda regex: "/" + regex.replace("/", "") + "/"),
)
LARKS = st.builds(
    lambda rules: "\n".join(f"{name}: {body}" for name, body in rules.items()),
    st.dictionaries(
        st.sampled_from(["start", "r1", "r2", "T1", "T2"]),
        st.lists(
            st.builds(lambda part, how: part + how, PARTS, st.sampled_from(["", "", "*", "+", "?", " |"])),
            max_size=6,
        ).map(" ".join),
        max_size=5,
    ),
)
GRAMMARS = st.one_of(
    SCHEMAS.map(schema),
    REGEXES.map(lambda text: Grammar("regex", text)),
    LARKS.map(lark),
    st.builds(Grammar, st.sampled_from(["regex", "lark", "json_schema"]), st.text(max_size=60)),
)


def tries(num_in_tests: int, num_in_soak: int) -> Any:
    return settings(
        max_examples=num_in_soak if SOAK_S else num_in_tests,
        deadline=None,
        database=None,
        derandomize=not SOAK_S,
        suppress_health_check=list(HealthCheck),
    )


@tries(60, 5_000)
@given(grammar=GRAMMARS, choice=st.randoms(use_true_random=False))
def test_any_grammar_is_refused_or_served(compiler: GrammarCompiler, grammar: Grammar, choice: Any) -> None:
    try:
        row = compiler.new_row(grammar)
    except InvalidRequest:
        return
    try:
        for _ in range(20):
            ids = [i for i in allowed(row) if i not in row._eos_ids]
            if not ids:
                return
            drafts = row.forced(8) or [choice.choice(ids)]
            assert 1 <= len(row.masks(drafts[: row.num_allowed(drafts)])) <= 9  # type: ignore[arg-type]
            row.commit(choice.choice(ids))
    except GrammarStuck:
        return
