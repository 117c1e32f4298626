"""The Python API: `LLM` loads a model and answers prompts, many at a time, in the shape vLLM's users know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from outrider.build import ModelChoice, build_engine
from outrider.config import DrafterName, EngineConfig
from outrider.engine.async_engine import AsyncEngine
from outrider.engine.engine import Engine
from outrider.engine.outbox import Outbox
from outrider.engine.sequence import Delta, FinishReason, Stats
from outrider.llm_images import EncodedPrompt, encode_with_pictures, take_pictures
from outrider.plan import TokenLogprobs
from outrider.request import InvalidRequest, SamplingParams

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class GenerationFailed(RuntimeError):
    """The engine could not finish a request; the message is the engine's."""


@dataclass(frozen=True)
class Completion:
    """One prompt's answer."""

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None  # one a token, when they were asked for
    stats: Stats


class DeltaStream(Iterator[Delta]):
    """An answer as it grows. Closing it, or letting go of it, stops the request."""

    def __init__(self, engine: Engine, request_id: str, outbox: Outbox) -> None:
        self.request_id = request_id
        self._engine = engine
        self._outbox = outbox
        self._finished = False

    def __next__(self) -> Delta:
        if self._finished:
            raise StopIteration
        delta = self._outbox.take()
        assert delta is not None
        self._finished = delta.finish_reason is not None
        if delta.error is not None:
            raise GenerationFailed(delta.error)
        return delta

    def close(self) -> None:
        if not self._finished:
            self._finished = True
            self._engine.cancel(self.request_id, self._outbox)

    def __del__(self) -> None:
        self.close()


class LLM:
    """A model with its engine. Use it as a context manager, or `close` it, to free the memory.

    llm = LLM("path-or-hf-id")
    outs = llm.generate(["Hello", "Bonjour"], SamplingParams(max_tokens=32, temperature=0))
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        drafter: DrafterName = "auto",
        head: str | Path | None = None,
        draft_vocabulary: int | None = None,
        dtype: str = "auto",
        max_rows: int = 16,
        max_context: int | None = None,
        memory_budget_bytes: int | None = None,
        prefill_step_size: int | None = None,
        prefix_cache_bytes: int | None = None,
        prefix_cache_dir: str | Path | None = None,
        prefix_cache_disk_bytes: int = EngineConfig.prefix_cache_disk_bytes,
    ) -> None:
        config = EngineConfig(
            max_rows=max_rows,
            max_context=max_context,
            memory_budget_bytes=memory_budget_bytes,
            prefill_step_size=prefill_step_size,
            drafter=drafter,
            prefix_cache_bytes=prefix_cache_bytes,
            prefix_cache_dir=None if prefix_cache_dir is None else str(prefix_cache_dir),
            prefix_cache_disk_bytes=prefix_cache_disk_bytes,
        )
        choice = ModelChoice(default_model() if model is None else model, head, draft_vocabulary, dtype)
        self.engine, self.tokenizer = build_engine(choice, config)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Answer prompts (strings or lists of token ids) together; the answers in the prompts' order.

        A bad prompt or parameter raises InvalidRequest before any work is done.
        """
        return self._answer([self._encode(prompt) for prompt in _as_list(prompts)], params, True)

    @overload
    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Completion: ...

    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]: ...

    def chat(self, messages: Any, params: Any = None) -> Any:
        """Answer one conversation, or several together, through the model's chat template.

        For a vision model a message's content may be a list of parts: {"type": "text", "text": ...} and
        {"type": "image", "image": array, Pillow image, bytes, file or data URL}.
        """
        if messages and isinstance(messages[0], Mapping):
            return self._answer([self._render(messages)], params, False)[0]
        return self._answer([self._render(conversation) for conversation in messages], params, False)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> DeltaStream:
        """The answer as it grows. Letting go of the stream early stops the request."""
        return self._stream(self._encode(prompt), params or SamplingParams(), True)

    def stream_chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> DeltaStream:
        return self._stream(self._render(messages), params or SamplingParams(), False)

    @property
    def async_engine(self) -> AsyncEngine:
        """The same engine for asyncio: `submit` a prompt's ids, iterate the stream, `abort`."""
        return AsyncEngine(self.engine)

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(
        self,
        prompts: list[EncodedPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        continues_prompt: bool,
    ) -> list[Completion]:
        each = _params_for_each(params, len(prompts))
        for prompt, one in zip(prompts, each, strict=True):
            self.engine.check(prompt.ids, one)
        started = []
        try:
            for prompt, one in zip(prompts, each, strict=True):
                started.append(self._submit(prompt, one, continues_prompt))
            return [
                _completion(prompt.ids, one, outbox)
                for prompt, one, (_, outbox) in zip(prompts, each, started, strict=True)
            ]
        except BaseException:
            for request_id, _ in started:
                self.engine.cancel(request_id)
            raise

    def _stream(self, prompt: EncodedPrompt, params: SamplingParams, continues_prompt: bool) -> DeltaStream:
        return DeltaStream(self.engine, *self._submit(prompt, params, continues_prompt))

    def _submit(
        self, prompt: EncodedPrompt, params: SamplingParams, continues_prompt: bool
    ) -> tuple[str, Outbox]:
        return self.engine.submit(prompt.ids, params, continues_prompt=continues_prompt, media=prompt.media)

    def _encode(self, prompt: Prompt) -> EncodedPrompt:
        return EncodedPrompt(
            tuple(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else tuple(prompt)
        )

    def _render(self, messages: Sequence[Message]) -> EncodedPrompt:
        if not getattr(self.tokenizer, "has_chat_template", True):
            raise InvalidRequest("this model has no chat template: use generate with a prompt instead")
        plain, pictures = take_pictures(messages)
        if not pictures:
            ids = self.tokenizer.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
            return EncodedPrompt(tuple(ids))
        if self.engine.reader is None:
            raise InvalidRequest(
                self.engine.facts.no_images_reason or "this model reads text only, not pictures"
            )
        text = self.tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=False)
        return encode_with_pictures(self.engine.reader, self.tokenizer, text, pictures)


def default_model() -> Path:
    """The folder of the model that is served when none is named; made at first use."""
    from outrider.models.files import default_model
    from outrider.models.files.named import make_ready

    return make_ready(default_model)


def _completion(prompt_ids: tuple[int, ...], params: SamplingParams, outbox: Outbox) -> Completion:
    whole = outbox.take()
    assert whole is not None
    while whole.finish_reason is None:
        more = outbox.take()
        assert more is not None
        whole = whole.merged(more)
    if whole.error is not None:
        raise GenerationFailed(whole.error)
    return Completion(
        request_id=whole.request_id,
        prompt_token_ids=list(prompt_ids),
        token_ids=list(whole.token_ids),
        text=whole.text,
        finish_reason=whole.finish_reason,
        logprobs=list(whole.logprobs) if params.logprobs is not None else None,
        stats=whole.stats or Stats(),
    )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a string and a list of token ids are one prompt each."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _params_for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if len(params) != num_prompts:
        raise InvalidRequest(
            f"{num_prompts} prompts and {len(params)} SamplingParams: give one, or one for each"
        )
    return list(params)
