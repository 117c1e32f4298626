"""The adapters of a loaded model, as the routes use them: loading them, and answers that use one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from outrider.api.chat_backend import ChatBackend, PreparedAnswers
from outrider.chat.conversation import ChatRequest
from outrider.plan import AdapterInfo
from outrider.request import SamplingParams


class AdapterControl(Protocol):
    """The part of the engine that the routes use."""

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]: ...  # loaded ones, by name

    def load_adapter(self, name: str, path: str | Path) -> AdapterInfo: ...

    def unload_adapter(self, name: str) -> AdapterInfo: ...


class AdapterBackend:
    """A backend whose answers are computed with an adapter."""

    def __init__(self, backend: ChatBackend, adapter: str) -> None:
        self._backend = backend
        self._adapter = adapter

    async def prepare(self, request: ChatRequest, num_answers: int = 1) -> PreparedAnswers:
        request = replace(request, params=replace(request.params, adapter=self._adapter))
        return await self._backend.prepare(request, num_answers)

    async def prepare_text(
        self, prompt: str | Sequence[int], params: SamplingParams, num_answers: int = 1
    ) -> PreparedAnswers:
        return await self._backend.prepare_text(prompt, replace(params, adapter=self._adapter), num_answers)

    async def count_tokens(self, request: ChatRequest) -> int:
        return await self._backend.count_tokens(request)

    async def prompt_ids(self, prompt: ChatRequest | str, add_special_tokens: bool) -> Sequence[int]:
        return await self._backend.prompt_ids(prompt, add_special_tokens)
