"""Owns the typed events that an answer consists of. Every API renders this one event stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from outrider.engine.sequence import PromptProgress, Stats, TokenOrigin
from outrider.plan import TokenLogprobs

FinishedReason = Literal["stop", "length", "tool_calls", "cancelled", "queue_timeout", "timeout", "error"]


@dataclass(frozen=True)
class TextDelta:
    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True)
class ToolCallStarted:
    """A call begins. Its arguments follow as fragments of one JSON text."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    index: int
    fragment: str


@dataclass(frozen=True)
class ToolCallEnded:
    index: int
    arguments: str  # the whole JSON text; incomplete only if a forced call ran out of tokens


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of the tokens behind the text deltas, if requested."""

    tokens: tuple[TokenLogprobs, ...]


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of the prompt's tokens, if requested, before the first text. NaN for the first."""

    tokens: tuple[TokenLogprobs, ...]


@dataclass(frozen=True)
class TokenDetail:
    """A token and how it was won."""

    token_id: int
    origin: TokenOrigin
    logprob: float | None = None  # if requested


@dataclass(frozen=True)
class TokenOrigins:
    """How the tokens behind the next deltas were won, if requested."""

    tokens: tuple[TokenDetail, ...]


@dataclass(frozen=True)
class Usage:
    """Token counts of one answer."""

    num_prompt: int = 0
    num_cached: int = 0  # prompt tokens that came from the prefix cache
    num_generated: int = 0
    num_reasoning: int = 0
    num_accepted: int = 0  # drafts
    num_rejected: int = 0  # drafts
    num_stored: int = 0  # prompt tokens that this request added to the prefix cache
    num_skipped: int = 0  # prompt tokens that the model has not read (spec_prefill)


@dataclass(frozen=True)
class Finished:
    """The last event of every answer."""

    reason: FinishedReason
    usage: Usage
    stats: Stats = field(default_factory=Stats)
    stop_string: str | None = None  # the stop string that ended the answer, if one did
    error: str | None = None
    is_client_error: bool = False  # the error is of the request, not of the server


ChatEvent = (
    TextDelta
    | ReasoningDelta
    | ToolCallStarted
    | ToolCallArguments
    | ToolCallEnded
    | Logprobs
    | PromptLogprobs
    | TokenOrigins
    | PromptProgress
    | Finished
)
