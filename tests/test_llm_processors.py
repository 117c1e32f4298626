"""Bans, functions of the user and ends of texts through `LLM`: with drafts and without, in a mixed batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_logits_processors

from outrider import LLM, InvalidRequest, SamplingParams
from outrider.llm import Completion, GenerationFailed
from tiny_models import write_checkpoint

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
HOT = replace(GREEDY, temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("tiny-llama")
    write_checkpoint(folder, "llama")
    with LLM(folder, max_rows=4, drafter="ngram") as llm:
        yield llm


def answers(llm: LLM, params: SamplingParams) -> list[Completion]:
    """Without drafts; with drafts that are mostly right; and the same beside rows of other kinds."""
    (plain,) = llm.generate("some prompt", replace(params, draft_depth=0))
    prediction = list(plain.token_ids)
    prediction[3:4] = [1, 2]
    drafting = replace(params, draft_depth=4, prediction_ids=prediction)
    (drafted,) = llm.generate("some prompt", drafting)
    others = [HOT, replace(GREEDY, presence_penalty=1.0), replace(HOT, logprobs=2)]
    mixed = llm.generate(["a", "some prompt", "b b", "c"], [others[0], drafting, *others[1:]])
    assert [one.token_ids for one in llm.generate(["a", "b b", "c"], others)] == [
        one.token_ids for i, one in enumerate(mixed) if i != 1
    ]
    return [plain, drafted, mixed[1]]


def same_tokens(llm: LLM, params: SamplingParams) -> list[int]:
    found = answers(llm, params)
    assert found[0].token_ids == found[1].token_ids == found[2].token_ids
    num_drafted, num_accepted = sum(found[1].stats.drafted), sum(found[1].stats.accepted)
    assert num_accepted > 0
    if not params.allowed_token_ids:  # else wrong drafts are not even fed
        assert num_drafted > num_accepted
    return found[0].token_ids


def plain_tokens(llm: LLM, params: SamplingParams) -> list[int]:
    return llm.generate("some prompt", replace(params, draft_depth=0))[0].token_ids


# -- functions -------------------------------------------------------------------------------------------


def banned_pairs(pairs: set[tuple[int, int]]):  # type: ignore[no-untyped-def]
    """A plain reference of bad words with two tokens."""

    def ban(tokens: mx.array, logits: mx.array) -> mx.array:
        last = int(tokens[-1])
        for first, second in pairs:
            if first == last:
                logits[:, second] = -mx.inf
        return logits

    return ban


@pytest.mark.parametrize("params", [GREEDY, HOT], ids=["greedy", "sampled"])
def test_a_function_changes_the_answer_the_same_way_with_drafts_and_without(
    llm: LLM, params: SamplingParams
) -> None:
    plain = plain_tokens(llm, params)
    pairs = {(plain[4], plain[5]), (plain[9], plain[10])}
    found = same_tokens(llm, replace(params, logits_processors=[banned_pairs(pairs)]))
    first = next(i for i, pair in enumerate(pairwise(plain), 1) if pair in pairs)
    assert found[:first] == plain[:first]
    assert found[first] != plain[first]
    assert not pairs & set(pairwise(found))


def test_mlx_lms_own_processors_can_be_used(llm: LLM) -> None:
    functions = make_logits_processors(repetition_penalty=1.7, repetition_context_size=100)
    found = same_tokens(llm, replace(GREEDY, logits_processors=functions))
    assert found == plain_tokens(llm, replace(GREEDY, repetition_penalty=1.7))


@pytest.mark.parametrize("depth", [0, 4])
def test_an_error_in_a_function_ends_its_own_request_only(llm: LLM, depth: int) -> None:
    plain = plain_tokens(llm, GREEDY)
    num_prompt = len(llm.tokenizer.encode("some prompt"))

    def fails(tokens: mx.array, logits: mx.array) -> mx.array:
        if len(tokens) - num_prompt >= 6:
            raise RuntimeError("six is enough")
        return logits

    params = replace(GREEDY, logits_processors=[fails], draft_depth=depth, prediction_ids=plain)
    neighbour = llm.stream("some prompt", GREEDY)
    stream = llm.stream("some prompt", params)
    with pytest.raises(GenerationFailed, match="a logits processor failed: RuntimeError: six is enough"):
        stream.completion()
    assert neighbour.completion().token_ids == plain
    assert llm.generate("some prompt", GREEDY)[0].token_ids == plain


def test_an_error_for_a_draft_that_is_rejected_does_no_harm(llm: LLM) -> None:
    plain = plain_tokens(llm, GREEDY)
    wrong = next(i for i in range(100) if i not in plain)

    def fails_on_wrong(tokens: mx.array, logits: mx.array) -> mx.array:
        if wrong in tokens.tolist():
            raise RuntimeError("a token that is never committed")
        return logits

    prediction = [*plain[:3], wrong, *plain[4:]]
    params = replace(GREEDY, logits_processors=[fails_on_wrong], draft_depth=4, prediction_ids=prediction)
    assert llm.generate("some prompt", params)[0].token_ids == plain


def test_a_row_whose_tokens_are_all_excluded_ends_with_an_error(llm: LLM) -> None:
    nothing = replace(GREEDY, logits_processors=[lambda tokens, logits: logits - mx.inf])
    with pytest.raises(GenerationFailed, match="no token is left to sample"):
        llm.generate("some prompt", nothing)
    some = plain_tokens(llm, GREEDY)[0]
    both = replace(GREEDY, allowed_token_ids=[some], bad_word_ids=[[some, some]])
    with pytest.raises(GenerationFailed, match="no token is left to sample"):
        llm.generate("some prompt", both)


# -- allowed tokens and bad words ------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, HOT], ids=["greedy", "sampled"])
def test_only_allowed_tokens_are_sampled(llm: LLM, params: SamplingParams) -> None:
    allowed = list(range(20, 60, 3))
    found = same_tokens(llm, replace(params, allowed_token_ids=allowed))
    assert set(found) <= set(allowed)

    def reference(tokens: mx.array, logits: mx.array) -> mx.array:
        ids = mx.arange(logits.shape[-1])
        is_allowed = (ids[:, None] == mx.array(allowed)).any(axis=1)
        return mx.where(is_allowed, logits, -mx.inf)

    assert found == plain_tokens(llm, replace(params, logits_processors=[reference]))


@pytest.mark.parametrize("params", [GREEDY, HOT], ids=["greedy", "sampled"])
def test_bad_words_do_not_occur(llm: LLM, params: SamplingParams) -> None:
    plain = plain_tokens(llm, params)
    pairs = {(plain[2], plain[3]), (plain[7], plain[8]), (plain[12], plain[13])}
    found = same_tokens(llm, replace(params, bad_word_ids=[*pairs, [plain[0]]]))
    assert plain[0] not in found
    assert not pairs & set(pairwise(found))

    def first(tokens: mx.array, logits: mx.array) -> mx.array:
        logits[:, plain[0]] = -mx.inf
        return logits

    num_prompt = len(llm.tokenizer.encode("some prompt"))

    def in_answer(tokens: mx.array, logits: mx.array) -> mx.array:
        return banned_pairs(pairs)(tokens, logits) if len(tokens) > num_prompt else logits

    assert found == plain_tokens(llm, replace(params, logits_processors=[first, in_answer]))


def test_bad_words_are_written_as_the_tokenizer_writes_them(llm: LLM) -> None:
    prompt = llm.renderer.render_text("x", replace(GREEDY, bad_words=["no", " yes"], bad_word_ids=[[7]]))
    encode = llm.renderer._vocabulary.encode
    expected = {tuple(encode(text)) for text in ("no", " no", "yes", " yes")} | {(7,)}
    assert set(map(tuple, prompt.params.bad_word_ids)) == expected
    (out,) = llm.generate("some prompt", replace(GREEDY, bad_words=["e", "a"]))
    assert not {(i,) for i in out.token_ids} & {tuple(encode(text)) for text in ("e", " e", "a", " a")}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"allowed_token_ids": [10**6]}, "outside the vocabulary"),
        ({"bad_word_ids": [[1, 10**6]]}, "outside the vocabulary"),
        ({"allowed_token_ids": [3], "logit_bias": {3: -float("inf")}}, "leave one token"),
        ({"allowed_token_ids": [3], "bad_word_ids": [[3]]}, "leave one token"),
    ],
)
def test_bans_that_cannot_be_honoured_are_refused(llm: LLM, params: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm.generate("x", SamplingParams(**params))  # type: ignore[arg-type]


def test_the_engine_refuses_bad_words_that_nobody_has_encoded(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="bad_word_ids"):
        llm.engine.validate([1, 2], SamplingParams(bad_words=["no"]))


# -- ends and beginnings of texts ------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 4])
def test_the_text_may_include_the_stop_string(llm: LLM, depth: int) -> None:
    (whole,) = llm.generate("some prompt", GREEDY)
    stop = whole.text[5:7]
    end = whole.text.index(stop) + len(stop)
    params = replace(GREEDY, stop=stop, draft_depth=depth, prediction_ids=whole.token_ids)
    (cut,) = llm.generate("some prompt", params)
    (included,) = llm.generate("some prompt", replace(params, include_stop_str_in_output=True))
    assert cut.text == whole.text[: end - len(stop)]
    assert included.text == whole.text[:end]
    assert included.token_ids == cut.token_ids
    assert included.finish_reason == "stop"


def test_the_text_may_include_the_stop_token(llm: LLM) -> None:
    (whole,) = llm.generate("some prompt", GREEDY)
    stop_id = whole.token_ids[6]
    num = whole.token_ids.index(stop_id) + 1
    params = replace(GREEDY, stop_token_ids=[stop_id])
    (cut,) = llm.generate("some prompt", params)
    (included,) = llm.generate("some prompt", replace(params, include_stop_str_in_output=True))
    (expected,) = llm.generate("some prompt", replace(GREEDY, max_tokens=num))
    assert included.text == expected.text
    assert included.text.startswith(cut.text)
    assert included.text != cut.text


def test_a_prompt_is_cut_to_its_last_tokens(llm: LLM) -> None:
    ids = llm.tokenizer.encode("a prompt with more than a few tokens")
    params = replace(GREEDY, truncate_prompt_tokens=5)
    for prompt in ("a prompt with more than a few tokens", ids):
        (out,) = llm.generate(prompt, params)
        assert out.prompt_token_ids == list(ids[-5:])
        assert out.token_ids == llm.generate(ids[-5:], GREEDY)[0].token_ids
    (short,) = llm.generate("ab", replace(params, truncate_prompt_tokens=500))
    assert short.prompt_token_ids == list(llm.tokenizer.encode("ab"))


def test_minus_one_cuts_a_prompt_to_what_fits(llm: LLM) -> None:
    context = llm.engine.facts.max_context
    long = "word " * (3 * context)
    with pytest.raises(InvalidRequest, match="shorten it"):
        llm.generate(long, GREEDY)
    (out,) = llm.generate(long, replace(GREEDY, truncate_prompt_tokens=-1))
    assert len(out.prompt_token_ids) == context - 24
    assert len(out.token_ids) == 24


def test_a_conversation_is_cut_too(llm: LLM) -> None:
    chat = [{"role": "user", "content": "many words of a question"}]
    whole = llm.chat(chat, GREEDY)
    cut = llm.chat(chat, replace(GREEDY, truncate_prompt_tokens=6))
    assert cut.prompt_token_ids == whole.prompt_token_ids[-6:]


def test_the_engine_does_not_cut_prompts_itself(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="cut it before"):
        llm.engine.validate([1, 2, 3], SamplingParams(truncate_prompt_tokens=2))
