"""Decodes rows with a scheduler and a runner in this thread, as the engine does it in its own thread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.cli.doctor.random_model import RandomModel
from outrider.config import EngineConfig
from outrider.engine.draft_state import DraftState
from outrider.engine.in_flight import StepExecutor
from outrider.engine.memory_plan import plan_memory
from outrider.engine.scheduler import Scheduler
from outrider.engine.sequence import Sequence as Row
from outrider.models import machine
from outrider.plan import BLOCK_SIZE, TokenLogprobs
from outrider.request import MAX_TOP_LOGPROBS, Request, SamplingParams
from outrider.speculate.controller import DepthController
from outrider.speculate.prediction import PredictionDrafter
from outrider.step.runner import Runner

CHUNK = 16  # prompt tokens of a step: prompts take several
WRONG_EVERY = 5  # one token in so many of a predicted answer is wrong


class NoText:
    """Answers of random models have no text."""

    def push(self, token_id: int) -> tuple[str, str | None]:
        return "", None

    def flush(self) -> str:
        return ""


@dataclass(frozen=True)
class Prompt:
    token_ids: tuple[int, ...]
    temperature: float
    seed: int


@dataclass(frozen=True)
class Answer:
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    num_accepted: int  # drafts

    def prediction(self, vocab_size: int) -> list[int]:
        """The answer with some wrong tokens, as drafts: some of them are rejected."""
        return [(t + (i % WRONG_EVERY == 0)) % vocab_size for i, t in enumerate(self.token_ids)]


class Decoder:
    """`is_served`: with blocks, traced passes and overlapped steps where a server on this device has them."""

    def __init__(self, model: RandomModel, num_tokens: int, is_served: bool = True) -> None:
        self._overlaps = is_served and machine.outruns_host()
        has_blocks = is_served and model.trunk.reads_blocks
        self._vocab_size = model.trunk.vocab_size
        self._num_tokens = num_tokens
        self._runner = Runner(
            model.trunk,
            model.head,
            compiles=self._overlaps,
            block_size=BLOCK_SIZE if has_blocks else None,
        )

    def decode(
        self, prompts: Sequence[Prompt], depth: int = 0, predicted: Sequence[Answer | None] | None = None
    ) -> list[Answer]:
        """All rows in one batch. Drafts come from `predicted` where it has an answer, else from the head."""
        scheduler = Scheduler(
            EngineConfig(max_rows=len(prompts), prefill_step_size=CHUNK),
            self._runner.geometry(256),
            plan_memory(EngineConfig(), machine.free_bytes(), 0, False).rows,
            DepthController(few_shapes=self._overlaps),
        )
        expected = predicted or [None] * len(prompts)
        rows = [self._row(i, *each, depth) for i, each in enumerate(zip(prompts, expected, strict=True))]
        for row in rows:
            scheduler.add(row)
        logprobs = self._run(scheduler)
        return [
            Answer(
                tuple(row.tokens[row.num_prompt :]),
                tuple(logprobs[row.request.id]),
                sum(row.counters.accepted),
            )
            for row in rows
        ]

    def _row(self, number: int, prompt: Prompt, predicted: Answer | None, depth: int) -> Row:
        params = SamplingParams(
            max_tokens=self._num_tokens,
            temperature=prompt.temperature,
            seed=prompt.seed,
            ignore_eos=True,
            logprobs=MAX_TOP_LOGPROBS,
        )
        drafting = DraftState(depth, depth)
        if predicted is not None:
            prediction = predicted.prediction(self._vocab_size)
            drafting.drafter = PredictionDrafter(prediction, len(prompt.token_ids))
        request = Request(str(number), prompt.token_ids, params)
        return Row(number, request, NoText(), frozenset(), self._num_tokens, drafting)

    def _run(self, scheduler: Scheduler) -> dict[str, list[TokenLogprobs]]:
        """Step until no row is left. Returns the log-probabilities of each row, by its request's id."""
        executor, in_flight = StepExecutor(self._runner), scheduler.in_flight
        found: dict[str, list[TokenLogprobs]] = defaultdict(list)
        while not scheduler.is_idle:
            if not in_flight:
                planned = scheduler.plan()
                assert planned is not None
                executor.launch(planned)
            if self._overlaps and (overlapped := scheduler.plan_overlapped()) is not None:
                executor.launch(overlapped, in_front=[in_flight[0]])
            executor.finish(step := in_flight[0])
            for delta in scheduler.commit(step):
                found[delta.request_id] += delta.logprobs
        while in_flight:
            executor.finish(in_flight.popleft())
        self._runner.reset()
        return found
