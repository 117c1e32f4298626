"""From the chunks of a streamed chat completion to an Answer: arrival times and token counts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, cast

from outrider.bench.answer import Answer, TokenArrival, TokenSource
from outrider.bench.workloads import Task
from outrider.chat_client import ChatChunk

# Chunks per token from which each chunk counts as one token. Just below 1, since an end token has no text.
# Chosen by hand.
ONE_TOKEN_PER_CHUNK = 0.95


async def read_answer(task: Task, started_s: float, chunks: AsyncIterator[ChatChunk]) -> Answer:
    """Raises ServerError if the stream fails."""
    seen = [chunk async for chunk in chunks]
    with_text = [chunk for chunk in seen if chunk.reasoning or chunk.text]
    usage: Mapping[str, Any] = next((chunk.usage for chunk in reversed(seen) if chunk.usage), {})
    counted = usage.get("completion_tokens")
    num_tokens, source = len(with_text), "chunks"
    if isinstance(counted, int) and counted > 0:
        num_tokens, source = counted, "usage"
    return Answer(
        kind=task.kind,
        started_s=started_s,
        ended_s=seen[-1].read_at_s if seen else started_s,
        arrivals=arrivals(with_text, num_tokens, started_s),
        num_tokens=num_tokens,
        token_source=cast(TokenSource, source),
        finish_reason=next((chunk.finish_reason for chunk in reversed(seen) if chunk.finish_reason), None),
        text="".join(chunk.text for chunk in seen),
        num_prompt=usage.get("prompt_tokens"),
        num_cached=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
    )


def arrivals(chunks: Sequence[ChatChunk], num_tokens: int, started_s: float) -> tuple[TokenArrival, ...]:
    """The chunks of one read are one arrival.

    The tokens of the whole answer are known, the tokens of a chunk are not. If there is about one chunk per
    token, all chunks get the same share of the tokens. If there are fewer chunks (the server sends several
    tokens at once), the share of a chunk is its share of the characters.
    """
    if not chunks:
        return ()
    is_even = len(chunks) >= ONE_TOKEN_PER_CHUNK * num_tokens
    weights = [1 if is_even else len(chunk.reasoning + chunk.text) for chunk in chunks]
    tokens_at: dict[float, float] = {}
    for chunk, weight in zip(chunks, weights, strict=True):
        share = num_tokens * weight / sum(weights)
        tokens_at[chunk.read_at_s] = tokens_at.get(chunk.read_at_s, 0.0) + share
    return tuple(TokenArrival(at_s - started_s, tokens) for at_s, tokens in tokens_at.items())
