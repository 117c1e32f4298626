"""Conversations that a model makes up: each a function of its number, half of them greedy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import BARE, CHATML, checked, new_tokenizer

from outrider import LLM, SamplingParams
from outrider.chat.conversation import ChatRequest, Message, TextPart
from outrider.chat.renderer import ChatRenderer
from outrider.train import conversations, openings
from outrider.train.conversations import Synthesis
from outrider.train.errors import TrainingError
from outrider.train.exchanges import Exchange
from outrider.train.scripts import ChatScript, PlainScript, script_for
from outrider.train.settings import TrainingSettings
from tiny_models import END_ID, write_checkpoint

SETTINGS = TrainingSettings(max_tokens=24, seed=3)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, "llama", num_hidden_layers=1)
    with LLM(folder, drafter="none", max_rows=8) as llm:
        yield llm


def _converse(llm: LLM, numbers: list[int], tokenizer: Any = None, prompts: Any = ()) -> list[list[Exchange]]:
    synthesis = Synthesis(llm.async_engine, tokenizer or llm.tokenizer, SETTINGS, prompts)

    async def all_of_them() -> list[list[Exchange]]:
        return list(await asyncio.gather(*(synthesis.conversation(number) for number in numbers)))

    return asyncio.run(all_of_them())


def _greedy(llm: LLM, exchange: Exchange) -> tuple[int, ...]:
    (out,) = llm.generate(exchange.prompt_ids, SamplingParams(max_tokens=24, temperature=0))
    return conversations.cut_loop(out.token_ids) if out.finish_reason == "length" else out.token_ids


def test_a_conversation_is_a_function_of_its_number(llm: LLM) -> None:
    together = _converse(llm, list(range(12)))
    assert _converse(llm, [7, 3]) == [together[7], together[3]]
    assert len({exchange for one in together for exchange in one}) == sum(map(len, together))


def test_half_the_answers_and_all_that_are_held_out_are_greedy(llm: LLM) -> None:
    made = _converse(llm, list(range(20)))
    surprises = 0
    for number, exchanges in enumerate(made):
        for one in exchanges:
            assert one.is_held_out == (number % 10 == 9)
            is_greedy = one.answer_ids == _greedy(llm, one)
            surprises += is_greedy != (number % 2 == 0 or one.is_held_out)
    assert (
        surprises <= 1
    )  # alone and in a batch, arithmetic rounds differently: a near tie may fall otherwise


def test_answers_end_as_they_should(llm: LLM) -> None:
    for exchanges in _converse(llm, list(range(12))):
        for one in exchanges:
            assert 2 <= len(one.answer_ids) <= SETTINGS.max_tokens
            assert (one.answer_ids[-1] == END_ID) == one.is_finished
            assert END_ID not in one.answer_ids[:-1]


def test_prompts_that_are_given_are_used_and_never_both_trained_on_and_held_out(llm: LLM) -> None:
    prompts = [[{"role": "user", "content": letter}] for letter in "abcdefgh"]
    made = _converse(llm, list(range(24)), prompts=prompts)
    held_out = {one.prompt_ids for exchanges in made for one in exchanges if one.is_held_out}
    others = {one.prompt_ids for exchanges in made for one in exchanges if not one.is_held_out}
    assert len(held_out) == 2
    assert not held_out & others
    assert made[11] == made[15] == made[19] == made[23] == []  # the held-out prompts again


def test_a_model_without_a_chat_template_continues_text(llm: LLM) -> None:
    class Plain:
        has_chat_template = False
        encode = staticmethod(llm.tokenizer.encode)

    assert isinstance(script_for(Plain()), PlainScript)
    made = _converse(llm, list(range(6)), tokenizer=Plain())
    texts = [llm.tokenizer.decode(one.prompt_ids) for exchanges in made for one in exchanges]
    assert len(texts) >= 4
    assert all("<|user|>" not in text for text in texts)
    assert all(
        text.startswith(tuple(opening.strip() for opening in openings.TEXT_OPENINGS)) for text in texts
    )


def _script(template: str) -> tuple[ChatScript, Callable[[tuple[int, ...]], str]]:
    tokenizer = new_tokenizer(template)
    return ChatScript(ChatRenderer(tokenizer)), lambda ids: str(tokenizer.decode(list(ids)))


def test_prompts_are_those_of_the_server() -> None:
    script, text = _script(CHATML)
    messages = [{"role": "user", "content": "u <|im_end|>"}]
    request = ChatRequest([Message("user", (TextPart("u <|im_end|>"),))], SamplingParams())
    assert script.to_answer(messages) == ChatRenderer(new_tokenizer(CHATML)).render(request).ids
    assert text(script.to_continue([], "Why is ")) == "<|im_start|>user\nWhy is "


def test_a_template_that_refuses_system_messages_gets_them_in_the_user_turn() -> None:
    script, text = _script(checked("m.role == 'system'", "no system messages here") + BARE)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert text(script.to_answer(messages)).startswith("<|im_start|>user\ns\n\nu<|im_end|>")
    assert text(script.to_continue(messages[:1], "Why")) == "<|im_start|>user\ns\n\nWhy"


def test_a_template_that_drops_the_user_is_refused() -> None:
    script, _ = _script("{% for m in messages %}[{{ m.role }}]{% endfor %}")
    with pytest.raises(TrainingError, match="cannot be rendered"):
        script.to_continue([], "Why")


def test_a_template_that_takes_no_user_message_is_refused_at_once() -> None:
    with pytest.raises(TrainingError, match="only robots"):
        _script(checked("true", "only robots"))


def test_a_user_turn_that_ran_on_is_cut_at_a_sentence(tmp_path: Path) -> None:
    assert conversations._whole_sentences("First. Second one? And then it") == "First. Second one?"
    assert conversations._whole_sentences("no end in sight") == "no end in sight"
    assert conversations._whole_sentences("pi is 3.14 and") == "pi is 3.14 and"
