"""Drives a scheduler with the fake runner, step by step, and checks after each what must always hold."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fake_runner import FakeRunner, StepFailed, true_next
from sleepy_grammar import SleepyGrammar

from outrider.cache.prefix_index import PrefixIndex
from outrider.config import EngineConfig
from outrider.engine.draft_state import DraftState
from outrider.engine.in_flight import StepExecutor
from outrider.engine.prefix.cache import MIN_LOADED_CELLS, PrefixCache
from outrider.engine.row_caches import SLACK
from outrider.engine.scheduler import Scheduler
from outrider.engine.sequence import Delta, FinishReason, Sequence
from outrider.plan import CacheGeometry, RowPlan, StepPlan
from outrider.prompt_media import PromptMedia
from outrider.request import Request, SamplingParams, SpecPrefill
from outrider.speculate.controller import DepthController
from outrider.speculate.drafter import Drafter

PAGE = 16


def letter(token_id: int) -> str:
    return chr(ord("a") + token_id)


class FakeText:
    """A letter a token, the last one held back; a certain token completes a stop string and is not shown."""

    def __init__(self, stop_token: int | None = None, raises_at: int | None = None) -> None:
        self._stop_token = stop_token
        self._raises_at = raises_at
        self._num_pushed = 0
        self._held = ""

    def push(self, token_id: int) -> tuple[str, str | None]:
        self._num_pushed += 1
        if self._num_pushed == self._raises_at:
            raise UnicodeError("not a character")
        shown, self._held = self._held, letter(token_id)
        return shown, letter(token_id) if token_id == self._stop_token else None

    def flush(self) -> str:
        shown, self._held = self._held, ""
        return shown


@dataclass
class Answer:
    """What a client would have received."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    error: str | None = None
    stop_string: str | None = None


class Harness:
    def __init__(
        self,
        *,
        max_rows: int = 4,
        prefill_step_size: int = 32,
        geometry: CacheGeometry | None = None,
        budget_bytes: int | None = None,
        seed: int = 0,
        controller: DepthController | None = None,
        prefix_bytes: int | None = None,
        block_size: int = 4,
        min_loaded_cells: int = MIN_LOADED_CELLS,
        image_embeddings: Any = None,
        ahead: float = 0.0,
        seconds_of: Callable[[StepPlan], float] | None = None,
        config: EngineConfig | None = None,
        step_bytes: float = math.inf,
        plain_rows_store: bool = False,
    ) -> None:
        """`ahead`: how often a step is launched before the one in front of it is read.

        `seconds_of`: how long a step takes, on a clock of the harness's own (`now_s`).
        `plain_rows_store`: rows that never draft store what other rows' heads may be fed.
        """
        self._plain_rows_store = plain_rows_store
        self.geometry = geometry or CacheGeometry(bytes_per_cell=1, capacity_step=PAGE)
        self.budget_bytes = budget_bytes or 10**9
        self.max_rows = max_rows
        self.prefill_step_size = prefill_step_size
        config = config or EngineConfig(max_rows=max_rows, prefill_step_size=prefill_step_size)
        self.now_s, self._seconds_of = 0.0, seconds_of
        self.prefix = (
            None if prefix_bytes is None else self._prefix_cache(prefix_bytes, block_size, min_loaded_cells)
        )
        self.scheduler = Scheduler(
            config, self.geometry, self.budget_bytes, controller, self.prefix, image_embeddings, step_bytes
        )
        self.runner = FakeRunner(self.geometry, seed)
        if (pool := self.scheduler._budget.pool) is not None:
            self.runner.is_shared = pool.is_shared
        self.executor = StepExecutor(self.runner)
        self.live: dict[int, Sequence] = {}
        self.sequences: list[Sequence] = []
        self.answers: dict[str, Answer] = {}
        self.num_steps = self.num_ahead = 0
        self._ahead, self._random = ahead, random.Random(f"ahead {seed}")
        self._stop_tokens: dict[int, int | None] = {}
        self._ids = itertools.count()

    def _prefix_cache(self, num_bytes: int, block_size: int, min_loaded_cells: int) -> PrefixCache:
        per_cell, per_slot = self.geometry.bytes_per_cell, self.geometry.bytes_per_slot
        index = PrefixIndex(num_bytes, per_cell, per_slot, self.geometry.block_size or block_size)
        return PrefixCache(index, per_cell, has_states=per_slot > 0, min_loaded_cells=min_loaded_cells)

    # -- what clients do ---------------------------------------------------------------------------------

    def add(
        self,
        prompt: Tokens[int] | int,
        *,
        max_tokens: int = 8,
        depth: int = 0,
        stop_ids: Tokens[int] = (),
        min_tokens: int = 0,
        stop_token: int | None = None,
        drafter: Drafter | None = None,
        head_depth: int | None = None,
        raises_at: int | None = None,
        is_auto: bool = False,
        salt: str = "",
        keys: Tokens[int] | None = None,
        media: PromptMedia | None = None,
        priority: int = 0,
        tenant: str = "",
        wakes: Tokens[int] = (),
        keep: float | None = None,
    ) -> Sequence:
        """Queue a request; a number stands for a prompt of that length. Without a drafter the head drafts.

        With both, the head drafts where the drafter has nothing to say.
        `wakes`: tokens that wake a lazy grammar.
        """
        sequence_id = next(self._ids)
        if head_depth is None:
            head_depth = depth if drafter is None else 0
        if isinstance(prompt, int):
            prompt = [(sequence_id * 7 + i * i) % 16 for i in range(prompt)]
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            seed=0,
            draft_depth=depth,
            logprobs=0,
            cache_salt=salt,
            priority=priority,
            tenant=tenant,
            spec_prefill=None if keep is None else SpecPrefill(keep),
        )
        sequence = Sequence(
            id=sequence_id,
            request=Request(
                f"r{sequence_id}",
                tuple(prompt),
                params,
                media=media,
                prompt_keys=None if keys is None else tuple(keys),
            ),
            text=FakeText(stop_token, raises_at),
            stop_ids=frozenset(stop_ids),
            max_tokens=max_tokens,
            drafting=DraftState(
                depth,
                head_depth,
                drafter=drafter,
                grammar=SleepyGrammar(wakes) if wakes else None,
                is_auto=is_auto,
                stores_head_inputs=self._plain_rows_store,
            ),
        )
        self._stop_tokens[sequence_id] = stop_token
        self.live[sequence_id] = sequence
        self.sequences.append(sequence)
        self.answers[sequence.request.id] = Answer()
        self.scheduler.add(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        self.take(self.scheduler.cancel(sequence))

    def answer(self, sequence: Sequence) -> Answer:
        return self.answers[sequence.request.id]

    # -- what the engine does ----------------------------------------------------------------------------

    def step(self, meanwhile: Callable[[], Any] = lambda: None) -> StepPlan | None:
        """One step as the engine makes it; `meanwhile` happens between plan and commit.

        With `ahead`, a step that follows is launched before the first is read, wherever that may be.
        """
        in_flight = self.scheduler.in_flight
        self._score()
        if not in_flight:
            planned = self.scheduler.plan()
            self._check_plan(None if planned is None else planned.plan)
            if planned is None and self.scheduler.next_to_score() is not None:
                return self.step(meanwhile)
            if planned is None:
                if not self.live:
                    self.runner.reset()
                return None
            self.executor.launch(planned)
        if len(in_flight) == 1 and self._random.random() < self._ahead:
            overlapped = self.scheduler.plan_overlapped()
            if overlapped is not None:
                self.num_ahead += 1
                self.executor.launch(overlapped, [in_flight[0]])
        step = in_flight[0]
        self.num_steps += 1
        try:
            self.executor.finish(step)
        except StepFailed as error:
            meanwhile()
            self.runner.reset()
            self.runner.clear_prefixes()
            self.take(*self.scheduler.fail(str(error)))
        else:
            self._check_bytes()
            meanwhile()
            step.seconds = None  # real time must not reach the cost table
            if self._seconds_of is not None:
                step.seconds = self._seconds_of(step.plan)
                self.now_s += step.seconds
            self.take(*self.scheduler.commit(step))
        self.check()
        if self.prefix is not None:
            assert self.runner.most_prefix_bytes <= self.prefix.index.budget_bytes
        return step.plan

    def _score(self) -> None:
        """One part of a prompt, as the engine does between steps. The scores are random ones of the row."""
        piece = self.scheduler.next_to_score()
        if piece is None:
            return
        row = self.live[piece.sequence_id]
        scores = np.random.default_rng(row.id).random(row.num_prompt) if piece.is_last else None
        self.scheduler.scored(piece, scores)
        if row.kept is not None:
            self.runner.kept[row.id] = row.kept

    def steps(self, num: int) -> list[StepPlan]:
        return [plan for plan in (self.step() for _ in range(num)) if plan is not None]

    def run_until(self, happened: Callable[[], bool], most: int = 1000) -> int:
        """Steps until something happened."""
        for num in range(most + 1):
            if happened():
                return num
            assert self.step() is not None, "nothing to do, and it has not happened"
        raise AssertionError(f"not within {most} steps")

    def run_to_idle(self, most: int = 1000) -> None:
        """Run until nothing is left; then every answer must be whole and every byte given back."""
        self.run_until(lambda: self.scheduler.is_idle, most)
        while self.scheduler.in_flight:  # launched before its rows were seen to be finished
            self.step()
        last = self.step()  # what is left to be copied
        assert last is None or not last.batches
        assert self.step() is None
        if self.prefix is not None:
            assert self.runner.prefix_bytes == self.prefix.index.num_bytes, "bytes held, bytes accounted"
        assert self.scheduler.num_bytes == self.runner.num_bytes == 0
        assert self.scheduler.num_rows == self.scheduler.num_waiting == 0
        for sequence in self.sequences:
            self.check_answer(sequence)

    # -- what must hold ----------------------------------------------------------------------------------

    def check(self) -> None:
        self.scheduler.check_integrity()
        for sequence in self.live.values():
            assert sequence.tokens[: sequence.num_prompt] == list(sequence.request.prompt_ids)
            assert sequence.tokens[sequence.num_prompt :] == self.answer(sequence).token_ids, (
                "lost or doubled"
            )
        assert self.scheduler.num_rows + self.scheduler.num_waiting == len(self.live)
        assert self.scheduler.is_idle == (not self.live)

    def check_answer(self, sequence: Sequence) -> None:
        """A finished request got the truth: all of it, or its beginning where it was cut short."""
        answer = self.answer(sequence)
        assert answer.finish_reason is not None, "no end"
        token_ids, text, reason = self.truth(sequence)
        if answer.finish_reason in ("cancelled", "error"):
            assert answer.token_ids == token_ids[: len(answer.token_ids)]
            assert text.startswith(answer.text)
        else:
            assert (answer.token_ids, answer.text, answer.finish_reason) == (token_ids, text, reason)
            is_stop_id = token_ids[-1] in sequence.stop_ids
            is_stop_string = token_ids[-1] == self._stop_tokens[sequence.id] and not is_stop_id
            assert answer.stop_string == (letter(token_ids[-1]) if is_stop_string else None)

    def truth(self, sequence: Sequence) -> tuple[list[int], str, FinishReason]:
        """What plain decoding of this request alone would give."""
        prompt, params = list(sequence.request.prompt_ids), sequence.params
        if sequence.id in self.runner.kept:
            prompt = [prompt[position] for position in self.runner.kept[sequence.id]]
        answer: list[int] = []
        while True:
            is_short = len(answer) < params.min_tokens
            token_id = true_next(prompt + answer, sequence.stop_ids if is_short else ())
            answer.append(token_id)
            shown = "".join(map(letter, answer[:-1]))
            if token_id in sequence.stop_ids or token_id == self._stop_tokens[sequence.id]:
                return answer, shown, "stop"
            if len(answer) == sequence.max_tokens:
                return answer, shown + letter(token_id), "length"

    def take(self, *deltas: Delta) -> None:
        for delta in deltas:
            answer = self.answers[delta.request_id]
            assert answer.finish_reason is None, "something after the end"
            assert tuple(one.token_id for one in delta.logprobs) == delta.token_ids
            answer.token_ids += delta.token_ids
            answer.text += delta.text
            answer.finish_reason, answer.error = delta.finish_reason, delta.error
            answer.stop_string = delta.stop_string
            if delta.finish_reason is not None:
                sequence = self.live.pop(int(delta.request_id[1:]))
                assert sequence.slot is None
                assert delta.stats is not None

    def _check_plan(self, plan: StepPlan | None) -> None:
        if not self.live:
            assert not rows_of(plan), "rows where nobody lives"
            return
        waits = self.scheduler.next_piece() is not None or self.scheduler.next_to_score() is not None
        loads = plan is not None and plan.copies.loads  # large ones are spread over steps
        assert rows_of(plan) or waits or loads, "nothing done where there is something to do"
        inside = [s.id for s in self.live.values() if s.slot is not None]
        outside = [s.id for s in self.live.values() if s.slot is None]
        if not any(s.params.priority or s.params.tenant for s in self.live.values()):
            assert max(inside) < min(outside, default=10**9), "a younger one went first"
        is_trial = any(self.live[i].failures for i in inside)
        rows = rows_of(plan)
        if is_trial:
            assert len(rows) <= 1, "a suspect in company"
        decoding = [row for row in rows if self.live[row.sequence_id].is_decoding]
        if not is_trial:
            assert [row.slot for row in decoding] == list(range(len(decoding))), "gaps between decoding rows"
            assert len(decoding) == sum(self.live[i].is_decoding for i in inside), "a decoding row left out"
        prefilled = sum(row.num_fed for row in rows if not self.live[row.sequence_id].is_decoding)
        assert prefilled <= self.prefill_step_size
        for row in rows:
            assert row.num_drafts < max(1, self.live[row.sequence_id].num_left), "drafts past max_tokens"

    def _check_bytes(self) -> None:
        assert self.scheduler.num_bytes == self.runner.num_bytes
        longest = max((len(s.request.prompt_ids) + s.max_tokens for s in self.live.values()), default=0)
        if longest <= self.scheduler.longest_context():
            assert self.runner.num_bytes <= self.budget_bytes


def rows_of(plan: StepPlan | None) -> list[RowPlan]:
    return [] if plan is None else [row for batch in plan.batches for row in batch]


def planned_ids(plan: StepPlan | None) -> list[int]:
    return [row.sequence_id for row in rows_of(plan)]


# -- rows to begin a test with ---------------------------------------------------------------------------

FOREVER = 200  # tokens: longer than any of these tests runs


def decoding(harness: Harness, num: int, depth: int = 0) -> list[Sequence]:
    """Rows in the middle of long answers."""
    rows = [harness.add(5, max_tokens=FOREVER, depth=depth) for _ in range(num)]
    harness.run_until(lambda: all(row.is_decoding for row in rows))
    return rows


def budget_for(num_slots: int, num_cells: int) -> int:
    geometry = CacheGeometry(bytes_per_cell=1, capacity_step=PAGE)
    return geometry.num_bytes(num_slots, geometry.capacity_for(num_cells))


def crowded(depth: int = 0, num: int = 3, max_tokens: int = 100) -> tuple[Harness, list[Sequence]]:
    """Rows that fit together when they join and do not when they have grown."""
    harness = Harness(max_rows=num, budget_bytes=budget_for(num, 5 + PAGE + SLACK))
    return harness, [harness.add(5, max_tokens=max_tokens, depth=depth) for _ in range(num)]
