"""One call of a pooling model: admission, time limits, metrics and the log. The routes render the vectors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive

from outrider.api.admission import current_reservation
from outrider.api.answers import TimeLimits, queue_timeout_error, timeout_error
from outrider.api.context import ServerContext
from outrider.api.embedding_backend import EmbeddingBackend
from outrider.api.errors import invalid
from outrider.api.middleware import note_answers
from outrider.api.request_summary import embedding_summary
from outrider.api.served_model import RequestedModel, ServedModel
from outrider.api.sse import until_disconnected
from outrider.embed.service import NotStarted
from outrider.pool.model_pool import Lease
from outrider.pooling import PoolingFacts, TokenInput, Vector

TRUNCATE = "truncate_prompt_tokens"


@dataclass(frozen=True)
class Vectors:
    vectors: list[Vector]
    num_tokens: int  # of all inputs
    facts: PoolingFacts  # of the model

    @property
    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": self.num_tokens, "total_tokens": self.num_tokens}


async def vectors_of(
    context: ServerContext,
    api: str,
    model: RequestedModel,
    read: Callable[[EmbeddingBackend], Coroutine[Any, Any, list[TokenInput]]],
    receive: Receive,
) -> Vectors:
    """Load the model if needed, read the inputs and compute their vectors. Raises ApiError or InvalidRequest.

    `read` checks what depends on the model, and turns the inputs into tokens. A request holds one place, and
    the tokens of all its inputs. Its inputs are given up if the client leaves (`receive`).
    """
    leases: list[Lease[ServedModel]] = []

    async def prepare() -> list[TokenInput]:
        leases.append(await model.lease())
        return await read(leases[0].model.embedder_named(model.name))

    arrived_s = time.perf_counter()
    limits, reservation = context.live.time_limits(None), current_reservation.get()
    reservation.usage.check_tokens()
    try:
        async with limits.preparing():
            inputs = await until_disconnected(receive, prepare())
        num_tokens = sum(map(len, inputs))
        reservation.add(num_tokens=num_tokens)
        backend = leases[0].model.embedder_named(model.name)
        vectors = await _embedded(backend, inputs, limits, receive)
    finally:
        for lease in leases:
            lease.release()
    note_answers(embedding_summary(api, model.name, len(inputs), num_tokens))
    context.live.metrics.count_embeddings(api, len(inputs), num_tokens, time.perf_counter() - arrived_s)
    return Vectors(vectors, num_tokens, backend.facts)


async def _embedded(
    backend: EmbeddingBackend, inputs: list[TokenInput], limits: TimeLimits, receive: Receive
) -> list[Vector]:
    now_s = asyncio.get_running_loop().time()
    start_within_s = None if limits.row_s is None else max(0.0, limits.row_s - now_s)
    try:
        async with asyncio.timeout_at(limits.end_s):
            return await until_disconnected(receive, backend.embed(inputs, start_within_s))
    except NotStarted:
        raise queue_timeout_error() from None
    except TimeoutError:
        raise timeout_error(limits.timeout_message) from None


def truncation(given: int | None, max_tokens: int) -> int | None:
    """The length to which inputs are cut; -1: the model's limit. None: nothing is cut."""
    if given is None:
        return None
    if given == -1:
        return max_tokens
    if not 1 <= given <= max_tokens:
        raise invalid(TRUNCATE, f"must be -1, or 1 to {max_tokens}, the tokens that this model reads")
    return given
