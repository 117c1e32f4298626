"""The JSON that the operators' routes send, for /openapi.json only: no answer is validated."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict


class Health(TypedDict):
    status: str  # "live", "ready", "shutting down", or why the engine does not work


class ServedModel(TypedDict):
    name: str
    path: str
    dtype: str
    kv_bits: int | None  # of keys and values; None: those of `dtype`
    device: str
    max_context: int
    drafter: str
    head: str | None
    rank_head: str | None  # on several ranks: "whole" (on rank 0) or "divided"
    rank_head_reason: str | None
    draft_model: str | None


class ModelState(TypedDict):
    """A model of this server, loaded or not."""

    name: str
    aliases: list[str]
    path: str
    state: Literal["not_loaded", "loading", "loaded", "unloading", "failed"]
    stage: str | None  # of a load
    progress: float | None  # of that stage, 0 to 1; null: not known
    failure: str | None  # why the last load failed
    pinned: bool
    requests: int  # that use the model or wait for it
    reserved_bytes: int  # weights and caches; 0 while it is not loaded
    loads: int
    unloads_in_s: float | None  # if no request comes; null: in use, or it stays loaded


class StatusRow(TypedDict):
    sequence: int
    kind: str
    cells: int
    drafts: int
    prompt_tokens: int
    images: bool  # the prompt has images


class StatusRequest(TypedDict):
    request_id: str
    engine_id: str
    api: str
    model: str
    state: Literal["waiting", "prompt", "answering", "finished"]
    age_s: float
    prompt_tokens: int
    prompt_tokens_done: int  # computed, or taken from the prefix cache
    images: int  # of the prompt, frames of videos included
    deltas: int


class MemoryPart(TypedDict):
    bytes: int  # now
    budget_bytes: int  # at most


class Memory(TypedDict):
    limit_bytes: int  # of this process, by the device, the machine and its container
    weights: MemoryPart
    rows: MemoryPart  # KV caches of running requests
    prefixes: MemoryPart  # cached prefixes
    images: MemoryPart  # cached embeddings of images
    adapters: MemoryPart  # LoRA and DoRA adapters that requests can name
    steps: MemoryPart  # the arrays of a step, and buffers for the next one


class SwitchedOff(TypedDict):
    part: str  # fast code that is switched off
    reason: str
    instead: str  # what is used in its place


class Status(TypedDict):
    server: str
    status: str  # as in Health
    up_s: float
    model: ServedModel | None  # the first model; null while it is not loaded
    models: list[ModelState]
    fallbacks: list[SwitchedOff]
    live_requests: int
    capacity: int
    live_bytes: int
    live_tokens: int
    waiting: int
    cache_bytes: int
    prefix_cache: dict[str, int] | None
    memory: Memory | None
    steps: int
    since_last_step_s: float | None
    drafted_by_position: list[int]
    accepted_by_position: list[int]
    rows: list[StatusRow]
    requests: list[StatusRequest]


class StreamedRow(TypedDict):
    """A row since the last event."""

    sequence: int
    state: Literal["prompt", "decode"]
    prompt_tokens: int
    cells: int  # tokens in the caches: of a row in the state "prompt", how much of its prompt is computed
    depth: int  # drafts that it was fed in the last step
    committed: int
    accepted: int  # drafts
    rejected: int  # drafts
    images: bool  # the prompt has images
    strides: list[list[int]]  # [drafts fed, tokens committed] of its newest decode steps, the last one last


class StatusEvent(TypedDict):
    time_s: float
    status: str  # as in Health
    rows: list[StreamedRow]
    max_rows: int
    waiting: int
    live_requests: int
    steps: int
    tokens_per_s: float  # over the last two seconds
    prompt_tokens_per_s: float
    committed_tokens: int
    prefilled_tokens: int
    drafted_by_position: list[int]
    accepted_by_position: list[int]
    cache_bytes: int
    cache_budget_bytes: int | None
    prefix_cache: dict[str, int] | None
    memory_bytes: int | None  # of the process; null on macOS


class Adapter(TypedDict):
    id: str  # the name that requests have
    object: Literal["adapter"]
    model: str
    path: str
    kind: Literal["lora", "dora"]
    rank: int
    layers: int  # linear layers that it changes
    bytes: int
    fingerprint: str  # of its contents


class AdapterList(TypedDict):
    object: Literal["list"]
    data: list[Adapter]


class DeletedAdapter(TypedDict):
    id: str
    object: Literal["adapter.deleted"]
    deleted: Literal[True]
    freed_bytes: int


class ClearedCache(TypedDict):
    object: Literal["cache.deleted"]
    deleted: Literal[True]
    freed_bytes: int
