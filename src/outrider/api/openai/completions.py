"""POST /v1/completions: plain prompts (text or token ids, one or many) and OpenAI's legacy shapes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from outrider.api import sse
from outrider.api.answers import Answers, failure_message, is_failure, raise_if_failed
from outrider.api.body import JsonRoute, check_extra
from outrider.api.context import ServerContext
from outrider.api.errors import openai_error, refused
from outrider.api.openai.chat_input import check_stream_options
from outrider.api.openai.completions_schema import CompletionRequest
from outrider.api.openai.usage import FINISH_REASONS, CompletionLogprobs, usage_of
from outrider.api.operations.version import FINGERPRINT
from outrider.api.params import UNSUPPORTED, check_stop, grammar_of, sampling_params
from outrider.chat.events import ChatEvent, Finished, Logprobs, TextDelta, Usage
from outrider.plan import TokenLogprobs
from outrider.request import SamplingParams

DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this endpoint
REFUSED = {name: reason for name, reason in UNSUPPORTED.items() if name != "best_of"}

Prompt = str | list[int]


class Completions:
    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def create(self, body: CompletionRequest, request: Request) -> Response:
        """Continue prompts: a string, a list of token ids, or a list of either."""
        check_extra(body, REFUSED)
        _check_options(body)
        self._context.check_model(body.model)
        prompts = _prompts(body.prompt)
        answers = await self._start(body, prompts)
        job = _Job(self._context, body, prompts, answers)
        if body.stream:
            return sse.EventStreamResponse(job.frames(), answers.close, self._context.settings.keep_alive_s)
        return JSONResponse(await sse.until_disconnected(request.receive, job.whole()))

    async def _start(self, body: CompletionRequest, prompts: Sequence[Prompt]) -> Answers:
        n, complete = body.n or 1, self._context.backend.complete
        params = _params(body, self._context.settings.max_tokens)
        starts = [partial(complete, prompt, _numbered(params, i)) for prompt in prompts for i in range(n)]
        return await self._context.desk.start("completions", starts)


def _check_options(body: CompletionRequest) -> None:
    check_stop(body.stop)
    check_stream_options(body.stream_options, body.stream)
    if body.best_of not in (None, body.n or 1):
        raise refused("best_of", "only n answers are made; ask for them all with n")
    if body.echo and body.logprobs is not None:
        raise refused("echo", "with logprobs it would need the prompt's, which are not computed")


def _params(body: CompletionRequest, default_max_tokens: int | None) -> SamplingParams:
    max_tokens = body.max_tokens
    if max_tokens is None:
        max_tokens = DEFAULT_MAX_TOKENS if default_max_tokens is None else default_max_tokens
    return sampling_params(
        body, max_tokens=max_tokens, stop=body.stop, logprobs=body.logprobs, grammar=grammar_of(body)
    )


def _numbered(params: SamplingParams, choice: int) -> SamplingParams:
    return params if params.seed is None or choice == 0 else replace(params, seed=params.seed + choice)


def _prompts(prompt: Any) -> list[Prompt]:
    is_one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
    return [prompt] if is_one else list(prompt)


class _Job:
    """All choices of one request. Choice p * n + i is the i-th answer to prompt p."""

    def __init__(
        self, context: ServerContext, body: CompletionRequest, prompts: Sequence[Prompt], answers: Answers
    ) -> None:
        self._body = body
        self._answers = answers
        self._envelope = {
            "id": context.new_id("cmpl-"),
            "object": "text_completion",
            "created": int(context.now_s()),
            "model": body.model or context.settings.model_name,
            "system_fingerprint": FINGERPRINT,
        }
        self._n = body.n or 1
        echoed = [_echo(prompt, context) if body.echo else "" for prompt in prompts]
        self._opening = [text for text in echoed for _ in range(self._n)]
        with_top = bool(body.logprobs)
        self._logprobs = [CompletionLogprobs(context.tokens, len(text), with_top) for text in self._opening]
        self._usages: dict[int, Usage] = {}

    async def whole(self) -> dict[str, Any]:
        texts = [[opening] for opening in self._opening]
        tokens: list[list[TokenLogprobs]] = [[] for _ in self._opening]
        ends = [""] * len(self._opening)
        try:
            async for choice, event in self._answers.events():
                match event:
                    case TextDelta(text):
                        texts[choice].append(text)
                    case Logprobs(more):
                        tokens[choice].extend(more)
                    case Finished():
                        raise_if_failed(event)
                        self._usages[choice] = event.usage
                        ends[choice] = FINISH_REASONS[event.reason]
        finally:
            self._answers.close()
        choices = [
            self._choice(i, "".join(texts[i]), tokens[i], end, whole=True) for i, end in enumerate(ends)
        ]
        return self._envelope | {"choices": choices, "usage": self._usage()}

    async def frames(self) -> AsyncIterator[bytes]:
        unsent: dict[int, list[TokenLogprobs]] = {}
        for choice, opening in enumerate(self._opening):
            if opening:
                yield self._chunk([self._choice(choice, opening, [], None)])
        async for choice, event in self._answers.events(self._body.logprobs is not None):
            if isinstance(event, Finished) and is_failure(event):
                yield sse.data(openai_error(500 if event.reason == "error" else 503, failure_message(event)))
                break
            if isinstance(event, Logprobs):
                unsent.setdefault(choice, []).extend(event.tokens)
                continue
            chunk = self._event_choice(choice, event, unsent.pop(choice, []))
            if chunk is not None:
                yield self._chunk([chunk])
        else:
            if self._body.stream_options and self._body.stream_options.include_usage:
                yield sse.data(self._envelope | {"choices": [], "usage": self._usage()})
        yield sse.DONE

    def _event_choice(
        self, choice: int, event: ChatEvent, tokens: list[TokenLogprobs]
    ) -> dict[str, Any] | None:
        match event:
            case TextDelta(text):
                return self._choice(choice, text, tokens, None)
            case Finished():
                self._usages[choice] = event.usage
                return self._choice(choice, "", tokens, FINISH_REASONS[event.reason])
            case _:
                return None

    def _choice(
        self,
        choice: int,
        text: str,
        tokens: list[TokenLogprobs],
        finish_reason: str | None,
        whole: bool = False,
    ) -> dict[str, Any]:
        wanted = self._body.logprobs is not None and (whole or bool(tokens))
        logprobs = self._logprobs[choice].render(tokens) if wanted else None
        return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        chunk = self._envelope | {"choices": choices}
        with_usage = self._body.stream_options and self._body.stream_options.include_usage
        return sse.data(chunk | {"usage": None} if with_usage else chunk)

    def _usage(self) -> dict[str, Any]:
        """Each prompt is paid for once."""
        usages = [self._usages[i] for i in sorted(self._usages)]
        return usage_of(usages, sum(usage.num_prompt for usage in usages[:: self._n]))


def _echo(prompt: Prompt, context: ServerContext) -> str:
    return prompt if isinstance(prompt, str) else context.tokens.decode(prompt)


def completions_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)
    api = Completions(context)
    router.add_api_route(
        "/v1/completions", api.create, methods=["POST"], summary="Text completion", response_model=None
    )
    return router
