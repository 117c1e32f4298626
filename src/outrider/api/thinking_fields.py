"""The fields of a request that limit its reasoning: several APIs have names for the same limit."""

from __future__ import annotations

from typing import Protocol

NO_LIMIT = -1


class ThinkingFields(Protocol):
    @property
    def thinking_token_budget(self) -> int | None: ...

    @property
    def max_thinking_tokens(self) -> int | None: ...


def thinking_budget(body: ThinkingFields, other: int | None = None) -> int | None:
    """Most tokens of reasoning, the smallest limit that is given; None: no limit.

    `other`: the limit that the endpoint's own fields ask for.
    """
    given = (body.thinking_token_budget, body.max_thinking_tokens, other)
    return min((limit for limit in given if limit not in (None, NO_LIMIT)), default=None)


def effort_limit(effort: str | None) -> int | None:
    """Without any effort there is no reasoning. Other efforts: see chat/thinking.py."""
    return 0 if effort == "none" else None
