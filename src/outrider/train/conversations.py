"""Synthesised data: the model talks to itself, through the engine.

The model continues an opening to a user turn, then answers. Half of the answers are greedy, half are sampled;
held-out answers are greedy. A conversation is a function of the model, the settings and its number, so a
resumed run makes exactly the missing ones. Must not know what the exchanges are for.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from outrider.engine.async_engine import AsyncEngine
from outrider.progress import Listener, Progress
from outrider.request import InvalidRequest, SamplingParams
from outrider.train import openings
from outrider.train.errors import TrainingError
from outrider.train.exchanges import Exchange, ExchangeFile, line_of
from outrider.train.loops import cut_loop
from outrider.train.prompts import Message
from outrider.train.scripts import script_for
from outrider.train.settings import TrainingSettings

# Chosen by hand.
MAX_USER_TURN = 64  # tokens
MAX_PROMPT = 1024  # tokens; longer prompts would leave only a few rows in a training batch
HELD_OUT_EVERY = 10  # one conversation in ten is held out
FOLLOW_UP_EVERY = 4  # one conversation in four gets a second exchange
STAGE = "Synthesising"


class Synthesis:
    """The conversations of one run."""

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: Any,
        settings: TrainingSettings,
        prompts: Sequence[list[Message]] = (),
    ) -> None:
        self._engine = engine
        self._script = script_for(tokenizer)
        self._settings = settings
        self._prompts = prompts

    def check_prompts(self) -> None:
        """TrainingError: the model cannot take one of the user's prompts."""
        for number, messages in enumerate(self._prompts, 1):
            try:
                prompt_ids = self._script.to_answer(messages)
                self._engine.engine.validate(prompt_ids, SamplingParams(max_tokens=1))
            except Exception as error:  # chat templates raise any kind of error
                raise TrainingError(f"Prompt {number} cannot be used: {error}.") from error
            if len(prompt_ids) > MAX_PROMPT:
                raise TrainingError(
                    f"Prompt {number} has {len(prompt_ids):,} tokens; the limit is {MAX_PROMPT:,}."
                )

    async def conversation(self, number: int) -> list[Exchange]:
        rng = random.Random(f"{self._settings.seed}/{number}")
        if self._prompts:
            return await self._given(number, rng)
        is_held_out = number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        is_greedy = is_held_out or number % 2 == 0
        try:
            return await self._invented(number % FOLLOW_UP_EVERY == 0, is_held_out, is_greedy, rng)
        except InvalidRequest:
            return []  # the conversation is too long for the context

    async def _given(self, number: int, rng: random.Random) -> list[Exchange]:
        round_number, which = divmod(number, len(self._prompts))
        one_of = min(HELD_OUT_EVERY, len(self._prompts) // 2)
        is_held_out = which % one_of == one_of - 1
        if is_held_out and round_number > 0:
            return []  # a second round would give the same greedy answer
        is_greedy = is_held_out or (round_number < 2 and (which + round_number) % 2 == 0)
        exchange, _ = await self._answer(self._prompts[which], is_held_out, is_greedy, rng)
        return _useful([exchange])

    async def _invented(
        self, has_follow_up: bool, is_held_out: bool, is_greedy: bool, rng: random.Random
    ) -> list[Exchange]:
        chat = self._script.has_roles
        system = openings.sample_system_message(rng) if chat else None
        opening = openings.sample_user_opening(rng) if chat else openings.sample_text_opening(rng)
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        messages = await self._user_turn(messages, opening, rng)
        exchange, text = await self._answer(messages, is_held_out, is_greedy, rng)
        exchanges = [exchange]
        if has_follow_up and chat and exchange.is_finished:
            messages = [*messages, {"role": "assistant", "content": text}]
            messages = await self._user_turn(messages, rng.choice(openings.FOLLOW_UPS), rng)
            exchange, _ = await self._answer(messages, is_held_out, is_greedy, rng)
            exchanges.append(exchange)
        return _useful(exchanges)

    async def _user_turn(
        self, messages: Sequence[Message], opening: str, rng: random.Random
    ) -> list[Message]:
        params = SamplingParams(
            max_tokens=MAX_USER_TURN,
            temperature=rng.uniform(0.7, 1.0),
            top_p=0.95,
            seed=rng.getrandbits(63),
        )
        _, text, reason = await self._complete(self._script.to_continue(messages, opening), params, True)
        turn = opening + (text if reason == "stop" else _whole_sentences(text))
        return [*messages, {"role": "user", "content": turn if turn.strip() else "Hello"}]

    async def _answer(
        self, messages: Sequence[Message], is_held_out: bool, is_greedy: bool, rng: random.Random
    ) -> tuple[Exchange, str]:
        temperature = rng.uniform(0.6, 1.0)
        params = SamplingParams(
            max_tokens=self._settings.max_tokens,
            temperature=0 if is_greedy else temperature,
            seed=rng.getrandbits(63),
        )
        prompt_ids = self._script.to_answer(messages)
        token_ids, text, reason = await self._complete(prompt_ids, params, False)
        is_finished = reason == "stop"
        answer_ids = token_ids if is_finished else cut_loop(token_ids)
        return Exchange(prompt_ids, answer_ids, is_finished, is_held_out), text

    async def _complete(
        self, prompt_ids: Sequence[int], params: SamplingParams, continues_prompt: bool
    ) -> tuple[tuple[int, ...], str, str]:
        if len(prompt_ids) > MAX_PROMPT:
            raise InvalidRequest("the conversation has grown too long")
        token_ids: tuple[int, ...] = ()
        text, reason = "", ""
        stream = await self._engine.start(prompt_ids, params, continues_prompt=continues_prompt)
        async for delta in stream:
            if delta.error is not None:
                raise TrainingError(f"The model could not be run: {delta.error}.")
            token_ids, text, reason = (
                token_ids + delta.token_ids,
                text + delta.text,
                delta.finish_reason or "",
            )
        return token_ids, text, reason


def synthesise(
    synthesis: Synthesis, file: ExchangeFile, total: int, num_rows: int, listener: Listener
) -> None:
    """Make the conversations 0..total-1 that are not in the file yet, `num_rows` at a time."""
    there = file.read()
    missing = iter([number for number in range(total) if number not in there])
    done, num_tokens, began_s = len(there), 0, time.monotonic()

    def report(exchanges: Sequence[Exchange]) -> None:
        nonlocal done, num_tokens
        done += 1
        num_tokens += sum(len(one.answer_ids) for one in exchanges)
        rate = num_tokens / max(1e-9, time.monotonic() - began_s)
        listener(Progress(STAGE, done, total, "conversations", f"{rate:,.0f} answer tokens/s"))

    listener(Progress(STAGE, done, total, "conversations"))
    if done < total:
        with file.open_to_append() as sink:
            asyncio.run(_work(synthesis, missing, sink.write, report, num_rows))


async def _work(
    synthesis: Synthesis,
    numbers: Any,
    write: Callable[[str], object],
    report: Callable[[Sequence[Exchange]], None],
    num_workers: int,
) -> None:
    async def worker() -> None:
        for number in numbers:  # the workers share one iterator: each number goes to one worker
            exchanges = await synthesis.conversation(number)
            write(line_of(number, exchanges))
            report(exchanges)

    await asyncio.gather(*(worker() for _ in range(num_workers)))


def _useful(exchanges: Sequence[Exchange]) -> list[Exchange]:
    return [one for one in exchanges if one.num_targets > 0]


def _whole_sentences(text: str) -> str:
    """The text up to the end of its last whole sentence; all of it if there is no such end."""
    ends = [match.end() for match in re.finditer(r"[.?!](?=\s)|\n", text)]
    return text[: ends[-1]] if ends else text
