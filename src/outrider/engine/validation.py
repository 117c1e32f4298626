"""The door of the engine: every request is checked here, before it costs anything, and becomes a sequence."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from outrider.config import EngineConfig
from outrider.engine.draft_state import DraftState
from outrider.engine.sequence import OutputText, Sequence
from outrider.grammar.compiler import GrammarCompiler
from outrider.request import MAX_DEPTH, DraftDepth, InvalidRequest, Request
from outrider.speculate.drafter import Drafter
from outrider.speculate.ngram import NgramDrafter
from outrider.speculate.prediction import PredictionDrafter


@dataclass(frozen=True)
class ModelFacts:
    """What the engine knows of its model without touching it."""

    name: str
    vocab_size: int
    max_context: int  # tokens: the model's limit and the operator's, whichever is less
    eos_ids: frozenset[int]
    drafter: str  # "mtp", "ngram" or "none": what is really on
    head: str | None = None  # where the head came from
    head_layers: int = 0
    can_pause_head: bool = True  # whether catching up costs less than feeding it all the time
    dtype: str = ""
    reads_images: bool = False  # whether pictures are read
    no_images_reason: str | None = None  # why a vision model reads none
    device: str = ""


class RequestValidator:
    """Turns requests into sequences, or refuses them with a reason."""

    def __init__(
        self,
        config: EngineConfig,
        facts: ModelFacts,
        longest_context: int,
        new_text: Callable[[Request], OutputText],
        grammars: GrammarCompiler,
    ) -> None:
        self._config = config
        self._facts = facts
        self._longest_context = longest_context  # what the memory budget allows a row alone
        self._new_text = new_text
        self._grammars = grammars
        self._ids = itertools.count()

    def validate(self, request: Request) -> None:
        """Raise InvalidRequest if this request cannot be served as asked."""
        self._check_prompt(request)
        if request.media is not None and not self._facts.reads_images:
            reason = self._facts.no_images_reason or "this model reads text only"
            raise InvalidRequest(f"the prompt holds pictures: {reason}")
        params = request.params
        after_ids = params.grammar.after_ids if params.grammar is not None else ()
        named = (*params.logit_bias, *params.stop_token_ids, *params.prediction_ids, *after_ids)
        outside = [i for i in named if not 0 <= i < self._facts.vocab_size]
        if outside:
            raise InvalidRequest(
                f"token id {outside[0]} is outside the vocabulary of {self._facts.vocab_size}"
            )
        has_own_drafts = params.grammar is not None or bool(params.prediction_ids)
        if self._facts.drafter == "none" and params.draft_depth not in ("auto", 0) and not has_own_drafts:
            raise InvalidRequest(
                f"draft_depth {params.draft_depth} cannot be honoured: this engine runs without a drafter. "
                'Leave it "auto" or 0, or start the engine with a head or drafter="ngram".'
            )
        if params.grammar is not None:
            if params.ignore_eos or params.min_tokens:
                name = "ignore_eos" if params.ignore_eos else "min_tokens"
                raise InvalidRequest(f"{name} cannot be honoured with a grammar, which says where to end")
            self._grammars.check(params.grammar)

    def new_sequence(self, request: Request) -> Sequence:
        """A checked request as a sequence, with what it may use."""
        asked = self._asked_depth(request)
        depth = 0 if self._facts.drafter == "none" else _most(asked)
        grammar = request.params.grammar
        stop_ids = frozenset(request.params.stop_token_ids)
        if not request.params.ignore_eos:
            stop_ids |= self._facts.eos_ids
        return Sequence(
            id=next(self._ids),
            request=request,
            text=self._new_text(request),
            stop_ids=stop_ids,
            max_tokens=self._max_tokens(request),
            drafting=DraftState(
                max_depth=self._max_depth(request),
                head_depth=depth if self._facts.drafter == "mtp" else 0,
                head_layers=max(1, self._facts.head_layers),
                can_pause_head=self._facts.can_pause_head,
                drafter=self._new_drafter(request, depth),
                lookup=NgramDrafter() if self._looks_up(asked) else None,
                is_auto=asked == "auto",
                grammar=None if grammar is None else self._grammars.new_row(grammar),
            ),
        )

    def _check_prompt(self, request: Request) -> None:
        if not request.prompt_ids:
            raise InvalidRequest("the prompt is empty: it needs at least one token")
        vocab_size = self._facts.vocab_size
        outside = [i for i in request.prompt_ids if not 0 <= i < vocab_size]
        if outside:
            raise InvalidRequest(
                f"the prompt has token id {outside[0]}, outside the vocabulary of {vocab_size}"
            )
        length, limit = len(request.prompt_ids), self._facts.max_context
        if length >= limit:
            raise InvalidRequest(
                f"the prompt has {length} tokens and the context holds {limit}, answer included: shorten it"
            )
        if length >= self._longest_context:
            raise InvalidRequest(
                f"the prompt has {length} tokens and the memory budget allows {self._longest_context}, "
                "answer included: shorten it or raise the budget"
            )

    def _max_tokens(self, request: Request) -> int:
        room = min(self._facts.max_context, self._longest_context) - len(request.prompt_ids)
        return room if request.params.max_tokens is None else min(room, request.params.max_tokens)

    def _asked_depth(self, request: Request) -> DraftDepth:
        """A number is honoured as it is; "auto" leaves every step's depth to the controller."""
        depth = request.params.draft_depth
        return self._config.auto_depth if depth == "auto" else depth

    def _max_depth(self, request: Request) -> int:
        """Drafts a step from anywhere: those that a grammar forces or the client predicts may be many."""
        params = request.params
        if params.draft_depth != "auto":
            return params.draft_depth
        has_own_drafts = params.grammar is not None or bool(params.prediction_ids)
        if has_own_drafts:
            return MAX_DEPTH
        return 0 if self._facts.drafter == "none" else _most(self._config.auto_depth)

    def _looks_up(self, asked: DraftDepth) -> bool:
        """Whether the row's own text is searched for drafts beside the head's."""
        return asked == "auto" and self._config.drafter == "auto" and self._facts.drafter == "mtp"

    def _new_drafter(self, request: Request, depth: int) -> Drafter | None:
        if request.params.prediction_ids:
            return PredictionDrafter(request.params.prediction_ids, len(request.prompt_ids))
        return NgramDrafter(depth) if self._facts.drafter == "ngram" and depth > 0 else None


def _most(depth: DraftDepth) -> int:
    return MAX_DEPTH if depth == "auto" else depth
