"""Checks that rows with drafts and rows without drafts share cached prefixes on this device. Prints JSON.

    python -m benchmarks.gpu.shared_prefixes
    python -m benchmarks.gpu.shared_prefixes --tiny          # a machine without a GPU

A first request reads a prompt. A second request has the same prompt and some more tokens. One of the two
drafts. The second must find the prompt's whole blocks in the prefix cache. Its tokens, and the drafts that
the head makes for it, must be those of the same request on an engine whose prefix cache is empty.

    float32   cells in blocks. Everything must be equal
    bfloat16  cells as the engine keeps them on this device. Passes of other widths round differently, so
              equal answers are counted. `gap` is the largest difference of two logits where answers part

Two controls show that a wrong cell would be noticed: answers to a prompt whose first block differs, and
drafts of a head that does not catch up. Both must differ.

It runs in a process of its own: float32 products must not be rounded to TF32, which MLX decides at its start.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from benchmarks.gpu.driver import Driver
from benchmarks.gpu.loop import CAPACITY_STEP, prompts
from benchmarks.gpu.weights import Subject, random_subject
from benchmarks.side_by_side import NullDetokenizer
from outrider.build_caches import block_size_of
from outrider.cache.prefix_index import PrefixMatch
from outrider.config import EngineConfig
from outrider.engine.draft_state import DraftState
from outrider.engine.memory_plan import plan_memory
from outrider.engine.prefix.cache import new_prefix_cache
from outrider.engine.scheduler import Scheduler
from outrider.engine.sequence import Sequence as Row
from outrider.models import machine
from outrider.models.layer_swaps import without_speed_swaps
from outrider.plan import BLOCK_SIZE
from outrider.request import Request, SamplingParams
from outrider.speculate.per_draft import new_controller
from outrider.step.runner import Runner

NUM_PROMPT, NUM_MORE = 600, 5  # tokens of the first prompt, and tokens that the second has more
NUM_SHARED = NUM_PROMPT // BLOCK_SIZE * BLOCK_SIZE  # cells that the second must find
NUM_TOKENS, DEPTH = 24, 3
NUM_PROMPTS = 3
CHUNK = 256  # prompt tokens in a step: the first prompt takes three steps
MODELS = ("small-dense-4b", "small-4b")
TINY_MODELS = ("tiny-dense-4b", "tiny-4b")


@dataclass(frozen=True)
class Order:
    """Who drafts, and when the second request starts."""

    drafts_first: bool
    after: int | None  # tokens of the first answer; None: after its end

    @property
    def name(self) -> str:
        kinds = ("drafting", "plain") if self.drafts_first else ("plain", "drafting")
        starts = "after the end" if self.after is None else f"after {self.after} tokens"
        return f"{kinds[0]} then {kinds[1]}, {starts}"

    @property
    def shares_blocks(self) -> bool:
        """Where rows have blocks. A head that has to catch up writes cells, so its row gets copies."""
        return self.drafts_first and self.after is not None

    @property
    def depths(self) -> tuple[int, int]:
        return (DEPTH, 0) if self.drafts_first else (0, DEPTH)


ORDERS = tuple(Order(drafts_first, after) for after in (None, 4, 0) for drafts_first in (False, True))


@dataclass
class Answer:
    """The tokens of a request, and its head's drafts by the number of tokens before them."""

    row: Row
    drafts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    num_shared_blocks: int = 0  # blocks of its prompt that another row has too

    @property
    def tokens(self) -> list[int]:
        return self.row.tokens

    def note(self, others: Sequence[Answer]) -> None:
        """Call it after every step."""
        if self.row.num_generated and self.row.slot is not None:
            proposals = [p for p in self.row.drafting.proposals if p.source == "head"]
            if proposals:
                self.drafts[len(self.tokens)] = tuple(proposals[0].token_ids)
        held = {block for other in others if other is not self for block in other.row.blocks}
        self.num_shared_blocks = max(self.num_shared_blocks, len(held.intersection(self.row.blocks)))


class PrefixEngine:
    """Scheduler, runner and prefix cache, as an engine on this device has them."""

    def __init__(self, subject: Subject, block_size: int | None) -> None:
        self._outruns = machine.outruns_host()
        self._runner = Runner(subject.trunk, subject.head, compiles=self._outruns, block_size=block_size)
        self._memory = plan_memory(EngineConfig(), machine.free_bytes(), 0, False)
        self._num_rows = 0

    def alone(self, prompt: Sequence[int], depth: int) -> Answer:
        """The answer to a request on an engine whose prefix cache is empty."""
        session = self._new_session()
        answer = self._add(session, prompt, depth)
        session.run_out()
        return answer

    def pair(self, first: Sequence[int], second: Sequence[int], order: Order) -> tuple[Answer, Answer]:
        """The answers to two requests with one prefix cache, which is empty at first."""
        session = self._new_session()
        one = self._add(session, first, order.depths[0])
        if order.after is None:
            session.run_out()
        while order.after is not None and one.row.num_generated < order.after:
            session.step()
        two = self._add(session, second, order.depths[1])
        session.run_out()
        return one, two

    def _new_session(self) -> Session:
        self._runner.clear_prefixes()
        geometry = self._runner.geometry(CAPACITY_STEP)
        config = EngineConfig(max_rows=4, prefill_step_size=CHUNK, max_stall_ms=0)
        prefixes = new_prefix_cache(geometry, self._memory.prefixes, None)
        controller = new_controller(None, None, self._outruns)
        scheduler = Scheduler(config, geometry, self._memory.rows, controller, prefixes)
        return Session(scheduler, Driver(scheduler, self._runner, self._outruns))

    def _add(self, session: Session, prompt: Sequence[int], depth: int) -> Answer:
        number = self._num_rows
        self._num_rows += 1
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, draft_depth=depth)
        state = DraftState(depth, depth, can_pause_head=not self._outruns, stores_head_inputs=True)
        request = Request(str(number), tuple(prompt), params)
        return session.add(Row(number, request, NullDetokenizer(), frozenset(), NUM_TOKENS, state))


class Session:
    """Some requests with one prefix cache."""

    def __init__(self, scheduler: Scheduler, driver: Driver) -> None:
        self._scheduler = scheduler
        self._driver = driver
        self._answers: list[Answer] = []

    def add(self, row: Row) -> Answer:
        self._scheduler.add(row)
        self._answers.append(Answer(row))
        return self._answers[-1]

    def step(self) -> None:
        self._driver.step()
        for answer in self._answers:
            answer.note(self._answers)

    def run_out(self) -> None:
        while not self._scheduler.is_idle:
            self.step()
        self._driver.go_idle()


# -- comparisons -------------------------------------------------------------------------------------------


@dataclass
class Comparison:
    """Answers of one order, over all prompts, beside those without a prefix hit."""

    num_answers: int = 0
    num_equal: int = 0
    num_cached: list[int] = field(default_factory=list)  # cells that each second request has found
    num_shared_blocks: list[int] = field(default_factory=list)
    num_drafts: int = 0  # steps with drafts, as long as the tokens are equal
    num_equal_drafts: int = 0
    num_equal_first_drafts: int = 0  # of drafts for the first decode step
    num_first_drafts: int = 0
    num_accepted: int = 0
    gap: float = 0.0

    def add(self, subject: Subject, got: Answer, want: Answer) -> None:
        place = first_difference(got.tokens, want.tokens)
        self.num_answers += 1
        self.num_equal += place is None
        self.num_accepted += sum(got.row.counters.accepted)
        if place is not None:
            self.gap = max(self.gap, _gap(subject, got.tokens, want.tokens, place))
        first = got.row.num_prompt + 1
        for num_tokens in got.drafts.keys() & want.drafts.keys():
            if place is None or num_tokens <= place:
                is_equal = got.drafts[num_tokens] == want.drafts[num_tokens]
                self.num_drafts += 1
                self.num_equal_drafts += is_equal
                self.num_first_drafts += num_tokens == first
                self.num_equal_first_drafts += is_equal and num_tokens == first

    def add_second(self, answer: Answer) -> None:
        self.num_cached.append(answer.row.counters.num_loaded)
        self.num_shared_blocks.append(answer.num_shared_blocks)

    def as_json(self) -> dict[str, Any]:
        return {
            "cells_cached": min(self.num_cached),
            "blocks_shared": min(self.num_shared_blocks),
            "answers_equal": f"{self.num_equal} of {self.num_answers}",
            "first_drafts_equal": f"{self.num_equal_first_drafts} of {self.num_first_drafts}",
            "drafts_equal": f"{self.num_equal_drafts} of {self.num_drafts}",
            "drafts_accepted": self.num_accepted,
            "gap": round(self.gap, 4),
        }

    def wrong(self, must_be_equal: bool) -> Iterator[str]:
        if min(self.num_cached) < NUM_SHARED:
            yield f"only {min(self.num_cached)} cells were cached"
        if self.num_first_drafts == 0:
            yield "the head made no drafts"
        if must_be_equal and self.num_equal < self.num_answers:
            yield f"{self.num_equal} of {self.num_answers} answers are equal"
        if must_be_equal and self.num_equal_drafts < self.num_drafts:
            yield f"{self.num_equal_drafts} of {self.num_drafts} drafts are equal"

    def not_shared(self) -> Iterator[str]:
        if min(self.num_shared_blocks) < NUM_SHARED // BLOCK_SIZE:
            yield f"only {min(self.num_shared_blocks)} blocks were shared"


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


def _gap(subject: Subject, a: Sequence[int], b: Sequence[int], place: int) -> float:
    """The difference of the two tokens' logits at the first place where answers differ."""
    with without_speed_swaps(subject.model):
        logits = subject.model(mx.array(a[:place])[None])[0, -1].astype(mx.float32)
    return abs(float(logits[a[place]] - logits[b[place]]))


# -- the check ---------------------------------------------------------------------------------------------


class SharedPrefixes:
    """The check of one model."""

    def __init__(self, subject: Subject, block_size: int | None, num_prompts: int = NUM_PROMPTS) -> None:
        self._subject = subject
        self._engine = PrefixEngine(subject, block_size)
        drawn = prompts(subject.trunk.vocab_size, num_prompts, NUM_PROMPT + NUM_MORE)
        self._pairs = [(tuple(own[:NUM_PROMPT]), tuple(own)) for own in drawn]
        self._alone: dict[tuple[tuple[int, ...], int], Answer] = {}
        self._in_blocks = block_size is not None
        self.results: dict[str, Any] = {"layout": "blocks" if self._in_blocks else "slots"}
        self.wrong: list[str] = []

    def run(self, must_be_equal: bool, orders: Sequence[Order] = ORDERS) -> None:
        for order in orders:
            compared = self.compare(order)
            self.results[order.name] = compared.as_json()
            lines = [*compared.wrong(must_be_equal)]
            if self._in_blocks and order.shares_blocks:
                lines += compared.not_shared()
            self.wrong += [f"{order.name}: {line}" for line in lines]
        self._run_controls()

    def compare(self, order: Order) -> Comparison:
        found = Comparison()
        for first, second in self._pairs:
            one, two = self._engine.pair(first, second, order)
            found.add(self._subject, one, self._without_hit(first, order.depths[0]))
            found.add(self._subject, two, self._without_hit(second, order.depths[1]))
            found.add_second(two)
        return found

    def _without_hit(self, prompt: tuple[int, ...], depth: int) -> Answer:
        if (prompt, depth) not in self._alone:
            self._alone[prompt, depth] = self._engine.alone(prompt, depth)
        return self._alone[prompt, depth]

    def _run_controls(self) -> None:
        """Both must differ, or equal answers prove nothing."""
        prompt = self._pairs[0][1]
        changed = (*prompt[BLOCK_SIZE : 2 * BLOCK_SIZE], *prompt[BLOCK_SIZE:])
        answers = [self._engine.alone(own, 0).tokens[len(prompt) :] for own in (prompt, changed)]
        if answers[0] == answers[1]:
            self.wrong.append("control: the answer does not depend on the prompt's first block")
        with no_catch_up():
            compared = self.compare(Order(drafts_first=False, after=None))
        self.results["control: the head does not catch up"] = compared.as_json()
        if compared.num_equal_first_drafts == compared.num_first_drafts:
            self.wrong.append("control: the drafts do not depend on the head's cells")


@contextmanager
def no_catch_up() -> Iterator[None]:
    """Within the block, heads take every cached cell for one that a head was fed."""
    right = PrefixMatch.num_head_cached
    PrefixMatch.num_head_cached = lambda _, num_cells: num_cells  # type: ignore[method-assign]
    try:
        yield
    finally:
        PrefixMatch.num_head_cached = right  # type: ignore[method-assign]


def check(names: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"device": str(mx.default_device()), "results": {}, "wrong": []}
    for name in names:
        for dtype in ("f32", "bf16"):
            subject = random_subject(name, dtype, long_memory=True)
            block_size = BLOCK_SIZE if dtype == "f32" else block_size_of(subject.trunk, "auto")
            own = SharedPrefixes(subject, block_size)
            own.run(must_be_equal=dtype == "f32")
            found["results"][f"{name} {dtype}"] = own.results
            found["wrong"] += [f"{name} {dtype}: {line}" for line in own.wrong]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="use tiny models of the same families")
    args = parser.parse_args()
    os.environ["MLX_ENABLE_TF32"] = "0"
    machine.settle()
    print(json.dumps(check(TINY_MODELS if args.tiny else MODELS)))


if __name__ == "__main__":
    main()
