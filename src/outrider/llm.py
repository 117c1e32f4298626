"""The Python API: `LLM` loads a model and answers prompts and conversations, many at a time, as in vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from outrider.build import ModelChoice, build_engine
from outrider.chat.conversation import ChatRequest
from outrider.chat.message_dicts import ImageInput, messages_from_dicts, tool_choice_from, tools_from_dicts
from outrider.chat.renderer import ChatPrompt, ChatRenderer
from outrider.chat.validation import validated
from outrider.completion import Completion, CompletionDelta, CompletionStream, GenerationFailed
from outrider.config import (
    DEFAULT_MAX_ADAPTERS,
    CacheLayout,
    DrafterName,
    EngineConfig,
    GenerationConfigSource,
)
from outrider.engine.async_engine import AsyncEngine
from outrider.engine.validation import ValidatedRequest
from outrider.plan import AdapterInfo
from outrider.request import InvalidRequest, SamplingParams

__all__ = [
    "LLM",
    "Completion",
    "CompletionDelta",
    "CompletionStream",
    "GenerationFailed",
    "default_model",
]

Prompt = str | Sequence[int]
MessageDict = Mapping[str, Any]  # {"role": ..., "content": ...}, as in OpenAI's API


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
        draft_model: str | Path | None = None,
        draft_vocabulary: int | None = None,
        dtype: str = "auto",
        revision: str | None = None,
        max_rows: int | None = None,
        max_context: int | None = None,
        memory_budget_bytes: int | None = None,
        prefill_step_size: int | None = None,
        max_stall_ms: int = EngineConfig.max_stall_ms,
        cache_layout: CacheLayout = "auto",
        kv_bits: int | None = None,
        prefix_cache_bytes: int | None = None,
        prefix_cache_dir: str | Path | None = None,
        prefix_cache_disk_bytes: int = EngineConfig.prefix_cache_disk_bytes,
        generation_config: GenerationConfigSource = "auto",
        adapter: str | Path | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        max_adapters: int | None = None,
        adapter_memory_bytes: int = EngineConfig.adapter_memory_bytes,
        spec_prefill_model: str | Path | None = None,
        spec_prefill_layers: int | None = None,
    ) -> None:
        """`draft_model`: a smaller model with the same tokenizer, which drafts in the place of an MTP head.

        `kv_bits`: of keys and values: 4, 8, 16 or 32; None: see `EngineConfig`.

        `generation_config`: "none" ignores the sampling values in the model's generation_config.json.

        `adapter`: a LoRA or DoRA adapter (mlx-lm's folder) for all calls. `adapters`: adapters by name, which
        calls choose with `SamplingParams(adapter=NAME)`; `max_adapters`: how many may be loaded at once, also
        later (16 if `adapters` is given, else none).

        `spec_prefill_model`: allows calls to skip tokens of their prompts, which is not exact
        (`SamplingParams(spec_prefill=SpecPrefill(keep=0.3))`). A small model of the same vocabulary that
        scores the tokens, or "self": the model's own first layers. `spec_prefill_layers`: how many of them
        (half).
        """
        if max_adapters is None:
            max_adapters = DEFAULT_MAX_ADAPTERS if adapters is not None else 0
        config = EngineConfig(
            max_rows=max_rows,
            max_context=max_context,
            memory_budget_bytes=memory_budget_bytes,
            prefill_step_size=prefill_step_size,
            max_stall_ms=max_stall_ms,
            cache_layout=cache_layout,
            kv_bits=kv_bits,
            drafter=drafter,
            prefix_cache_bytes=prefix_cache_bytes,
            prefix_cache_dir=None if prefix_cache_dir is None else str(prefix_cache_dir),
            prefix_cache_disk_bytes=prefix_cache_disk_bytes,
            max_adapters=max_adapters,
            adapter_memory_bytes=adapter_memory_bytes,
        )
        model = default_model() if model is None else model
        choice = ModelChoice(
            model,
            head,
            draft_vocabulary,
            dtype,
            revision,
            generation_config,
            adapter,
            adapters or {},
            draft_model,
            spec_prefill_model,
            spec_prefill_layers,
        )
        self.engine, self.tokenizer = build_engine(choice, config)
        try:
            reader, facts = self.engine.reader, self.engine.facts
            known = (reader, facts.no_images_reason, facts.max_context)
            self.renderer = ChatRenderer(self.tokenizer, *known, no_audio_reason=facts.no_audio_reason)
            self._images = None if reader is None else ImageInput(reader, self.renderer.video_reader)
        except BaseException:
            self.engine.close()
            raise

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of calls without any: the values of the model's generation_config.json."""
        return self.engine.facts.sampling.params()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Answer prompts (strings or lists of token ids) together. The answers are in the prompts' order.

        params: for all prompts, or a list with one for each; None: `get_default_sampling_params()`.

        Raises InvalidRequest, before any work is done, if a prompt or a parameter cannot be served.
        """
        listed = _as_list(prompts)
        each = self._params_for_each(params, len(listed))
        return self._answer(list(map(self.renderer.render_text, listed, each)))

    @overload
    def chat(
        self,
        messages: Sequence[MessageDict],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: Sequence[Sequence[MessageDict]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Completion]: ...

    def chat(self, messages: Any, params: Any = None, **options: Any) -> Any:
        """Answer one conversation, or several together, as the server's /v1/chat/completions does.

        messages: a list of dicts in OpenAI's format, or a list of such lists. Roles: system, developer, user,
            assistant, tool. For a vision model the content may be a list of parts: {"type": "text", "text":
            ...} and {"type": "image", "image": an array, Pillow image, bytes, file or data: URL}.
        params: for all conversations, or a list with one for each; None: `get_default_sampling_params()`.
        tools: functions that the model may call, as OpenAI's API takes them.
        tool_choice: "auto", "none", "required" or {"type": "function", "function": {"name": ...}}.
        parallel_tool_calls: False ends the answer after its first call.
        chat_template_kwargs: variables for the chat template, such as {"enable_thinking": False}.

        The completion has the answer in `text`, the reasoning in `reasoning` and the calls in `tool_calls`;
        after a call, `finish_reason` is "tool_calls".

        Raises InvalidRequest, before any work is done, if a conversation cannot be served.
        """
        if messages and isinstance(messages[0], Mapping):
            (completion,) = self._answer([self._render(messages, params, **options)])
            return completion
        each = self._params_for_each(params, len(messages))
        return self._answer([self._render(m, p, **options) for m, p in zip(messages, each, strict=True)])

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> CompletionStream:
        """The answer to a prompt as it grows. Closing or dropping the stream stops the request."""
        params = params or self.get_default_sampling_params()
        return self._start(self.renderer.render_text(prompt, params))

    def stream_chat(
        self, messages: Sequence[MessageDict], params: SamplingParams | None = None, **options: Any
    ) -> CompletionStream:
        """The answer to a conversation as it grows. The arguments are those of `chat`."""
        return self._start(self._render(messages, params, **options))

    def load_adapter(self, name: str, path: str | Path) -> AdapterInfo:
        """Load a LoRA or DoRA adapter. Raises AdapterRefused, or AdapterConflict if the name is taken."""
        return self.engine.load_adapter(name, path)

    def unload_adapter(self, name: str) -> AdapterInfo:
        """Raises UnknownAdapter, or AdapterConflict while answers with the adapter are being computed."""
        return self.engine.unload_adapter(name)

    @property
    def async_engine(self) -> AsyncEngine:
        """The same engine for asyncio: `start` a prompt's ids, iterate the stream, `abort`."""
        return AsyncEngine(self.engine)

    def close(self) -> None:
        self.engine.close()
        if self._images is not None:
            self._images.decoder.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _render(
        self,
        messages: Sequence[MessageDict],
        params: SamplingParams | None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        request = ChatRequest(
            messages_from_dicts(messages, self._images),
            params or self.get_default_sampling_params(),
            tools=tools_from_dicts(tools),
            tool_choice=tool_choice_from(tool_choice),
            parallel_tool_calls=parallel_tool_calls,
            template_kwargs=chat_template_kwargs or {},
        )
        return self.renderer.render(request)

    def _params_for_each(
        self, params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self.get_default_sampling_params()] * num_prompts
        if len(params) != num_prompts:
            raise InvalidRequest(
                f"{num_prompts} prompts and {len(params)} SamplingParams: give one, or one for each"
            )
        return list(params)

    def _validate(self, prompt: ChatPrompt) -> ValidatedRequest:
        return self.engine.validate(
            prompt.ids, prompt.params, continues_prompt=prompt.continues_prompt, media=prompt.media
        )

    def _start(self, prompt: ChatPrompt) -> CompletionStream:
        return CompletionStream(self.engine, *validated(prompt, self._validate))

    def _answer(self, prompts: list[ChatPrompt]) -> list[Completion]:
        """Answer rendered prompts together: all are validated before the first one is queued."""
        ready = [validated(prompt, self._validate) for prompt in prompts]
        streams: list[CompletionStream] = []
        try:
            for prompt, request in ready:
                streams.append(CompletionStream(self.engine, prompt, request))
            return [stream.completion() for stream in streams]
        except BaseException:
            for stream in streams:
                stream.close()
            raise


def default_model() -> Path:
    """The folder of the model that is used if none is named. It is made at first use."""
    from outrider.models.files import default_model
    from outrider.models.files.named import make_ready

    return make_ready(default_model)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several: a string is one prompt, and so is a list of token ids."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
