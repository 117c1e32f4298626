"""A sequence: a request's tokens, its cells in the caches, and when it is finished. Pure Python.

Its drafts are in `Sequence.drafting` (draft_state.py), its counters and times in `Sequence.counters`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Literal, Protocol

from outrider.cache.prefix_index import pair_key
from outrider.engine.draft_state import DraftState
from outrider.plan import AdapterInfo, RowPlan, TokenLogprobs
from outrider.request import MAX_DEPTH, Request, SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "queue_timeout", "error"]


class OutputText(Protocol):
    """Turns a sequence's committed tokens into text and looks for its stop strings."""

    def push(self, token_id: int) -> tuple[str, str | None]:
        """The text that is final now, and the stop string that the token completed, if any."""
        ...

    def flush(self) -> str:
        """The text that was held back, once no token can follow."""
        ...


@dataclass(frozen=True)
class Stats:
    """Counts and times of a finished request."""

    num_prompt: int = 0
    num_generated: int = 0
    num_cached: int = 0  # prompt tokens whose cells came from the prefix cache
    num_stored: int = 0  # prompt tokens whose cells this request has added to the prefix cache
    num_skipped: int = 0  # prompt tokens that the model has not read (spec_prefill)
    steps: int = 0  # steps that committed tokens; the last prefill step is one
    drafted: list[int] = field(default_factory=list)  # by draft position
    accepted: list[int] = field(default_factory=list)  # by draft position
    preemptions: int = 0
    submitted_s: float | None = None  # a time of `time.perf_counter`
    queue_s: float | None = None  # from submission to the first step
    ttft_s: float | None = None  # from submission to the first token
    total_s: float | None = None

    @property
    def stride(self) -> float:
        """Mean tokens per step that committed tokens."""
        return self.num_generated / self.steps if self.steps else 0.0


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How much of a prompt is computed."""

    num_done: int  # tokens, those from the prefix cache included
    num_cached: int  # tokens from the prefix cache
    num_total: int
    seconds: float  # since the row's first step


@dataclass(frozen=True, slots=True)
class TokenOrigin:
    """How a token was won. Of a draft: its source and its place in the step's drafts, from 1 on.

    "bonus": the model's own token after accepted drafts. "plain": its own token in a step without any.
    """

    name: str  # a Source, "bonus" or "plain"
    place: int | None = None


def token_origins(row: RowPlan, num_tokens: int) -> tuple[TokenOrigin, ...]:
    """The origins of the tokens that a step gave to a row: accepted drafts and one token of the model."""
    num_accepted = num_tokens - 1
    names = ["forced" if i < row.num_forced else row.draft_source for i in range(num_accepted)]
    drafts = (TokenOrigin(name, i + 1) for i, name in enumerate(names))
    return (*drafts, TokenOrigin("bonus" if num_accepted else "plain"))


@dataclass(frozen=True)
class Delta:
    """What a request gained in a step, or its end."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    stats: Stats | None = None  # with the finish
    stop_string: str | None = None  # the stop string that ended the answer
    is_client_error: bool = False  # the error is of the request, such as its grammar, not of the engine
    origins: tuple[TokenOrigin, ...] = ()  # one for each token, if requested
    prompt_progress: PromptProgress | None = None  # if requested
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # if requested, once; NaN for the first token

    def merged(self, later: Delta) -> Delta:
        return Delta(
            self.request_id,
            self.token_ids + later.token_ids,
            self.text + later.text,
            self.logprobs + later.logprobs,
            later.finish_reason,
            later.error,
            later.stats,
            self.stop_string or later.stop_string,
            later.is_client_error,
            self.origins + later.origins,
            later.prompt_progress or self.prompt_progress,
            self.prompt_logprobs or later.prompt_logprobs,
        )


@dataclass
class SequenceCounters:
    """Counts and times of a sequence so far: `stats` makes `Stats` of them."""

    drafted: list[int] = field(default_factory=lambda: [0] * MAX_DEPTH)
    accepted: list[int] = field(default_factory=lambda: [0] * MAX_DEPTH)
    steps: int = 0
    preemptions: int = 0
    num_loaded: int = 0  # prompt cells that came from the prefix cache
    num_saved: int = 0  # prompt cells that were copied to it; some twice, as blocks fill up
    submitted_s: float = field(default_factory=time.perf_counter)
    started_s: float | None = None
    first_token_s: float | None = None

    def add_drafts(self, num_drafted: int, num_accepted: int) -> None:
        for i in range(num_drafted):
            self.drafted[i] += 1
        for i in range(num_accepted):
            self.accepted[i] += 1

    def stats(self, num_prompt: int, num_generated: int, num_skipped: int = 0) -> Stats:
        deepest = max((i + 1 for i, n in enumerate(self.drafted) if n), default=0)
        return Stats(
            num_prompt=num_prompt,
            num_generated=num_generated,
            num_cached=self.num_loaded,
            num_stored=min(self.num_saved, num_prompt - self.num_loaded),
            num_skipped=num_skipped,
            steps=self.steps,
            drafted=self.drafted[:deepest],
            accepted=self.accepted[:deepest],
            preemptions=self.preemptions,
            submitted_s=self.submitted_s,
            queue_s=None if self.started_s is None else self.started_s - self.submitted_s,
            ttft_s=None if self.first_token_s is None else self.first_token_s - self.submitted_s,
            total_s=time.perf_counter() - self.submitted_s,
        )


@dataclass(eq=False)
class Sequence:
    """Between steps `num_cached` cells hold tokens[:num_cached]; a decoding row has all but the last.

    With `spec_prefill` the cells hold the tokens at `kept`, then those after the prompt. Such a row has no
    cells before its prompt is scored, and never any in common with the prefix cache.
    """

    id: int
    request: Request
    text: OutputText
    stop_ids: frozenset[int]
    max_tokens: int
    drafting: DraftState = field(default_factory=DraftState)
    counters: SequenceCounters = field(default_factory=SequenceCounters)
    tokens: list[int] = field(default_factory=list)
    slot: int | None = None  # the row in the cache buffers; None while it waits
    blocks: list[int] = field(default_factory=list)  # of its cells, where they are kept by blocks
    num_cached: int = 0
    num_head_cached: int = 0  # cells that have the head's part; fewer than num_cached after a pause
    num_prefill: int = 0  # tokens to cache before the row samples; after a preemption, more than the prompt
    state_age: int = 0  # its recurrent states have to be restored: see RestoreState; 0: they are right
    failures: int = 0  # failed steps with this sequence in them, since its last good decode step
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # if requested
    adapter: AdapterInfo | None = None
    num_scored: int = 0  # prompt tokens that the scorer has read
    kept: Tokens[int] | None = None  # positions of the prompt's tokens that are read; None: all, or not known
    num_prompt: int = field(init=False)
    _keys: list[int] = field(default_factory=list)  # by cell; see keys

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_ids)
        self.num_prompt = len(self.tokens)
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [TokenLogprobs(self.tokens[0], math.nan, ())]  # nothing is before it
        self.num_prefill = len(self.tokens)

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_left(self) -> int:
        """Tokens it may still commit."""
        return self.max_tokens - self.num_generated

    @property
    def feeds_head(self) -> bool:
        return self.drafting.feeds_head

    @property
    def head_lag(self) -> int:
        """Cells that the trunk has cached and the head was not fed."""
        return self.num_cached - self.num_head_cached

    @property
    def is_decoding(self) -> bool:
        return self.num_cached >= self.num_prefill

    # -- skipped tokens ----------------------------------------------------------------------------------

    @property
    def is_exact(self) -> bool:
        """False with `spec_prefill`: no other row may use its cells, and it uses no other row's."""
        return self.params.spec_prefill is None

    @property
    def awaits_scores(self) -> bool:
        """Whether its prompt has to be scored before it is read."""
        spec = self.params.spec_prefill
        return spec is not None and spec.keep < 1 and self.num_scored < self.num_prompt

    @property
    def num_skipped(self) -> int:
        return 0 if self.kept is None else self.num_prompt - len(self.kept)

    def keep(self, positions: Tokens[int]) -> None:
        """The prompt was scored: only these of its tokens are read."""
        self.num_scored = self.num_prompt
        self.kept = positions if len(positions) < self.num_prompt else None
        self.num_prefill = len(self.tokens) - self.num_skipped

    def positions(self, start: int, end: int) -> Tokens[int]:
        """The positions of the tokens in these cells."""
        if self.kept is None:
            return range(start, end)
        after = range(max(start, len(self.kept)), max(end, len(self.kept)))
        return (*self.kept[start:end], *(cell + self.num_skipped for cell in after))

    # -- cells, as the prefix cache knows them -----------------------------------------------------------

    def keys(self, start: int, end: int) -> tuple[int, ...]:
        """The prefix cache's keys of these cells. Earlier tokens are the path to a cell in the prefix tree.

        A key is the cell's own token and, if the head follows the row or may follow another row that has the
        cell, the next token too (one token more for each further layer of the head).
        """
        while len(self._keys) < end:
            cell = len(self._keys)
            key = self._token_key(cell)
            for further in range(self.num_ahead):
                key = pair_key(key, self._token_key(cell + 1 + further))
            self._keys.append(key)
        return tuple(self._keys[start:end])

    def _token_key(self, place: int) -> int:
        prompt_keys = self.request.prompt_keys
        if prompt_keys is not None and place < len(prompt_keys):
            return prompt_keys[place]
        return self.tokens[place]

    @property
    def num_ahead(self) -> int:
        """Tokens after a cell's own token that the cell depends on, the drafter's part of it included."""
        return self.drafting.head_layers if self.has_head_cells else 0

    @property
    def has_head_cells(self) -> bool:
        """Whether its cached cells may have, or get, the head's part."""
        return self.feeds_head or self.drafting.stores_head_inputs

    @property
    def num_final(self) -> int:
        """Cells whose trunk part is final; a paused head may add its own part later."""
        return min(self.num_cached, len(self.tokens) - 1) - max(0, self.num_ahead - 1)

    @property
    def first_open(self) -> int:
        """The first cell that a later step of the row may write: all cells before it are final."""
        cached = min(self.num_cached, self.num_head_cached) if self.feeds_head else self.num_cached
        return max(0, cached - max(0, self.num_ahead - 1))

    def num_head_cached_of(self, start: int, end: int) -> int:
        """How many of these cells the head was fed; all of them if they have no head's part."""
        return max(0, min(end, self.num_head_cached) - start) if self.has_head_cells else end - start

    def count_loaded(self, num_cells: int) -> None:
        if self.num_generated == 0 and self.counters.preemptions == 0:
            self.counters.num_loaded += num_cells

    def count_saved(self, start: int, end: int) -> None:
        self.counters.num_saved += max(0, min(end, self.num_prompt) - start)

    def drop_cache(self) -> None:
        """Give up all cells. The tokens stay: every committed token will be fed again."""
        self.slot = None
        self.state_age = 0
        self.num_cached = 0
        self.num_head_cached = 0
        self.num_prefill = len(self.tokens) - self.num_skipped
        if self.awaits_scores:
            self.num_scored = 0
        self.drafting.drop()

    # -- tokens ------------------------------------------------------------------------------------------

    def commit(self, token_ids: Tokens[int], has_masks: bool = True) -> Delta:
        """Append sampled tokens one by one until a finish rule holds; return what was gained.

        One by one, so that the answer ends at the same token whatever the stride was. An overlapped step has
        no masks (`has_masks` is False): its tokens count only up to the first that needed one.
        """
        grammar = self.drafting.grammar
        num_taken, whole_text = 0, ""
        reason: FinishReason | None = None
        stop_string: str | None = None
        for token_id in token_ids:
            if grammar is not None and not has_masks and grammar.is_restricting:
                break
            text, reason, stop_string = self._commit_one(token_id)
            num_taken, whole_text = num_taken + 1, whole_text + text
            if reason is not None:
                break
        taken = tuple(token_ids[:num_taken])
        return Delta(self.request.id, taken, whole_text, finish_reason=reason, stop_string=stop_string)

    def _commit_one(self, token_id: int) -> tuple[str, FinishReason | None, str | None]:
        """The token's text, why the answer ends with it, and the stop string that it completes."""
        self.tokens.append(token_id)
        if self.drafting.grammar is not None:
            self.drafting.grammar.commit(token_id)
        if token_id in self.stop_ids:
            text, stop_string = self._text_of_stop(token_id)
            return text, "stop", stop_string
        text, stop_string = self.text.push(token_id)
        if stop_string is not None:
            return text, "stop", stop_string
        if self.num_left <= 0:
            return text + self.text.flush(), "length", None
        return text, None, None

    def _text_of_stop(self, token_id: int) -> tuple[str, str | None]:
        """The last text of an answer that a stop token ends; the token's own text only if it is asked for."""
        if not self.params.include_stop_str_in_output:
            return self.text.flush(), None
        text, stop_string = self.text.push(token_id)
        return text + self.text.flush(), stop_string

    def prompt_progress(self) -> PromptProgress:
        started_s, now_s = self.counters.started_s, time.perf_counter()
        num_done = min(self.positions(self.num_cached, self.num_cached + 1)[0], self.num_prompt)
        return PromptProgress(
            num_done, self.counters.num_loaded, self.num_prompt, now_s - (started_s or now_s)
        )

    def stats(self) -> Stats:
        return self.counters.stats(self.num_prompt, self.num_generated, self.num_skipped)
