"""A request in flight: its tokens, where it stands, and when it is finished. Pure Python."""

from __future__ import annotations

import time
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from outrider.cache.prefix_index import pair_key
from outrider.plan import TokenLogprobs
from outrider.request import MAX_DEPTH, Request, SamplingParams
from outrider.speculate.acceptance import RowAcceptance, Source
from outrider.speculate.drafter import Drafter

FinishReason = Literal["stop", "length", "cancelled", "error"]


class OutputText(Protocol):
    """Turns a sequence's committed tokens into text and watches for its stop strings."""

    def push(self, token_id: int) -> tuple[str, str | None]:
        """The text that is final now, and the stop string that was completed, if one was."""
        ...

    def flush(self) -> str:
        """What was held back, once nothing can follow."""
        ...


class TokenGrammar(Protocol):
    """Holds a row to a form: see grammar/matcher.py."""

    def commit(self, token_id: int) -> None: ...

    def num_allowed(self, drafts: Tokens[int]) -> int: ...

    def masks(self, drafts: Tokens[int]) -> np.ndarray | None: ...

    def forced(self, most: int) -> list[int]: ...


@dataclass(frozen=True)
class Stats:
    """How a request went."""

    num_prompt: int = 0
    num_generated: int = 0
    num_cached: int = 0  # prompt tokens that were not computed: their cells came from the prefix cache
    num_stored: int = 0  # prompt tokens whose cells the prefix cache now has because of this request
    steps: int = 0  # forward passes that committed tokens
    drafted: list[int] = field(default_factory=list)  # by draft position
    accepted: list[int] = field(default_factory=list)  # by draft position
    preemptions: int = 0
    queue_s: float | None = None  # submitted -> first planned
    ttft_s: float | None = None  # submitted -> first token
    total_s: float | None = None

    @property
    def stride(self) -> float:
        """Tokens committed a step, by decode steps."""
        return self.num_generated / self.steps if self.steps else 0.0


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
    stop_string: str | None = None  # which one ended it

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
        )


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts that a row could feed."""

    source: Source
    token_ids: Tokens[int]
    num_sure: int = 0  # so many of them must come


@dataclass(eq=False)
class Sequence:
    """Between steps `num_cached` cells hold tokens[:num_cached]; a decoding row has all but the last."""

    id: int
    request: Request
    text: OutputText
    stop_ids: frozenset[int]
    max_tokens: int
    max_depth: int  # most drafts this row may feed in a step
    head_depth: int = 0  # most drafts from the MTP head; 0: the head does not follow this row
    can_pause_head: bool = True  # it is not fed while the controller wants no drafts of it
    head_layers: int = 1  # the head's cells are made from so many tokens after their own
    drafter: Drafter | None = None
    lookup: Drafter | None = None  # a second one
    is_auto: bool = False  # the depths are the controller's, up to those above
    grammar: TokenGrammar | None = None
    tokens: list[int] = field(default_factory=list)
    num_cached: int = 0
    num_prefill: int = 0  # tokens to be cached before the row picks; more than the prompt after a preemption
    slot: int | None = None
    num_head_cached: int = 0  # of a decoding row's cells, those whose pairs the head was fed; it may rest
    num_next: int = 0  # drafts that the head is to make for the next step
    record: RowAcceptance | None = None  # how its drafts fare
    proposals: Tokens[Proposal] = ()  # what it could feed in the next step
    drafts: Tokens[int] = ()  # what it feeds
    masks: np.ndarray | None = None  # [1 + drafts, words] what the grammar allows at each position
    failures: int = 0  # steps that raised with this sequence in them, since it last got through a decode step

    drafted: list[int] = field(default_factory=lambda: [0] * MAX_DEPTH)
    accepted: list[int] = field(default_factory=lambda: [0] * MAX_DEPTH)
    steps: int = 0
    preemptions: int = 0
    num_loaded: int = 0  # cells of the prompt that came from the prefix cache
    num_saved: int = 0  # cells of the prompt that were copied to it; some twice, as blocks fill up
    _keys: list[int] = field(default_factory=list)  # by cell; see keys
    submitted_s: float = field(default_factory=time.perf_counter)
    started_s: float | None = None
    first_token_s: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_ids)
        self.num_prefill = len(self.tokens)
        if self.grammar is not None:
            self.masks = self.grammar.masks(())

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_left(self) -> int:
        """Tokens it may still commit."""
        return self.max_tokens - self.num_generated

    @property
    def feeds_head(self) -> bool:
        return self.head_depth > 0

    @property
    def may_pause_head(self) -> bool:
        return self.feeds_head and self.is_auto and self.can_pause_head

    @property
    def is_decoding(self) -> bool:
        return self.num_cached >= self.num_prefill

    def keys(self, start: int, end: int) -> tuple[int, ...]:
        """What these cells are known by in the prefix cache: by all that went into them.

        That is the text up to the cell, and where the head follows, the token after it too (one for each of
        its layers).
        """
        while len(self._keys) < end:
            cell = len(self._keys)
            key = self._token_key(cell)
            for further in range(self.num_ahead):
                key = pair_key(key, self._token_key(cell + 1 + further))
            self._keys.append(key)
        return tuple(self._keys[start:end])

    @property
    def num_ahead(self) -> int:
        """Tokens after a cell's own that its contents depend on."""
        return self.head_layers if self.feeds_head else 0

    @property
    def num_final(self) -> int:
        """Cells that hold committed tokens and will not be written again but by a head that catches up."""
        return min(self.num_cached, len(self.tokens) - 1) - max(0, self.num_ahead - 1)

    def num_head_cached_of(self, start: int, end: int) -> int:
        """Of these cells, those that the head was fed; all where there is no head to feed."""
        return max(0, min(end, self.num_head_cached) - start) if self.feeds_head else end - start

    def _token_key(self, place: int) -> int:
        prompt_keys = self.request.prompt_keys
        if prompt_keys is not None and place < len(prompt_keys):
            return prompt_keys[place]
        return self.tokens[place]

    def count_loaded(self, num_cells: int) -> None:
        if self.num_generated == 0 and self.preemptions == 0:
            self.num_loaded += num_cells

    def count_saved(self, start: int, end: int) -> None:
        self.num_saved += max(0, min(end, self.num_prompt) - start)

    def drop_cache(self) -> None:
        """Back to where nothing is cached; every committed token will be fed again, none is lost."""
        self.slot = None
        self.num_cached = 0
        self.num_head_cached = 0
        self.num_prefill = len(self.tokens)
        self.drafts = self.proposals = ()
        self.masks = None if self.masks is None else self.masks[:1]

    def commit(self, token_ids: Tokens[int]) -> Delta:
        """Append picked tokens one by one until a finish rule stops it; what was gained."""
        gained = Delta(self.request.id)
        for token_id in token_ids:
            gained = gained.merged(self._commit_one(token_id))
            if gained.finish_reason is not None:
                break
        return gained

    def _commit_one(self, token_id: int) -> Delta:
        self.tokens.append(token_id)
        if self.grammar is not None:
            self.grammar.commit(token_id)
        if token_id in self.stop_ids:
            return self._gained(token_id, self.text.flush(), "stop")
        piece, stop_string = self.text.push(token_id)
        if stop_string is not None:
            return self._gained(token_id, piece, "stop", stop_string)
        if self.num_left <= 0:
            return self._gained(token_id, piece + self.text.flush(), "length")
        return self._gained(token_id, piece, None)

    def _gained(
        self, token_id: int, text: str, reason: FinishReason | None, stop_string: str | None = None
    ) -> Delta:
        return Delta(self.request.id, (token_id,), text, finish_reason=reason, stop_string=stop_string)

    def prepare_next(self, from_head: Tokens[int]) -> None:
        """Collect what the row could feed in its next step; `use_drafts` takes its choice."""
        most = min(self.max_depth, self.num_left - 1)
        found = self._proposals(from_head, most) if most > 0 else []
        if self.grammar is not None:
            found = self._allowed(found, self.grammar, most)
            self.masks = self.grammar.masks(())
        self.proposals, self.drafts = found, ()

    def _proposals(self, from_head: Tokens[int], most: int) -> list[Proposal]:
        found = [(d.source, d.propose(self.tokens, most)) for d in (self.drafter, self.lookup) if d]
        found.append(("head", from_head))
        return [Proposal(source, drafts[:most]) for source, drafts in found if drafts]

    def _allowed(self, found: list[Proposal], grammar: TokenGrammar, most: int) -> list[Proposal]:
        """What the grammar leaves of the proposals, and what it forces."""
        forced = grammar.forced(most) if most > 0 else []
        left = [Proposal("forced", forced, len(forced))] if forced else []
        for proposal in found:
            drafts = list(proposal.token_ids)[: grammar.num_allowed(proposal.token_ids)]
            if len(drafts) > len(forced):  # more than what must come anyway; it begins with that
                left.append(Proposal(proposal.source, drafts, len(forced)))
        return left

    def use_drafts(self, which: int, num: int) -> None:
        """Feed the first `num` drafts of a proposal; only now are a grammar's masks for them made."""
        self.drafts = self.proposals[which].token_ids[:num] if self.proposals else ()
        if self.grammar is not None and self.drafts:
            self.masks = self.grammar.masks(self.drafts)
        elif self.masks is not None:
            self.masks = self.masks[:1]

    def count_drafts(self, num_drafted: int, num_accepted: int) -> None:
        for i in range(num_drafted):
            self.drafted[i] += 1
        for i in range(num_accepted):
            self.accepted[i] += 1

    def stats(self) -> Stats:
        deepest = max((i + 1 for i, n in enumerate(self.drafted) if n), default=0)

        def since_submitted(moment: float | None) -> float | None:
            return None if moment is None else moment - self.submitted_s

        return Stats(
            num_prompt=self.num_prompt,
            num_generated=self.num_generated,
            num_cached=self.num_loaded,
            num_stored=min(self.num_saved, self.num_prompt - self.num_loaded),
            steps=self.steps,
            drafted=self.drafted[:deepest],
            accepted=self.accepted[:deepest],
            preemptions=self.preemptions,
            queue_s=since_submitted(self.started_s),
            ttft_s=since_submitted(self.first_token_s),
            total_s=time.perf_counter() - self.submitted_s,
        )
