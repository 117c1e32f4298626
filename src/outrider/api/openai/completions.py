"""POST /v1/completions: OpenAI's legacy API for plain prompts (text or token ids, one or several)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import (
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from starlette.responses import JSONResponse

from outrider.api import sse
from outrider.api.answer_streams import stream_answers
from outrider.api.answers import Answers, Prepare, failure_of
from outrider.api.body import check_extra, json_router
from outrider.api.context import FINGERPRINT, ServerContext
from outrider.api.errors import openai_error, refused
from outrider.api.limits import (
    ANSWERS,
    JSON_VALUES,
    PROMPTS,
    AtMost,
    StopStrings,
    Word,
    check_stops,
)
from outrider.api.logprobs import MIN_LOGPROB, TokenText
from outrider.api.openai.answer_models import Completion, CompletionChunk
from outrider.api.openai.chat import FINISH_REASONS, openai_failure, usage_of
from outrider.api.openapi import OpenAIError, answer
from outrider.api.request_fields import (
    UNSUPPORTED,
    NumAnswers,
    NumLogprobs,
    SamplingFields,
    StreamOptions,
    Whole,
    check_stream_options,
    documented,
    grammar_of,
    sampling_params,
    whole,
)
from outrider.api.served_model import RequestDefaults, RequestedModel, ServedModel
from outrider.chat.events import ChatEvent, Finished, Logprobs, PromptLogprobs, TextDelta, Usage
from outrider.plan import TokenLogprobs
from outrider.request import SamplingParams

DEFAULT_MAX_TOKENS = 16  # OpenAI's default of this endpoint
REFUSED = {name: reason for name, reason in UNSUPPORTED.items() if name != "best_of"}

Prompt = str | list[int]


def prompt_kind(prompt: Any) -> str:
    """By the first item: pydantic would check a long list of ids against every other form first."""
    if isinstance(prompt, str):
        return "text"
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    if isinstance(first, list):
        return "lists of ids"
    return "ids" if isinstance(first, (int, float)) else "texts"


def whole_ids(ids: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Numbers with a point are rare: a long list is searched for them only if it is not valid as it is."""
    try:
        return validate(ids)
    except ValidationError:
        if not isinstance(ids, list):
            raise
        return validate([whole(i) for i in ids])


PromptIds = Annotated[list[Annotated[int, Field(ge=0)]], AtMost(JSON_VALUES), WrapValidator(whole_ids)]
Prompts = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], AtMost(PROMPTS), Tag("texts"), Field(min_length=1)]
    | Annotated[PromptIds, Tag("ids")]
    | Annotated[list[PromptIds], AtMost(PROMPTS), Tag("lists of ids")],
    Discriminator(prompt_kind),
]


class CompletionRequest(SamplingFields):
    model: Word | None = None
    prompt: Prompts
    n: NumAnswers | None = None
    best_of: Whole | None = documented("Must equal n", minimum=1, maximum=ANSWERS.most)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Whole | None = documented("Default: 16", minimum=1)
    stop: StopStrings | None = None
    logprobs: NumLogprobs | None = None
    echo: bool | None = Field(None, description="Cannot be combined with truncate_prompt_tokens")
    user: Word | None = Field(None, description="No effect")


class Completions:
    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def create(self, body: CompletionRequest, request: Request) -> Response:
        """Continue prompts: a string, a list of token ids, or a list of either."""
        check_extra(body, REFUSED)
        _check_options(body)
        model = self._context.find_model(body.model, body.keep_alive, body.adapter)
        is_single = isinstance(body.prompt, str) or (body.prompt and isinstance(body.prompt[0], int))
        prompts: list[Any] = [body.prompt] if is_single else list(body.prompt)
        starting = self._start(body, model, prompts, request)
        if body.stream:
            frames = partial(self._frames, body, model.name, prompts)
            return await stream_answers(starting, frames, openai_failure, self._context.settings.keep_alive_s)
        answers = await starting
        whole = self._whole(body, model.name, prompts, answers)
        try:
            return JSONResponse(await sse.until_disconnected(request.receive, whole))
        finally:
            answers.close()

    async def _frames(
        self, body: CompletionRequest, model: str, prompts: Sequence[Prompt], answers: Answers
    ) -> AsyncIterator[bytes]:
        rendering = await self._rendering(body, model, prompts, answers)
        async for frame in rendering.frames():
            yield frame

    async def _whole(
        self, body: CompletionRequest, model: str, prompts: Sequence[Prompt], answers: Answers
    ) -> dict[str, Any]:
        return await (await self._rendering(body, model, prompts, answers)).whole()

    async def _rendering(
        self, body: CompletionRequest, model: str, prompts: Sequence[Prompt], answers: Answers
    ) -> _CompletionRendering:
        echoes = await asyncio.to_thread(_echoes, answers.served.tokens, body, prompts)
        return _CompletionRendering(self._context, body, model, echoes, answers)

    async def _start(
        self, body: CompletionRequest, model: RequestedModel, prompts: Sequence[Prompt], request: Request
    ) -> Answers:
        n, params = body.n or 1, _params(body, model.defaults)

        def prepares(served: ServedModel) -> Iterator[Prepare]:
            exact = params if served.defaults == model.defaults else _params(body, served.defaults)
            return (partial(served.backend.prepare_text, prompt, exact, n) for prompt in prompts)

        return await self._context.live.start(
            "completions", model, n * len(prompts), prepares, request.receive, body.timeout
        )


def _params(body: CompletionRequest, defaults: RequestDefaults) -> SamplingParams:
    max_tokens = body.max_tokens
    if max_tokens is None:
        max_tokens = DEFAULT_MAX_TOKENS if defaults.max_tokens is None else defaults.max_tokens
    return sampling_params(
        body,
        defaults.sampling,
        max_tokens=max_tokens,
        stop=body.stop,
        logprobs=body.logprobs,
        grammar=grammar_of(body),
        prompt_logprobs=body.logprobs if body.echo else None,
    )


def _echoes(text_of: TokenText, body: CompletionRequest, prompts: Sequence[Prompt]) -> list[str]:
    """The text before each answer: the prompt, if the request asks for it. Decoding takes a while."""
    echoed = prompts if body.echo else [""] * len(prompts)
    texts = [prompt if isinstance(prompt, str) else text_of.decode(prompt) for prompt in echoed]
    return [text for text in texts for _ in range(body.n or 1)]


def _check_options(body: CompletionRequest) -> None:
    check_stops("stop", body.stop)
    check_stream_options(body.stream_options, body.stream)
    if body.best_of not in (None, body.n or 1):
        raise refused("best_of", "must equal n, since all answers are returned: use n")
    if body.echo and body.truncate_prompt_tokens is not None:
        raise refused("echo", "cannot be combined with truncate_prompt_tokens")


class _CompletionRendering:
    """Renders all choices of one request. Choice p * n + i is the i-th answer to prompt p."""

    def __init__(
        self,
        context: ServerContext,
        body: CompletionRequest,
        model: str,
        echoes: Sequence[str],
        answers: Answers,
    ) -> None:
        self._body = body
        self._answers = answers
        self._envelope = {
            "id": context.new_id("cmpl-"),
            "object": "text_completion",
            "created": int(context.now_s()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        self._n = body.n or 1
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._echoes = echoes
        with_top, tokens = bool(body.logprobs), answers.served.tokens
        self._logprobs = [CompletionLogprobs(tokens, with_top) for _ in self._echoes]
        self._usages: dict[int, Usage] = {}

    async def whole(self) -> dict[str, Any]:
        texts = [[echo] for echo in self._echoes]
        tokens: list[list[TokenLogprobs]] = [[] for _ in self._echoes]
        finish_reasons = [""] * len(self._echoes)

        def feed(choice: int, event: ChatEvent) -> None:
            match event:
                case TextDelta(text):
                    texts[choice].append(text)
                case Logprobs(more) | PromptLogprobs(more):
                    tokens[choice].extend(more)
                case Finished():
                    self._usages[choice] = event.usage
                    finish_reasons[choice] = FINISH_REASONS[event.reason]

        await self._answers.feed_all(feed)
        choices = [
            self._choice(i, "".join(texts[i]), tokens[i], reason, is_whole=True)
            for i, reason in enumerate(finish_reasons)
        ]
        return self._envelope | {"choices": choices, "usage": self._usage()}

    async def frames(self) -> AsyncIterator[bytes]:
        unsent: dict[int, list[TokenLogprobs]] = {}
        for choice, echo in enumerate(self._echoes):
            if echo and self._body.logprobs is None:  # else it comes with the prompt's log-probabilities
                yield self._chunk(self._choice(choice, echo, [], None))
        async for choice, event in self._answers.events(self._body.logprobs is not None):
            if isinstance(event, Finished) and (error := failure_of(event)):
                yield sse.data(openai_error(error))
                break
            if isinstance(event, PromptLogprobs):
                yield self._chunk(self._choice(choice, self._echoes[choice], list(event.tokens), None))
                continue
            if isinstance(event, Logprobs):
                unsent.setdefault(choice, []).extend(event.tokens)
                continue
            tokens = unsent.pop(choice, [])
            if isinstance(event, TextDelta):
                yield self._chunk(self._choice(choice, event.text, tokens, None))
            elif isinstance(event, Finished):
                self._usages[choice] = event.usage
                yield self._chunk(self._choice(choice, "", tokens, FINISH_REASONS[event.reason]))
        else:
            if self._with_usage:
                yield sse.data(self._envelope | {"choices": [], "usage": self._usage()})
        yield sse.DONE

    def _choice(
        self,
        choice: int,
        text: str,
        tokens: list[TokenLogprobs],
        finish_reason: str | None,
        is_whole: bool = False,
    ) -> dict[str, Any]:
        with_logprobs = self._body.logprobs is not None and (is_whole or bool(tokens))
        logprobs = self._logprobs[choice].render(tokens) if with_logprobs else None
        return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        chunk = self._envelope | {"choices": [choice]}
        return sse.data(chunk | {"usage": None} if self._with_usage else chunk)

    def _usage(self) -> dict[str, Any]:
        """Each prompt counts once, not once per choice."""
        usages = [self._usages[i] for i in sorted(self._usages)]
        return usage_of(usages, sum(usage.num_prompt for usage in usages[:: self._n]))


class CompletionLogprobs:
    """The legacy format: parallel lists, with the offset of each token in the text."""

    def __init__(self, text: TokenText, with_top: bool) -> None:
        self._text = text
        self._offset = 0
        self._with_top = with_top

    def render(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The next tokens of the text: their offsets continue those of the last call."""
        strings = [self._text.text_of(token.token_id) for token in tokens]
        offsets = []
        for string in strings:
            offsets.append(self._offset)
            self._offset += len(string)
        return {
            "tokens": strings,
            "token_logprobs": [_logprob(token) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens] if self._with_top else None,
            "text_offset": offsets,
        }

    def _top(self, token: TokenLogprobs) -> dict[str, float] | None:
        """The most likely tokens, and the sampled token if it is not among them."""
        if _logprob(token) is None:
            return None
        pairs = [*token.top, (token.token_id, token.logprob)]
        return {self._text.text_of(token_id): max(logprob, MIN_LOGPROB) for token_id, logprob in pairs}


def _logprob(token: TokenLogprobs) -> float | None:
    """None for the first token of a prompt."""
    return None if math.isnan(token.logprob) else max(token.logprob, MIN_LOGPROB)


def completions_router(context: ServerContext) -> APIRouter:
    create = Completions(context).create
    answers = answer(Completion, event=CompletionChunk | OpenAIError, ends_with_done=True)
    return json_router("OpenAI", ("POST", "/v1/completions", create, "Text completion", answers))
