"""Random histories of an engine: who asks for what, who joins, leaves, is cancelled or preempted, what fails.

A history is made from one number, so that it can be played again. Playing it drives the scheduler and the
runner; the books are checked after every step, and in the end every answer against the same request alone.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

import sampling_oracle as oracle
from outrider.cache.recurrent import RecurrentState
from outrider.config import EngineConfig
from outrider.cpu.quantized import is_kept, quantized_layers
from outrider.engine import sequence as engine_sequence
from outrider.engine.draft_state import DraftState
from outrider.engine.in_flight import InFlightStep, StepExecutor
from outrider.engine.prefix.cache import PrefixCache
from outrider.engine.row_caches import SLACK
from outrider.engine.scheduler import Scheduler
from outrider.engine.sequence import Delta
from outrider.models.draft_model import DraftModel
from outrider.models.dtypes import settle_dtype
from outrider.models.heads import HeadSpec, LoadedHead, MTPHead, new_head
from outrider.models.trunk import Trunk
from outrider.plan import BLOCK_SIZE, NUM_SPARE_BLOCKS, AdapterInfo, TokenLogprobs
from outrider.request import Request, SamplingParams
from outrider.speculate.controller import DepthController
from outrider.speculate.drafter import Drafter
from outrider.speculate.ngram import NgramDrafter
from outrider.speculate.prediction import PredictionDrafter
from outrider.step.device_drafter import LoadedDrafter
from outrider.step.runner import Runner
from restless_controller import RestlessController
from run_steps import run_step
from step.reference import (
    Answer,
    Cells,
    Row,
    as_numpy,
    engine_cells,
    engine_row,
    fresh_cells,
    mlx_lm_row,
    solo_answer,
    stop_ids_of,
)
from step.row_bans import with_random_bans
from step.row_grammars import with_random_grammar
from step.row_thinking import fate_of_reasoning, row_grammar
from step.scripted_drafter import ScriptedDrafter
from tiny_models import (
    QUANTIZABLE_CELLS,
    SUMS_DEPEND_ON_WIDTH,
    is_quantized_name,
    quantized_tiny_model,
    tiny_model,
)

Kind = Literal[
    "plain", "scripted", "ngram", "prediction", "head", "scripted with head", "prediction with head"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
HEADLESS = KINDS[:4]
AUTO_SHARE = {kind: 0.1 if kind.startswith("scripted") else 0.5 for kind in KINDS}
HeadSize = Literal["none", "whole", "reduced"]
SHALLOW = {
    "llama": {"num_hidden_layers": 2},
    "qwen3": {"num_hidden_layers": 2},
}  # where two say as much as three
MADE_TO_FAIL = "made to fail"
DRAFTED = " drafted by "  # in the name of a world whose drafter is a tinier model: "llama drafted by qwen3"


@dataclass(frozen=True)
class Tolerance:
    """By how much two honest computations may differ."""

    logits: float
    logprobs: float
    cells: float
    excused: float = 1e-4  # share of the tokens whose choice is within the tolerance of another one


FLOAT32 = Tolerance(oracle.TOLERANCE, 1e-3, 1e-4)
QUANTIZED = Tolerance(oracle.TOLERANCE, 1e-5, 0)  # the oracle alone rounds: logits and cells are equal
QUANTIZED_BY_WIDTH = Tolerance(0.2, 0.2, 0.2, excused=0.005)  # of the families in SUMS_DEPEND_ON_WIDTH


class Divergence(AssertionError):
    """A request did not give what it gives alone."""


@dataclass(frozen=True)
class Ask:
    """One request of a history."""

    prompt: tuple[int, ...]
    params: SamplingParams
    kind: Kind
    joins_at: int  # step
    cancelled_at: int | None


@dataclass(frozen=True)
class History:
    seed: int
    asks: tuple[Ask, ...]
    head: HeadSize
    max_rows: int
    chunk: int
    page: int
    roominess: float  # the memory budget, in rows of the longest length
    failing: frozenset[int]  # steps that raise
    inspects: bool  # compare all cells with fresh ones after every step
    scribbles: bool  # overwrite all cells that hold nothing after every step


@dataclass
class Tally:
    """What was exercised; several plays add up."""

    histories: int = 0
    tokens: int = 0
    excused: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    accepted: Counter[tuple[str, int, int]] = field(default_factory=Counter)  # kind, drafted, accepted
    preemptions: int = 0
    failed_steps: int = 0
    cells: int = 0
    held: Counter[tuple[int, int]] = field(default_factory=Counter)  # rows with a grammar: drafted, accepted
    held_finished: Counter[str] = field(default_factory=Counter)
    held_preemptions: int = 0
    thought: Counter[str] = field(default_factory=Counter)  # fates of reasoning with a budget
    caught_up: int = 0  # rows whose head had rested
    ahead: int = 0  # steps launched before the one in front was read

    def add(self, other: Tally) -> None:
        self.histories += other.histories
        self.tokens += other.tokens
        self.excused += other.excused
        self.finished += other.finished
        self.accepted += other.accepted
        self.preemptions += other.preemptions
        self.failed_steps += other.failed_steps
        self.cells += other.cells
        self.held += other.held
        self.held_finished += other.held_finished
        self.held_preemptions += other.held_preemptions
        self.thought += other.thought
        self.caught_up += other.caught_up
        self.ahead += other.ahead

    def summary(self) -> str:
        return (
            f"{self.histories} histories, {self.tokens} tokens, {self.excused} excused, "
            f"ends {dict(self.finished)}, {self.preemptions} preemptions, {self.failed_steps} failed steps, "
            f"{self.cells} cells compared; with a grammar {self.held.total()} steps, "
            f"ends {dict(self.held_finished)}, {self.held_preemptions} preemptions; "
            f"reasoning {dict(self.thought)}; "
            f"{self.ahead} steps launched ahead"
        )

    def accepted_lengths(self, *kinds: str) -> set[tuple[int, int]]:
        return {(drafted, accepted) for kind, drafted, accepted in self.accepted if kind in kinds}


class World:
    """A tiny model with heads of random weights, and a runner for each.

    The last head has a reduced vocabulary.

    `name` is a family, or that of a quantised model ("llama-4bit"), whose head is quantised too. " kv8",
    for example, behind it: keys and values have 8 bits. `sizes`: changes of the tiny model's config.
    """

    head_layers = 1  # see DraftState
    num_head_buffers = 1  # that hold cells or states of the row's text
    can_pause_head = True

    def __init__(self, name: str, sizes: Mapping[str, int] = {}) -> None:
        name, _, kv_bits = name.partition(" kv")
        changes = QUANTIZABLE_CELLS.get(_family(name), {"head_dim": 32}) if kv_bits else {}
        changes = {**changes, **sizes}
        self.new_model = functools.partial(_model, name, changes)
        self.model = self.new_model()
        # Such models magnify a difference in the last bit of a float: they are compared with themselves.
        self._rounds = bool(kv_bits) or any(is_kept(layer) for _, layer in quantized_layers(self.model))
        self.tolerance = FLOAT32
        if self._rounds:
            self.tolerance = QUANTIZED_BY_WIDTH if _family(name) in SUMS_DEPEND_ON_WIDTH else QUANTIZED
        self.trunk = Trunk(self.model, max_context=256)
        self.trunk.use_kv_bits(int(kv_bits) if kv_bits else None)
        self.vocab_size = self.trunk.vocab_size
        self.head = random_head(self.trunk)
        if is_quantized_name(name):
            nn.quantize(self.head, group_size=32, bits=4)
            settle_dtype(self.head, "auto", self.trunk.dtype)
        self.trunk.prepare_for_serving()  # as the engine does
        LoadedHead((self.head,), "random").prepare_for_serving(self.trunk)
        some = some_ids(self.vocab_size)
        self._use(LoadedHead((self.head,), "random"), LoadedHead((self.head,), "random", some))
        # Native attention takes blocks of one size only.
        self.block_sizes = (BLOCK_SIZE,) if self._rounds else (4, 8, 16, BLOCK_SIZE)
        self._answers: dict[str, Answer] = {}

    def _use(self, whole: LoadedDrafter, reduced: LoadedDrafter) -> None:
        self.drafters: dict[HeadSize, LoadedDrafter | None] = {
            "none": None,
            "whole": whole,
            "reduced": reduced,
        }
        self.runners: dict[HeadSize, Runner] = {
            size: Runner(self.trunk, drafter) for size, drafter in self.drafters.items()
        }
        self._block_runners: dict[tuple[HeadSize, int], Runner] = {}

    def block_runner(self, head: HeadSize, block_size: int) -> Runner:
        """A runner whose rows keep their cells by blocks."""
        key = head, block_size
        if key not in self._block_runners:
            self._block_runners[key] = Runner(self.trunk, self.drafters[head], block_size=block_size)
        return self._block_runners[key]

    def answer(self, ask: Ask, so_far: Sequence[int] = ()) -> Answer:
        """The same request is asked by several histories, and by all controls."""
        asked = repr((ask.prompt, ask.params, so_far))
        if asked not in self._answers:
            row = self.row_alone(ask.params)
            self._answers[asked] = solo_answer(row, ask.prompt, ask.params, so_far, self.tolerance.logits)
        return self._answers[asked]

    def row_alone(self, params: SamplingParams) -> Row:
        return engine_row(self.trunk) if self._rounds else mlx_lm_row(self.model)

    def adapter_of(self, params: SamplingParams) -> AdapterInfo | None:
        return None

    def cells(self, token_ids: Sequence[int], has_head: bool) -> Cells:
        """What a decoding row with these tokens must hold."""
        head = self.head if has_head else None
        if self._rounds:
            return engine_cells(self.trunk, head, token_ids)
        return fresh_cells(self.model, head, token_ids)


class DraftModelWorld(World):
    """A world whose drafter is a tinier model. A tinier llama has one layer and lacks some tokens."""

    head_layers = 0

    def __init__(self, name: str, draft_name: str) -> None:
        super().__init__(name)
        changes = {}
        if _family(draft_name) == "llama":
            changes = {"num_hidden_layers": 1, "vocab_size": self.vocab_size - 13, "intermediate_size": 32}
        if self.trunk.kv_bits is not None:
            changes["head_dim"] = 32
        self._draft_model = _model(draft_name, changes)
        draft_trunk = Trunk(self._draft_model, max_context=256)
        draft_trunk.use_kv_bits(self.trunk.kv_bits)
        draft_model = DraftModel(draft_trunk, "random")
        draft_model.prepare_for_serving(self.trunk)
        self._draft_trunk = draft_trunk
        self.num_head_buffers = len(draft_trunk.layout)
        self.can_pause_head = draft_model.can_be_paused
        self._use(draft_model, draft_model)

    def cells(self, token_ids: Sequence[int], has_head: bool) -> Cells:
        cells = super().cells(token_ids, has_head=False)
        known = [min(token_id, self._draft_trunk.vocab_size - 1) for token_id in token_ids]
        if has_head and self._rounds:
            cells += engine_cells(self._draft_trunk, None, known)
        elif has_head:
            cells += fresh_cells(self._draft_model, None, known)
        return cells


def _model(name: str, changes: Mapping[str, int]) -> nn.Module:
    model = stored_model(name, changes)
    if is_quantized_name(name):
        settle_dtype(model, "auto")
    return model


def stored_model(name: str, changes: Mapping[str, int]) -> nn.Module:
    """The model as its file has it: quantised layers are MLX's."""
    changes = {**SHALLOW.get(_family(name), {}), **changes}
    return (
        quantized_tiny_model(name, **changes)[0] if is_quantized_name(name) else tiny_model(name, **changes)
    )


def _family(name: str) -> str:
    return name.rpartition("-")[0] if is_quantized_name(name) else name


def random_head(trunk: Trunk, spec: HeadSpec | None = None) -> MTPHead:
    """A head with the same weights each time, none of them left at one or zero."""
    mx.random.seed(7)  # for the biases of new layers
    head = new_head(trunk, spec)
    keys = iter(mx.random.split(mx.random.key(7), 256))

    def filled(array: mx.array) -> mx.array:
        noise = mx.random.normal(array.shape, key=next(keys))
        return noise / math.sqrt(array.shape[-1]) if array.ndim > 1 else array + 0.2 * noise

    head.update(tree_map(filled, head.parameters()))
    mx.eval(head.parameters())
    return head


def some_ids(vocab_size: int) -> mx.array:
    """A reduced vocabulary."""
    return mx.array(sorted(random.Random(7).sample(range(vocab_size), vocab_size // 2)))


@functools.cache
def world(name: str) -> World:
    own_name, is_drafted, draft_name = name.partition(DRAFTED)
    return DraftModelWorld(own_name, draft_name) if is_drafted else World(own_name)


# -- making one ------------------------------------------------------------------------------------------


def random_history(seed: int, vocab_size: int) -> History:
    rng = random.Random(seed)
    if rng.random() < 0.1:
        return _tight_history(seed, rng, vocab_size)
    head: HeadSize = rng.choice(("none", "whole", "whole", "reduced"))
    return History(
        seed=seed,
        asks=tuple(_random_ask(rng, vocab_size, head) for _ in range(rng.randint(1, 7))),
        head=head,
        max_rows=rng.randint(1, 6),
        chunk=rng.choice((1, 2, 5, 16, rng.randint(1, 64), 64)),
        page=rng.choice((16, 32, 64)),
        roominess=rng.choice((1.0, 2.0, 4.0, 100.0)),
        failing=frozenset(rng.sample(range(30), rng.randint(1, 4))) if rng.random() < 0.2 else frozenset(),
        inspects=rng.random() < 0.15,
        scribbles=rng.random() < 0.3,
    )


def _tight_history(seed: int, rng: random.Random, vocab_size: int) -> History:
    """Rows that outgrow the memory they were admitted with: some are preempted."""
    head: HeadSize = rng.choice(("whole", "reduced"))
    asks = [_random_ask(rng, vocab_size, head) for _ in range(rng.randint(2, 4))]
    return History(
        seed=seed,
        asks=tuple(
            replace(
                ask,
                prompt=ask.prompt[:8],
                params=replace(ask.params, max_tokens=rng.randint(40, 70), min_tokens=0, stop_token_ids=()),
                joins_at=rng.choice((0, 0, 5)),
            )
            for ask in asks
        ),
        head=head,
        max_rows=6,
        chunk=rng.choice((3, 16)),
        page=16,
        roominess=rng.choice((1.3, 1.6, 1.9)),
        failing=frozenset(),
        inspects=rng.random() < 0.1,
        scribbles=rng.random() < 0.3,
    )


def _random_ask(rng: random.Random, vocab_size: int, head: HeadSize) -> Ask:
    kinds = KINDS if head != "none" else HEADLESS
    (kind,) = rng.choices(kinds, [2 if kind.startswith("scripted") else 1 for kind in kinds])
    params = _random_params(rng, vocab_size)
    if kind == "ngram" and rng.random() < 0.7:  # few tokens to choose from: they repeat themselves
        params = replace(params, logit_bias=dict.fromkeys(rng.sample(range(vocab_size), 2), 12.0))
    if rng.random() < 0.3:
        params = with_random_grammar(rng, params, vocab_size)
    params = with_random_bans(params, vocab_size)
    return Ask(
        prompt=_random_prompt(rng, vocab_size),
        params=params,
        kind=kind,
        joins_at=rng.choice((0, 0, rng.randint(0, 25))),
        cancelled_at=rng.randint(0, 30) if rng.random() < 0.15 else None,
    )


def _random_prompt(rng: random.Random, vocab_size: int) -> tuple[int, ...]:
    num = rng.choice((1, 2, rng.randint(1, 60), rng.randint(1, 60)))
    prompt = [rng.randrange(vocab_size) for _ in range(num)]
    if rng.random() < 0.3:  # text that repeats itself
        period = rng.randint(1, 6)
        prompt = [prompt[i % period % num] for i in range(num)]
    return tuple(prompt)


def _random_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    def some(value: float, off: float, share: float = 0.25) -> float:
        return round(value, 3) if rng.random() < share else off

    def ids(most: int) -> list[int]:
        return rng.sample(range(vocab_size), rng.randint(1, most))

    max_tokens = rng.choice((rng.randint(1, 3), *(rng.randint(1, 30) for _ in range(3))))
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rng.randint(0, max_tokens) if rng.random() < 0.4 else 0,
        temperature=rng.choice((0, 0, 0, 0.05, 0.5, 1.0, 2.0, 20.0)),
        top_k=rng.choice((0, 0, 0, 1, 3, 20, 500)),
        top_p=some(rng.uniform(0.05, 0.999), 1.0),
        min_p=some(rng.uniform(0.001, 0.5), 0.0, 0.15),
        repetition_penalty=some(rng.uniform(0.7, 1.6), 1.0),
        presence_penalty=some(rng.uniform(-1, 2), 0.0),
        frequency_penalty=some(rng.uniform(-0.5, 2), 0.0),
        logit_bias={i: rng.choice((-math.inf, -2.5, 1.5, 4.0)) for i in ids(6)}
        if rng.random() < 0.25
        else {},
        seed=rng.choice((rng.randrange(20), rng.getrandbits(64), -rng.getrandbits(40))),
        stop_token_ids=tuple(ids(12)) if rng.random() < 0.4 else (),
        logprobs=rng.choice((None, None, None, 0, 1, 5, 20)),
        draft_depth=rng.randint(0, 8),
    )


def _random_prediction(rng: random.Random, answer: Sequence[int], vocab_size: int) -> list[int]:
    """Nothing, anything, or the true answer with parts replaced, left out, put in or doubled."""
    if rng.random() < 0.2:
        return [rng.randrange(vocab_size) for _ in range(rng.choice((0, 1, 30)))]
    prediction = list(answer)
    for _ in range(rng.randint(0, 3)):
        start = rng.randint(0, len(prediction))
        end = min(len(prediction), start + rng.randint(0, 3))
        anything = [rng.randrange(vocab_size) for _ in range(rng.randint(0, 3))]
        prediction[start:end] = rng.choice((anything, prediction[start:end] * 2))
    return prediction


# -- playing it ------------------------------------------------------------------------------------------


class _NoText:
    def push(self, token_id: int) -> tuple[str, str | None]:
        return "", None

    def flush(self) -> str:
        return ""


@dataclass
class _Live:
    ask: Ask
    sequence: engine_sequence.Sequence
    answer: Answer
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None


def play(
    world: World, history: History, prefix_cache: PrefixCache | None = None, runner: Runner | None = None
) -> Tally:
    """Drive the history to its end; raises if anything is not as it must be.

    Two of three histories have rows that keep their cells by blocks, unless `runner` is given.
    """
    if runner is None and history.seed % 3:
        sizes = world.block_sizes
        runner = world.block_runner(history.head, sizes[history.seed // 3 % len(sizes)])
    runner = runner or world.runners[history.head]
    runner.reset()
    player = _Player(world, history, runner, prefix_cache)
    try:
        player.run()
    finally:
        runner.reset()
    return player.tally


class _Player:
    def __init__(
        self, world: World, history: History, runner: Runner, prefix_cache: PrefixCache | None
    ) -> None:
        self._world = world
        self._history = history
        self._runner = runner
        self._prefix_cache = prefix_cache
        self._scheduler = _scheduler(history, runner, prefix_cache)
        self._rng = random.Random(history.seed)
        self._live: dict[str, _Live] = {}
        # How often a step is launched before the one in front is read. Ranks take one step at a time.
        self._ahead = 0.0 if runner.has_followers else history.seed % 4 / 3
        self._executor = StepExecutor(runner)
        # All rows of a prefix cache are alike: its trees last longer than one history.
        self._plain_rows_store = prefix_cache is not None or history.seed % 2 == 0
        self.tally = Tally(histories=1)

    def run(self) -> None:
        last_join = max(ask.joins_at for ask in self._history.asks)
        for step in itertools.count():
            if step > 5000:
                raise AssertionError("the history does not end")
            self._come_and_go(step)
            if not self._in_flight and (planned := self._scheduler.plan()) is not None:
                self._executor.launch(planned)
            if self._in_flight:
                self._step(fails=step in self._history.failing)
            elif self._scheduler.is_idle:
                self._runner.reset()  # as the engine does when it rests
            else:
                self._scheduler.wait_for_disk()
            self._check_books()
            if self._scheduler.is_idle and step >= last_join and not self._in_flight:
                break
        last_copies = self._scheduler.plan()
        if last_copies is not None:
            assert not last_copies.plan.batches
            run_step(self._scheduler, self._runner, last_copies)
        self._runner.reset()
        assert self._scheduler.plan() is None
        assert self._scheduler.prefix_bytes == self._runner.prefix_bytes
        assert self._scheduler.num_bytes == self._runner.num_bytes == 0
        for live in self._live.values():
            self._check_answer(live)

    def _come_and_go(self, step: int) -> None:
        for index, ask in enumerate(self._history.asks):
            name = f"ask {index}"
            if ask.joins_at == step:
                self._live[name] = live = self._join(index, name, ask)
                self._scheduler.add(live.sequence)
            if ask.cancelled_at == step and name in self._live and self._live[name].finish_reason is None:
                self._take(self._scheduler.cancel(self._live[name].sequence))

    def _join(self, index: int, name: str, ask: Ask) -> _Live:
        answer = self._world.answer(ask)
        depth = ask.params.draft_depth
        assert isinstance(depth, int)
        assert ask.params.max_tokens is not None
        if ask.kind == "plain":
            depth = 0
        sequence = engine_sequence.Sequence(
            id=index,
            request=Request(name, ask.prompt, ask.params),
            text=_NoText(),
            stop_ids=stop_ids_of(ask.params),
            max_tokens=ask.params.max_tokens,
            adapter=self._world.adapter_of(ask.params),
            drafting=DraftState(
                max_depth=depth,
                head_depth=depth if ask.kind.endswith("head") else 0,
                head_layers=self._world.head_layers,
                head_context=self._head_context(),
                can_pause_head=self._world.can_pause_head
                and random.Random(f"rests {self._history.seed}").random() < 0.85,
                stores_head_inputs=self._world.can_pause_head
                and self._runner.has_head
                and self._plain_rows_store,
                drafter=self._drafter(ask, answer, random.Random(f"{self._history.seed}/{index}")),
                grammar=row_grammar(ask.params, self._world.vocab_size),
                is_auto=random.Random(f"auto {self._history.seed}/{index}").random() < AUTO_SHARE[ask.kind],
            ),
        )
        return _Live(ask, sequence, answer)

    def _head_context(self) -> int | None:
        """Some draft models read only a part of the longer texts."""
        if self._world.head_layers or not self._world.can_pause_head:
            return None
        return random.Random(f"context {self._history.seed}").choice((None, None, 50))

    def _drafter(self, ask: Ask, answer: Answer, rng: random.Random) -> Drafter | None:
        vocab_size = self._world.vocab_size
        if ask.kind.startswith("scripted"):
            return ScriptedDrafter([*ask.prompt, *answer.token_ids], vocab_size, rng)
        if ask.kind.startswith("prediction"):
            return PredictionDrafter(_random_prediction(rng, answer.token_ids, vocab_size), len(ask.prompt))
        return NgramDrafter() if ask.kind == "ngram" else None

    @property
    def _in_flight(self) -> deque[InFlightStep]:
        return self._scheduler.in_flight

    def _step(self, fails: bool) -> None:
        if self._rng.random() < self._ahead and len(self._in_flight) == 1:
            overlapped = self._scheduler.plan_overlapped()
            if overlapped is not None:
                self.tally.ahead += 1
                self._executor.launch(overlapped, [self._in_flight[0]])
        if fails:
            self.tally.failed_steps += 1
            if self._rng.random() < 0.5:
                self._executor.finish(self._in_flight[0])  # computed, and lost
            self._runner.reset()
            self._runner.clear_prefixes()
            for delta in self._scheduler.fail(MADE_TO_FAIL):
                self._take(delta)
            return
        step = self._in_flight[0]
        plan, result = step.plan, self._executor.finish(step)
        # Real time must not reach the cost table. Made-up times let prompts wait for their turns.
        step.seconds = self._rng.choice((0.0, 0.05, 0.3)) if self._history.seed % 3 else None
        planned = [row for batch in plan.batches for row in batch]
        drafted = {row.sequence_id: row.num_drafts for row in planned if row.is_sampling}
        self.tally.caught_up += sum(row.feeds_head and row.head_lag > 0 for row in planned)
        for row in result.rows:
            if row.token_ids:
                ask = self._history.asks[row.sequence_id]
                self.tally.accepted[ask.kind, drafted[row.sequence_id], row.num_accepted] += 1
                if ask.params.grammar is not None:
                    self.tally.held[drafted[row.sequence_id], row.num_accepted] += 1
        for delta in self._scheduler.commit(step):
            self._take(delta)
        if self._history.inspects and not self._in_flight:
            self._check_cells()
        if self._history.scribbles and not self._in_flight:
            self._scribble()

    def _take(self, delta: Delta) -> None:
        live = self._live[delta.request_id]
        assert live.finish_reason is None, "something came after the end"
        live.token_ids += delta.token_ids
        live.logprobs += delta.logprobs
        live.finish_reason = delta.finish_reason
        if delta.finish_reason is not None:
            self.tally.finished[delta.finish_reason] += 1
            self.tally.preemptions += live.sequence.counters.preemptions
            if live.ask.params.grammar is not None:
                self.tally.held_finished[delta.finish_reason] += 1
                self.tally.held_preemptions += live.sequence.counters.preemptions
        if delta.error not in (None, MADE_TO_FAIL):
            raise Divergence(f"{live.ask} ended after {live.token_ids} with an error: {delta.error}")

    # -- what must hold ----------------------------------------------------------------------------------

    def _check_books(self) -> None:
        self._scheduler.check_integrity()
        held, accounted = self._runner.num_bytes, self._scheduler.num_bytes
        assert held == accounted, f"{held} bytes held, {accounted} accounted"

    def _rows(self) -> list[engine_sequence.Sequence]:
        return [live.sequence for live in self._live.values() if live.sequence.slot is not None]

    def _check_cells(self) -> None:
        buffers = list(self._runner._buffers())
        for row in self._rows():
            if not row.is_decoding or row.state_age:  # its states come back with the next plan
                continue
            cells = self._world.cells(row.tokens, row.feeds_head)
            num_trunk = len(cells) - (self._world.num_head_buffers if row.feeds_head else 0)
            if self._world.trunk.kv_bits is not None:
                cells = cells[:num_trunk]  # a head that was paused has been fed hidden states in 8 bits
            for layer, (kv, expected) in enumerate(zip(buffers, cells, strict=False)):
                num_cells = (
                    len(row.tokens) - 1 if layer < num_trunk else row.num_head_cached
                )  # the head may rest
                for part, (array, want) in enumerate(zip(kv.arrays(), expected, strict=True)):
                    if row.blocks and not isinstance(kv, RecurrentState):
                        found = np.concatenate(as_numpy(array[mx.array(row.blocks)]), axis=1)
                    else:
                        found = as_numpy(array[row.slot])
                    if not isinstance(kv, RecurrentState):
                        found, want = found[:, :num_cells], want[:, :num_cells]
                    if not found.size:
                        continue
                    error = np.abs(found.astype(np.float64) - want).max()
                    if not error <= self._world.tolerance.cells:
                        raise Divergence(f"row {row.id}: part {part} of layer {layer} is off by {error:.2g}")
                    self.tally.cells += want.shape[1]

    def _scribble(self) -> None:
        """Junk into every cell and state that holds nothing: nobody may ever see it."""
        for kv in self._runner._buffers():
            if isinstance(kv, RecurrentState):
                self._scribble_states(kv)
                continue
            num_slots, _, num_cells, _ = kv.keys.shape
            lengths = np.zeros(num_slots, np.int32)
            lengths[:1] = num_cells if self._has_blocks else 0  # the block of zeros, which everybody may see
            for row in self._rows():
                for place, num in self._places(row, num_cells):
                    lengths[place] = max(lengths[place], num)
            for save in self._prefix_cache.pending.saves if self._prefix_cache is not None else ():
                place, end = save.slot, save.end  # still to be copied
                if save.row_block is not None:
                    place, end = save.row_block, (save.end - 1) % num_cells + 1
                lengths[place] = max(lengths[place], end)
            empty = mx.array(np.arange(num_cells) >= lengths[:, None])[:, None, :, None]
            for cells in kv.cells:
                cells.arrays = [mx.where(empty, self._junk(array), array) for array in cells.arrays]

    def _junk(self, like: mx.array) -> mx.array:
        if like.dtype == mx.uint32:  # codes of quantised cells
            return mx.array(self._rng.getrandbits(32), mx.uint32)
        return mx.array(self._rng.uniform(-1e4, 1e4), like.dtype)

    @property
    def _has_blocks(self) -> bool:
        return self._runner.geometry(16).has_blocks

    def _places(self, row: engine_sequence.Sequence, block_size: int) -> list[tuple[int, int]]:
        """The row's slot or blocks, and how many of the cells there hold something."""
        if not self._has_blocks:
            assert row.slot is not None
            return [(row.slot, row.num_cached)]
        return [
            (block, min(block_size, max(0, row.num_cached - number * block_size)))
            for number, block in enumerate(row.blocks)
        ]

    def _scribble_states(self, states: RecurrentState) -> None:
        owned = {row.slot for row in self._rows() if row.num_cached}
        if self._prefix_cache is not None:
            owned |= {save.slot for save in self._prefix_cache.pending.states}
        for part in states.parts:
            for slot in range(part.shape[0]):
                if slot not in owned:
                    part[slot] = self._rng.uniform(-1e4, 1e4)

    def _check_answer(self, live: _Live) -> None:
        assert live.finish_reason is not None, "a request has no end"
        assert live.token_ids == live.sequence.tokens[len(live.ask.prompt) :], "deltas and tokens differ"
        expected, found = live.answer, live.token_ids
        while (place := _first_difference(expected.token_ids, found)) is not None:
            if expected.is_firm[place]:
                raise Divergence(
                    f"{live.ask} gave {found} where alone it gives {list(expected.token_ids)}: "
                    f"answer token {place} differs"
                )
            self.tally.excused += 1
            expected = self._world.answer(live.ask, found[: place + 1])
        if live.finish_reason in ("stop", "length") and len(found) != len(expected.token_ids):
            raise Divergence(f"{live.ask} ended after {found}, alone it gives {list(expected.token_ids)}")
        _check_logprobs(live, expected, self._world.tolerance.logprobs)
        if (fate := fate_of_reasoning(live.ask.params, found)) is not None:
            self.tally.thought[fate] += 1
        self.tally.tokens += len(found)


def _scheduler(history: History, runner: Runner, prefix_cache: PrefixCache | None) -> Scheduler:
    geometry = runner.geometry(history.page)
    longest = max(len(ask.prompt) + (ask.params.max_tokens or 0) for ask in history.asks)
    alone = geometry.num_bytes(1, geometry.capacity_for(longest + SLACK))
    if geometry.has_blocks:
        alone = geometry.num_bytes_in_blocks(1, NUM_SPARE_BLOCKS + geometry.blocks_for(longest + SLACK))
    roominess = history.roominess
    if geometry.has_blocks and roominess < 2:  # a row takes what it needs, so less is as tight
        roominess = 1 + (roominess - 1) / 3
    budget = alone * roominess
    config = EngineConfig(
        max_rows=history.max_rows, prefill_step_size=history.chunk, capacity_step=history.page
    )
    few_shapes = history.seed % 2 == 0
    controller = (
        RestlessController(history.seed) if history.seed % 3 else DepthController(few_shapes=few_shapes)
    )
    scheduler = Scheduler(config, geometry, int(budget), controller, prefix_cache)
    assert scheduler.longest_context() >= longest
    return scheduler


def _first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    pairs = zip(expected, found, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), None)


def _check_logprobs(live: _Live, expected: Answer, tolerance: float) -> None:
    wanted = live.ask.params.logprobs
    if wanted is None:
        assert not live.logprobs
        return
    assert [entry.token_id for entry in live.logprobs] == live.token_ids
    for entry, logprobs in zip(live.logprobs, expected.logprobs, strict=False):
        if not logprobs.size:
            continue
        best = np.sort(logprobs)[::-1][:wanted]
        errors = [
            abs(entry.logprob - logprobs[entry.token_id]),
            *(abs(value - logprobs[token_id]) for token_id, value in entry.top),
            *np.abs(np.array([value for _, value in entry.top]) - best),
        ]
        if len(entry.top) != len(best) or max(errors) > tolerance:
            raise Divergence(f"{live.ask}: log-probabilities {entry} are off by {max(errors):.2g}")
