"""A request and its sampling parameters. Pure data.

The values are checked when an object is made, so all other code may rely on them.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

from outrider.answer_form import Grammar, ReasoningMarks

if TYPE_CHECKING:  # NumPy is a third of the memory of a process that only supervises a server
    from outrider.prompt_media import PromptMedia

MAX_DEPTH = 8  # drafts that a row feeds in one step, at most; chosen by hand
MAX_PRIORITY = 1000  # of a request, either way; chosen by hand
MAX_TOP_LOGPROBS = 20  # OpenAI's limit
MAX_PROMPT_LOGPROBS = 8192  # tokens of a prompt whose log-probabilities are given; chosen by hand
NUM_CANDIDATES = 1024  # best tokens that a filtering row looks at first (docs/LOG.md, "Candidates")

# Wide limits within which the changed logits stay finite in float32; chosen by hand.
MAX_BIAS = 1e10
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0

DraftDepth = int | Literal["auto"]
LogitsProcessor = Callable[[Any, Any], Any]  # (tokens, logits) -> logits: MLX arrays, as in mlx-lm


class InvalidRequest(ValueError):
    """The request cannot be served. The message gives the reason and what to change."""


class InvalidGrammar(InvalidRequest):
    """The request's grammar cannot be used."""


class PromptTooLong(InvalidRequest):
    """The prompt does not fit into the context.

    `size` is the number of tokens in words, such as "9000 tokens" or "about 20000 tokens". `max_tokens` is
    the number of tokens of the context, prompt and answer. Each API has its own message for this error.
    """

    def __init__(self, message: str, size: str, max_tokens: int) -> None:
        super().__init__(message)
        self.size = size
        self.max_tokens = max_tokens


@dataclass(frozen=True)
class SpecPrefill:
    """Skip the prompt tokens that matter least: the answer is then that of another, shorter prompt.

    A scorer reads the prompt first (models/prompt_scorer.py). The model reads the rest at its true positions.
    """

    keep: float  # share of the prompt's tokens that the model reads; 1: all, which is exact

    def __post_init__(self) -> None:
        _refuse_unless(
            _is_number(self.keep) and 0 < self.keep <= 1,
            f"spec_prefill.keep must be above 0 and at most 1, not {self.keep!r}",
        )


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded. Every field is honoured or refused, never ignored.

    The token at a position is the argmax of `logits / temperature + noise(seed, position, token)` over the
    tokens that the filters leave: first top_k, then top_p (a share of the tokens that top_k leaves), then
    min_p. The filters see the logits after the temperature. Temperature 0 is greedy.
    """

    max_tokens: int | None = 256  # None: up to the model's context
    min_tokens: int = 0  # this many tokens come before a stop token or the end of a stop string
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and answer
    presence_penalty: float = 0.0  # over the answer
    frequency_penalty: float = 0.0  # over the answer
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()  # only these may be sampled; empty: all
    bad_words: Sequence[str] = ()  # texts that the answer must not contain, as the tokenizer writes them
    bad_word_ids: Sequence[Sequence[int]] = ()  # the same as token ids; the chat renderer adds the texts' ids
    # Functions f(tokens, logits) -> logits, called in this order for every token, after penalties and bias:
    # tokens [n] are the prompt and the answer so far, logits [1, vocabulary]. They must be pure functions of
    # their arguments: they are called for drafts too, and drafts may be rejected. Python only.
    logits_processors: Sequence[LogitsProcessor] = ()
    seed: int | None = None  # None: a fresh random seed for each request
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False  # the text ends after the stop string or the stop token's text
    truncate_prompt_tokens: int | None = None  # keep the last so many; -1: as many as fit; None: refuse
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives beside the sampled token; None: no logprobs
    prompt_logprobs: int | None = (
        None  # the same for the prompt's tokens, which are then computed, not cached
    )
    prompt_progress: bool = False  # say how much of the prompt is computed, after each chunk of it
    token_origins: bool = False  # say of each token how it was won: by which draft, or without
    skip_special_tokens: bool = True
    draft_depth: DraftDepth = "auto"
    grammar: Grammar | None = None
    prediction_ids: Sequence[int] = ()  # tokens that the answer is expected to resemble: used as drafts
    cache_salt: str = ""  # only requests with the same salt share cached prefixes
    priority: int = 0  # while they wait, requests of a lower value start first, within their tenant
    tenant: str = ""  # tenants take turns when rows are free: over HTTP, the name of the API key
    thinking_token_budget: int | None = None  # most tokens of reasoning; None: no limit
    reasoning: ReasoningMarks | None = None  # set by the chat renderer; None: the model does not reason
    adapter: str | None = None  # the name of a loaded LoRA or DoRA adapter; None: the model itself
    spec_prefill: SpecPrefill | None = None  # not exact: skip the least important tokens of the prompt

    def __post_init__(self) -> None:
        _check_lengths(self)
        _check_sampling(self)
        _check_penalties(self)
        _check_bans(self)
        _check_stops(self)
        _check_grammar(self)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def is_filtered(self) -> bool:
        """True if the row has to know the order of its best tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def filters_widely(self) -> bool:
        """True if the filters may leave more than NUM_CANDIDATES tokens."""
        return not self.is_greedy and self.is_filtered and not 0 < self.top_k < NUM_CANDIDATES

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def changes_logits(self) -> bool:
        """True if single logits are changed at every position: by penalties, a bias or bad words."""
        return self.has_penalties or bool(self.logit_bias) or bool(self.bad_word_ids)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def for_answer(self, index: int) -> SamplingParams:
        """Answer i of a seeded request gets seed + i: answers differ, and a second request repeats them."""
        if self.seed is None or index == 0:
            return self
        seed = self.seed + index
        return replace(self, seed=seed if seed < 1 << 64 else seed - (1 << 64))

    def with_seed(self) -> SamplingParams:
        """The same parameters with a seed that is not None: the given one, or a fresh random one."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(63))


@dataclass(frozen=True)
class SamplingDefaults:
    """Values for requests that do not set them. None: the default of SamplingParams."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        self.params()  # raises InvalidRequest for a value out of its range

    @property
    def given(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}

    def params(self) -> SamplingParams:
        return SamplingParams(**self.given)

    def over(self, other: SamplingDefaults) -> SamplingDefaults:
        """These values, and those of `other` for the ones that are None."""
        return SamplingDefaults(**(other.given | self.given))


@dataclass(frozen=True)
class Request:
    """One prompt and its parameters, under an id that no other live request has."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    continues_prompt: bool = True  # the answer's text continues the prompt's text; False in chat
    media: PromptMedia | None = None  # the prompt's images
    prompt_keys: tuple[int, ...] | None = None  # the prefix cache's keys of a prompt with images

    def __post_init__(self) -> None:
        keys = self.prompt_keys
        if keys is not None and len(keys) != len(self.prompt_ids):
            raise InvalidRequest(f"{len(keys)} keys for a prompt of {len(self.prompt_ids)} tokens")


def _refuse_unless(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidRequest(message)


def is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    """True for a finite number, also for an integer that no float can hold."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value < math.inf


def _check_lengths(p: SamplingParams) -> None:
    _refuse_unless(
        p.max_tokens is None or (is_int(p.max_tokens) and p.max_tokens >= 1),
        f"max_tokens must be at least 1 (or None for the model's context), not {p.max_tokens!r}",
    )
    _refuse_unless(
        is_int(p.min_tokens) and p.min_tokens >= 0, f"min_tokens must be 0 or more, not {p.min_tokens!r}"
    )
    _refuse_unless(
        p.max_tokens is None or p.min_tokens <= p.max_tokens,
        f"min_tokens ({p.min_tokens}) is larger than max_tokens ({p.max_tokens})",
    )
    most = p.truncate_prompt_tokens
    _refuse_unless(
        most is None or (is_int(most) and (most == -1 or most >= 1)),
        f"truncate_prompt_tokens must be 1 or more, or -1 for as many as fit, not {most!r}",
    )
    _refuse_unless(
        p.draft_depth == "auto" or (is_int(p.draft_depth) and 0 <= p.draft_depth <= MAX_DEPTH),
        f'draft_depth must be "auto" or 0..{MAX_DEPTH}, not {p.draft_depth!r}',
    )
    for name in ("logprobs", "prompt_logprobs"):
        num = getattr(p, name)
        _refuse_unless(
            num is None or (is_int(num) and 0 <= num <= MAX_TOP_LOGPROBS),
            f"{name} must be None or 0..{MAX_TOP_LOGPROBS}, not {num!r}",
        )
    _refuse_unless(
        p.thinking_token_budget is None or (is_int(p.thinking_token_budget) and p.thinking_token_budget >= 0),
        f"thinking_token_budget must be 0 or more (or None for no limit), not {p.thinking_token_budget!r}",
    )
    _refuse_unless(
        p.reasoning is None or isinstance(p.reasoning, ReasoningMarks),
        f"reasoning must be ReasoningMarks, not {p.reasoning!r}",
    )


def _check_sampling(p: SamplingParams) -> None:
    _refuse_unless(
        _is_number(p.temperature) and 0 <= p.temperature <= 100,
        f"temperature must be a number from 0 to 100, not {p.temperature!r}",
    )
    _refuse_unless(is_int(p.top_k) and p.top_k >= 0, f"top_k must be 0 (off) or more, not {p.top_k!r}")
    _refuse_unless(
        _is_number(p.top_p) and 0 < p.top_p <= 1, f"top_p must be above 0 and at most 1, not {p.top_p!r}"
    )
    _refuse_unless(_is_number(p.min_p) and 0 <= p.min_p <= 1, f"min_p must be from 0 to 1, not {p.min_p!r}")
    _refuse_unless(
        p.seed is None or (is_int(p.seed) and -(2**63) <= p.seed < 2**64),
        f"seed must be None or a 64-bit integer, not {p.seed!r}",
    )


def _check_penalties(p: SamplingParams) -> None:
    _refuse_unless(
        _is_number(p.repetition_penalty)
        and MIN_REPETITION_PENALTY <= p.repetition_penalty <= MAX_REPETITION_PENALTY,
        f"repetition_penalty must be from {MIN_REPETITION_PENALTY} to {MAX_REPETITION_PENALTY}, "
        f"not {p.repetition_penalty!r}",
    )
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(p, name)
        _refuse_unless(_is_number(value) and -2 <= value <= 2, f"{name} must be from -2 to 2, not {value!r}")
    _refuse_unless(
        isinstance(p.logit_bias, Mapping),
        f"logit_bias must map token ids to numbers, and is {p.logit_bias!r}",
    )
    for token_id, bias in p.logit_bias.items():
        _refuse_unless(
            is_int(token_id) and token_id >= 0, f"logit_bias has {token_id!r}, which is not a token id"
        )
        _refuse_unless(
            bias == -math.inf or (_is_number(bias) and abs(bias) <= MAX_BIAS),
            f"logit_bias for token {token_id} must be -inf, or at most {MAX_BIAS:g} either way, not {bias!r}",
        )


def _check_bans(p: SamplingParams) -> None:
    _check_ids("allowed_token_ids", p.allowed_token_ids)
    _refuse_unless(
        isinstance(p.bad_words, Sequence) and not isinstance(p.bad_words, (str, bytes)),
        f"bad_words must be a list of strings, not {p.bad_words!r}",
    )
    for word in p.bad_words:
        _refuse_unless(
            isinstance(word, str) and word.strip() != "",
            f"bad_words must hold strings with more than spaces, not {word!r}",
        )
    _refuse_unless(
        isinstance(p.bad_word_ids, Sequence) and not isinstance(p.bad_word_ids, (str, bytes)),
        f"bad_word_ids must be a list of lists of token ids, not {p.bad_word_ids!r}",
    )
    for token_ids in p.bad_word_ids:
        _check_ids("bad_word_ids", token_ids)
        _refuse_unless(len(token_ids) > 0, "bad_word_ids has an empty list")
    functions = p.logits_processors
    _refuse_unless(
        isinstance(functions, Sequence) and all(map(callable, functions)),
        f"logits_processors must be a list of functions, not {functions!r}",
    )


def _check_stops(p: SamplingParams) -> None:
    flags = "ignore_eos", "skip_special_tokens", "token_origins", "prompt_progress"
    for name in (*flags, "include_stop_str_in_output"):
        value = getattr(p, name)
        _refuse_unless(isinstance(value, bool), f"{name} must be True or False, not {value!r}")
    _refuse_unless(
        p.stop is None or (isinstance(p.stop, Sequence) and not isinstance(p.stop, bytes)),
        f"stop must be a string or a list of strings, not {p.stop!r}",
    )
    for stop in p.stop_strings:
        _refuse_unless(
            isinstance(stop, str) and stop != "", f"stop must hold strings that are not empty, not {stop!r}"
        )
    _check_ids("stop_token_ids", p.stop_token_ids)


def _check_grammar(p: SamplingParams) -> None:
    for name in ("cache_salt", "tenant"):
        value = getattr(p, name)
        _refuse_unless(isinstance(value, str), f"{name} must be a string, not {value!r}")
    _refuse_unless(
        p.adapter is None or isinstance(p.adapter, str), f"adapter must be a name, not {p.adapter!r}"
    )
    _refuse_unless(
        is_int(p.priority) and -MAX_PRIORITY <= p.priority <= MAX_PRIORITY,
        f"priority must be a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}, not {p.priority!r}",
    )
    _refuse_unless(
        p.grammar is None or isinstance(p.grammar, Grammar), f"grammar must be a Grammar, not {p.grammar!r}"
    )
    _check_ids("prediction_ids", p.prediction_ids)
    _refuse_unless(
        p.spec_prefill is None or isinstance(p.spec_prefill, SpecPrefill),
        f"spec_prefill must be a SpecPrefill, not {p.spec_prefill!r}",
    )


def _check_ids(name: str, token_ids: object) -> None:
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, (str, bytes)):
        raise InvalidRequest(f"{name} must be a list of token ids, not {token_ids!r}")
    for token_id in token_ids:
        _refuse_unless(
            is_int(token_id) and token_id >= 0, f"{name} has {token_id!r}, which is not a token id"
        )


NO_DEFAULTS = SamplingDefaults()  # at the end, since it is checked
