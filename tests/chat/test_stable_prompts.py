"""An agent's turn begins as the one before: its prompts are replayed against the prefix index."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from agent_transcripts import claude_code_turns, opencode_turns
from chat_tokenizers import BARE, CHATML, new_tokenizer

from outrider.api.anthropic.messages_request import MessagesRequest, messages_request
from outrider.api.openai.chat_request import ChatCompletionRequest, chat_request
from outrider.cache.prefix_index import PrefixIndex
from outrider.chat.conversation import ChatRequest, Message, TextPart
from outrider.chat.renderer import ChatRenderer
from outrider.chat.special_tokens import Vocabulary
from outrider.chat.template import ChatTemplate

DATED = "{{ strftime_now('%d %B %Y') }}\n" + CHATML
DROPS_THOUGHTS = CHATML  # cuts what an assistant thought out of its earlier turns


def _claude_code() -> Iterator[ChatRequest]:
    for body in claude_code_turns():
        yield messages_request(MessagesRequest.model_validate(body))


def _opencode() -> Iterator[ChatRequest]:
    for body in opencode_turns():
        yield chat_request(ChatCompletionRequest.model_validate(body), None)


def _prompts(
    turns: Iterator[ChatRequest], template: str = CHATML, **settings: object
) -> list[tuple[int, ...]]:
    tokenizer = new_tokenizer(template)
    renderer = ChatTemplate(tokenizer, Vocabulary(tokenizer))
    return [
        renderer.render(turn.messages, turn.tools, {**turn.template_kwargs, **settings}).ids for turn in turns
    ]


def _hit_rate(prompts: list[tuple[int, ...]]) -> float:
    """Of all turns after the first. Earlier prompts are cached; the answers between them are left out."""
    index = PrefixIndex(10**9, bytes_per_cell=1)
    hits = total = 0
    for number, prompt in enumerate(prompts):
        if number:
            hits += index.match("", prompt).num_keys
            total += len(prompt)
        node = index.root("")
        for start in range(0, len(prompt), index.block_size):
            keys = prompt[start : start + index.block_size]
            child = index.child(node, keys) or index.insert(node, keys)
            assert child is not None
            node = child
    return hits / total


@pytest.mark.parametrize("turns", [_claude_code, _opencode])
@pytest.mark.parametrize("template", [CHATML, DATED])
def test_an_agents_turns_hit_what_the_ones_before_computed(
    turns: Callable[[], Iterator[ChatRequest]], template: str, capsys: Any
) -> None:
    rate = _hit_rate(_prompts(turns(), template))
    with capsys.disabled():
        print(
            f"\n{turns.__name__.strip('_')}: {rate:.1%} of the prompt tokens after the first turn were cached"
        )
    assert rate > 0.9


@pytest.mark.parametrize("turns", [_claude_code, _opencode])
def test_a_turn_is_a_prefix_of_the_next(turns: Callable[[], Iterator[ChatRequest]]) -> None:
    """All of it but what opens the answer: with thinking off, that is a mark which history does not have."""
    prompts = _prompts(turns(), add_generation_prompt=False)
    for prompt, following in itertools.pairwise(prompts):
        assert following[: len(prompt)] == prompt


def test_a_note_to_the_biller_would_make_every_prompt_new() -> None:
    """Why it is taken out: it stands first and changes with every request."""
    notes = [body["system"][0]["text"] for body in claude_code_turns()]
    assert len(set(notes)) == len(notes)
    for turn in _claude_code():
        assert not any("billing" in message.text for message in turn.messages)
        assert turn.messages[0].text.startswith("You are an agent")


def test_thoughts_that_a_template_drops_cost_only_the_last_answer() -> None:
    """The turn before was computed with them; what came before them stays cached."""
    tokenizer = new_tokenizer(DROPS_THOUGHTS)
    renderer = ChatTemplate(tokenizer, Vocabulary(tokenizer), ("<think>", "</think>"))
    history = next(_opencode()).messages
    prompt = renderer.render(history).ids
    answer = tuple(tokenizer.encode("<think>hm, hm</think>Done.<|im_end|>", add_special_tokens=False))
    more = [
        Message("assistant", (TextPart("<think>hm, hm</think>Done."),)),
        Message("user", (TextPart("Ok?"),)),
    ]
    following = renderer.render([*history, *more]).ids
    index = PrefixIndex(10**9, bytes_per_cell=1, block_size=10**6)
    index.insert(index.root(""), prompt + answer)
    assert len(prompt) <= index.match("", following).num_keys < len(prompt) + len(answer)


@pytest.mark.parametrize("template", [CHATML, BARE])  # BARE knows no tools
def test_a_deferred_tool_that_is_loaded_leaves_the_prompt_before_it_alone(template: str) -> None:
    tool = {"name": "Search", "description": "Finds tools", "input_schema": {"type": "object"}}
    later = {"name": "Tides", "description": "Asks the sea", "input_schema": {"type": "object"}}
    use = {"type": "tool_use", "id": "c", "name": "Search", "input": {}}
    reference = {"type": "tool_reference", "tool_name": "Tides"}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [reference]}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "When is high tide?"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    renderer = ChatRenderer(new_tokenizer(template))

    def prompt(num_messages: int, *tools: dict[str, Any]) -> str:
        body = {"max_tokens": 1, "messages": messages[:num_messages], "tools": [tool, *tools]}
        return renderer.render_messages(messages_request(MessagesRequest.model_validate(body))).text

    before, after = prompt(1), prompt(3, later | {"defer_loading": True})
    opening = before.rindex("<|im_start|>assistant")
    assert after.startswith(before[:opening])
    assert "Asks the sea" in after[opening:]
