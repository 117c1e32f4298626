"""Owns the validation of requests and the step from a validated request to a sequence.

`validate` runs on any thread, before the request is queued. `new_sequence` runs on the engine thread.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from outrider.answer_form import Grammar
from outrider.config import EngineConfig
from outrider.engine.adapters import AdapterDirectory, NoAdapters
from outrider.engine.allowed_tokens import AllowedTokens
from outrider.engine.draft_state import DraftState, TokenGrammar
from outrider.engine.sequence import OutputText, Sequence
from outrider.engine.thinking_budget import ThinkingBudget, ThinkingRule
from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.lazy import LazyRowGrammar
from outrider.grammar.matcher import RowGrammar
from outrider.request import (
    MAX_DEPTH,
    MAX_PROMPT_LOGPROBS,
    NO_DEFAULTS,
    DraftDepth,
    InvalidGrammar,
    InvalidRequest,
    PromptTooLong,
    Request,
    SamplingDefaults,
    SamplingParams,
)
from outrider.speculate.drafter import Drafter
from outrider.speculate.ngram import NgramDrafter
from outrider.speculate.prediction import PredictionDrafter


@dataclass(frozen=True)
class ModelFacts:
    """Facts about the loaded model, for threads that do not use the model."""

    name: str
    vocab_size: int
    max_context: int  # tokens: the model's limit or the operator's limit, whichever is less
    eos_ids: frozenset[int]
    drafter: str  # "mtp", "model", "ngram" or "none": the drafter in use
    head: str | None = None  # the file or folder that the head was loaded from
    head_layers: int = 0
    rank_head: str | None = None  # on several ranks: "whole" or "divided"
    rank_head_reason: str | None = None
    can_pause_head: bool = True  # False: feeding the head in every step is cheaper than catching up later
    can_store_head_inputs: bool = True  # rows without drafts store what the heads of other rows may be fed
    draft_model: str | None = None  # the model that drafts, as the operator named it
    draft_context: int | None = None  # tokens that the draft model can read
    dtype: str = ""
    weight_bits: tuple[int, ...] = ()  # of quantised layers
    kv_bits: int | None = None  # of keys and values; None: those of `dtype`
    reads_images: bool = False
    no_images_reason: str | None = None  # why a vision model does not read images
    no_audio_reason: str = "this model has no audio encoder"
    device: str = ""
    sampling: SamplingDefaults = NO_DEFAULTS  # from the model's generation_config.json
    family: str = ""  # the model_type of its config.json
    num_parameters: int = 0  # without the head and the vision encoder
    hidden_size: int = 0
    scorer_context: int = 0  # tokens that the scorer of prompts reads (spec_prefill); 0: there is none
    no_gaps_reason: str | None = None  # why the model cannot skip tokens of prompts
    copied_bytes: int = 0  # dequantised weights that a wide pass holds, at most: models/copied_weights.py

    @property
    def drafted_context(self) -> int:
        """Tokens that the model and its draft model can read."""
        return min(self.max_context, self.draft_context or self.max_context)


@dataclass(frozen=True)
class ValidatedRequest:
    """A request that the engine will serve. Only RequestValidator makes one; `Engine.submit` takes one."""

    request: Request  # its seed is set
    grammar: RowGrammar | LazyRowGrammar | None = (
        None  # compiled: the engine thread never waits for a grammar
    )

    @property
    def id(self) -> str:
        return self.request.id

    def for_answer(self, request_id: str, params: SamplingParams) -> ValidatedRequest:
        """The same request for another answer. `params` may differ in the seed only."""
        return replace(self, request=replace(self.request, id=request_id, params=params.with_seed()))


class RequestValidator:
    """Validates requests and makes sequences of them."""

    def __init__(
        self,
        config: EngineConfig,
        facts: ModelFacts,
        longest_context: int,
        new_text: Callable[[Request], OutputText],
        grammars: GrammarCompiler,
        token_text: Callable[[int], str],
        adapters: AdapterDirectory | None = None,
        ids: Iterator[int] | None = None,
    ) -> None:
        """`token_text`: the text of one token, special tokens included. `ids`: of sequences."""
        self._config = config
        self._facts = facts
        self._longest_context = longest_context  # tokens that the memory budget allows for a single row
        self._new_text = new_text
        self._grammars = grammars
        self._token_text = token_text
        self._ids = itertools.count() if ids is None else ids
        self._adapters = adapters or AdapterDirectory(NoAdapters())

    def validate(self, request: Request) -> ValidatedRequest:
        """Raise InvalidRequest, with the reason, if this request cannot be served."""
        self._check_prompt(request)
        if request.media is not None and not self._facts.reads_images:
            reason = self._facts.no_images_reason or "this model reads text only"
            raise InvalidRequest(f"the prompt has images: {reason}")
        params = request.params
        self._check_spec_prefill(request)
        self._adapters.find(params.adapter)
        grammar_ids = params.grammar.token_ids if params.grammar is not None else ()
        close_ids = params.reasoning.close_ids if params.reasoning is not None else ()
        named = (*params.logit_bias, *params.stop_token_ids, *params.prediction_ids, *grammar_ids, *close_ids)
        named += (*params.allowed_token_ids, *(i for word in params.bad_word_ids for i in word))
        outside = [i for i in named if not 0 <= i < self._facts.vocab_size]
        if outside:
            raise InvalidRequest(
                f"token id {outside[0]} is outside the vocabulary of {self._facts.vocab_size}"
            )
        if (
            self._facts.drafter == "none"
            and params.draft_depth not in ("auto", 0)
            and not _has_drafts(params)
        ):
            raise InvalidRequest(
                f"draft_depth {params.draft_depth} cannot be honoured: this engine runs without a drafter. "
                'Leave it "auto" or 0, or start the engine with a head, a draft model or drafter="ngram".'
            )
        self._check_thinking(params)
        self._check_allowed(params)
        if params.bad_words and not params.bad_word_ids:
            raise InvalidRequest("bad_words are texts, and the engine reads token ids: give it bad_word_ids")
        grammar = None
        if params.grammar is not None:
            if params.grammar.triggers is None and (params.ignore_eos or params.min_tokens):
                name = "ignore_eos" if params.ignore_eos else "min_tokens"
                raise InvalidRequest(f"{name} cannot be combined with a grammar: the grammar sets the end")
            grammar = self._compiled(params.grammar)
        return ValidatedRequest(replace(request, params=params.with_seed()), grammar)

    def _compiled(self, grammar: Grammar) -> RowGrammar | LazyRowGrammar:
        try:
            return self._grammars.new_row(grammar)
        except InvalidRequest as error:
            raise InvalidGrammar(str(error)) from error

    def new_sequence(self, validated: ValidatedRequest) -> Sequence:
        """Raises InvalidRequest if the request's adapter has been unloaded meanwhile."""
        request = validated.request
        params = request.params
        wanted = self._config.auto_depth if params.draft_depth == "auto" else params.draft_depth
        depth = 0 if self._facts.drafter == "none" else _max_depth(wanted)
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self._facts.eos_ids
        left = min(self._facts.max_context, self._longest_context) - len(request.prompt_ids)
        has_device_drafter = self._facts.drafter in ("mtp", "model")
        # With "auto", the row's own text is searched for drafts too, beside the head.
        looks_up = wanted == "auto" and self._config.drafter == "auto" and has_device_drafter
        # A head is fed the tokens of its cells later, by their numbers: not if tokens are skipped.
        may_be_fed_later = params.spec_prefill is None
        return Sequence(
            id=next(self._ids),
            request=request,
            text=self._new_text(request),
            stop_ids=stop_ids,
            max_tokens=left if params.max_tokens is None else min(left, params.max_tokens),
            adapter=self._adapters.find(params.adapter),
            drafting=DraftState(
                max_depth=self._max_drafts(params),
                head_depth=depth if self._follows(request) else 0,
                head_layers=0 if self._facts.drafter == "model" else max(1, self._facts.head_layers),
                head_context=self._facts.draft_context,
                can_pause_head=self._facts.can_pause_head and may_be_fed_later,
                stores_head_inputs=(
                    has_device_drafter and self._facts.can_store_head_inputs and may_be_fed_later
                ),
                drafter=self._new_drafter(request, depth, looks_up),
                lookup=NgramDrafter() if looks_up else None,
                is_auto=wanted == "auto",
                grammar=self._new_grammar(validated),
            ),
        )

    def _new_grammar(self, validated: ValidatedRequest) -> TokenGrammar | None:
        """What restricts the row's tokens: its grammar or its allowed tokens, and its thinking budget."""
        allowed_ids = validated.request.params.allowed_token_ids
        grammar: TokenGrammar | None = None if validated.grammar is None else validated.grammar.copy()
        if allowed_ids:
            grammar = AllowedTokens(allowed_ids, self._facts.vocab_size)
        marks, budget = validated.request.params.reasoning, validated.request.params.thinking_token_budget
        if marks is None or budget is None:
            return grammar
        rule = ThinkingRule(marks, budget, self._token_text)
        return ThinkingBudget(rule, self._facts.vocab_size, grammar)

    def _check_thinking(self, params: SamplingParams) -> None:
        """Refuse what would leave no token to sample where the end of the reasoning is forced."""
        if params.reasoning is None or params.thinking_token_budget is None:
            return
        if not params.reasoning.close_ids:
            raise InvalidRequest("the tokens that end the reasoning at its budget are missing")
        for token_id in params.reasoning.close_ids:
            if params.logit_bias.get(token_id) == -math.inf:
                raise InvalidRequest(
                    f"logit_bias forbids token {token_id}, which ends the reasoning at thinking_token_budget"
                )
            stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else self._facts.eos_ids)}
            if params.min_tokens and token_id in stop_ids:
                raise InvalidRequest(
                    f"min_tokens forbids the stop token {token_id}, which ends the reasoning at "
                    "thinking_token_budget: leave out one of the three"
                )

    def _check_spec_prefill(self, request: Request) -> None:
        """Refuse to skip tokens where a promise would break."""
        params, facts = request.params, self._facts
        if params.spec_prefill is None:
            return
        if facts.no_gaps_reason is not None:
            raise InvalidRequest(f"spec_prefill cannot be used with this model: {facts.no_gaps_reason}")
        if facts.scorer_context == 0:
            raise InvalidRequest(
                "spec_prefill is off: start the server with --spec-prefill-model to allow it (in Python: "
                "spec_prefill_model)"
            )
        if len(request.prompt_ids) > facts.scorer_context:
            raise InvalidRequest(
                f"spec_prefill: the prompt has {len(request.prompt_ids)} tokens and the scoring model reads "
                f"{facts.scorer_context}: leave spec_prefill out, or shorten the prompt"
            )
        if request.media is not None:
            raise InvalidRequest("spec_prefill cannot be used with images: it would skip parts of them")
        if params.prompt_logprobs is not None:
            raise InvalidRequest(
                "spec_prefill cannot be combined with log-probabilities of the prompt: it skips tokens of it"
            )

    def _check_allowed(self, params: SamplingParams) -> None:
        """Refuse `allowed_token_ids` that leave no token to sample at some place of every answer."""
        if not params.allowed_token_ids:
            return
        if params.grammar is not None:
            raise InvalidRequest(
                "allowed_token_ids cannot be combined with a grammar, which allows tokens too"
            )
        allowed, marks = set(params.allowed_token_ids), params.reasoning
        if (
            marks is not None
            and params.thinking_token_budget is not None
            and not allowed.issuperset(marks.close_ids)
        ):
            raise InvalidRequest(
                "allowed_token_ids lacks the tokens that end the reasoning at thinking_token_budget: "
                f"add {list(marks.close_ids)}"
            )
        left = {i for i in allowed if params.logit_bias.get(i) != -math.inf}
        left -= {word[0] for word in params.bad_word_ids if len(word) == 1}
        if not left:
            raise InvalidRequest("logit_bias and bad_words exclude all of allowed_token_ids: leave one token")

    def _check_prompt(self, request: Request) -> None:
        if not request.prompt_ids:
            raise InvalidRequest("the prompt is empty: it needs at least one token")
        length, limit = len(request.prompt_ids), self._facts.max_context
        most = request.params.truncate_prompt_tokens
        if most is not None and 0 < most < length:
            raise InvalidRequest(
                f"the prompt has {length} tokens and truncate_prompt_tokens is {most}: the engine does not "
                "cut prompts, so cut it before"
            )
        size = f"{length} tokens"
        if length >= limit:
            raise PromptTooLong(
                f"the prompt has {size} and the context holds {limit}, answer included: shorten it",
                size,
                limit,
            )
        if length >= self._longest_context:
            raise PromptTooLong(
                f"the prompt has {size} and the memory budget allows {self._longest_context}, "
                "answer included: shorten it or raise the budget",
                size,
                self._longest_context,
            )
        if request.params.prompt_logprobs is not None and length > MAX_PROMPT_LOGPROBS:
            raise InvalidRequest(
                f"log-probabilities are given for prompts of at most {MAX_PROMPT_LOGPROBS} tokens, and this "
                f"one has {length}: shorten it, or leave out prompt_logprobs (echo with logprobs)"
            )
        vocab_size = self._facts.vocab_size
        outside = [i for i in request.prompt_ids if not 0 <= i < vocab_size]
        if outside:
            raise InvalidRequest(
                f"the prompt has token id {outside[0]}, outside the vocabulary of {vocab_size}"
            )

    def _max_drafts(self, params: SamplingParams) -> int:
        """Drafts per step from all sources. A grammar or a prediction may give the most that a step takes."""
        if params.draft_depth != "auto":
            return params.draft_depth
        if _has_drafts(params):
            return MAX_DEPTH
        return 0 if self._facts.drafter == "none" else _max_depth(self._config.auto_depth)

    def _follows(self, request: Request) -> bool:
        """Whether the head, or the draft model, can follow this request's row."""
        if self._facts.drafter != "model":
            return self._facts.drafter == "mtp"
        limit = self._facts.draft_context
        is_too_long = limit is not None and len(request.prompt_ids) + MAX_DEPTH >= limit
        is_whole = request.media is None and request.params.spec_prefill is None
        return is_whole and not is_too_long  # a draft model reads text only, and all of it

    def _new_drafter(self, request: Request, depth: int, looks_up: bool) -> Drafter | None:
        """The row's drafter on the host. Rows that a draft model cannot follow look drafts up instead."""
        if request.params.prediction_ids:
            return PredictionDrafter(request.params.prediction_ids, len(request.prompt_ids))
        drafter = self._facts.drafter
        is_left_out = drafter == "model" and not looks_up and not self._follows(request)
        return NgramDrafter(depth) if depth > 0 and (drafter == "ngram" or is_left_out) else None


def _has_drafts(params: SamplingParams) -> bool:
    """True if the request itself is a source of drafts: it has a grammar or a prediction."""
    return params.grammar is not None or bool(params.prediction_ids)


def _max_depth(depth: DraftDepth) -> int:
    return MAX_DEPTH if depth == "auto" else depth
