"""The JSON that Ollama's routes send, for /openapi.json only: no answer is validated."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict


class OllamaTokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class OllamaLogprob(OllamaTokenLogprob):
    top_logprobs: list[OllamaTokenLogprob]


class OllamaCalledFunction(TypedDict):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(TypedDict):
    id: str
    function: OllamaCalledFunction


class OllamaAnswerMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaCall]]


class _Answer(TypedDict):
    model: str
    created_at: str
    logprobs: NotRequired[list[OllamaLogprob]]


class _Figures(TypedDict):
    """Of the last line. Durations are in nanoseconds; an answer without any token lacks some."""

    done_reason: NotRequired[Literal["stop", "length", "load", "unload"]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]


class OllamaChatLine(_Answer, _Figures):
    message: OllamaAnswerMessage
    done: bool


class OllamaChat(_Answer, _Figures):
    message: OllamaAnswerMessage
    done: Literal[True]


class OllamaGeneratedLine(_Answer, _Figures):
    response: str
    thinking: NotRequired[str]
    done: bool


class OllamaGenerated(_Answer, _Figures):
    response: str
    thinking: NotRequired[str]
    done: Literal[True]


class OllamaDetails(TypedDict):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    context_length: int
    embedding_length: int


Capability = Literal["completion", "tools", "thinking", "vision"]


class OllamaModel(TypedDict):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails
    capabilities: list[Capability]


class OllamaModels(TypedDict):
    models: list[OllamaModel]


class OllamaLoadedModel(TypedDict):
    name: str
    model: str
    size: int
    size_vram: int
    digest: str
    details: OllamaDetails
    expires_at: str
    context_length: int


class OllamaLoadedModels(TypedDict):
    models: list[OllamaLoadedModel]


class OllamaModelInfo(TypedDict):
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[Capability]
    modified_at: str


class OllamaStatus(TypedDict):
    status: str


class OllamaVersion(TypedDict):
    version: str
    outrider: str


class OllamaEmbeddings(TypedDict):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(TypedDict):
    embedding: list[float]
