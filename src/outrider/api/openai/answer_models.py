"""The JSON that OpenAI's routes send, for /openapi.json only: no answer is validated.

That of /v1/responses is in responses_answer_models.py.
"""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

# -- chat completions and completions --------------------------------------------------------------------


class AlternativeToken(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(AlternativeToken):
    top_logprobs: list[AlternativeToken]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class OriginOfToken(TypedDict):
    """How a token was won: as an accepted draft, or sampled by the model itself (bonus, plain)."""

    token: str
    origin: Literal["head", "ngram", "prediction", "forced", "bonus", "plain"]
    place: NotRequired[int]  # of a draft: 1 for the first one of its step
    logprob: NotRequired[float]  # with logprobs: true


class CalledFunction(TypedDict):
    name: str
    arguments: str


class FunctionCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[FunctionCall]]


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_origins: NotRequired[list[OriginOfToken]]  # with return_token_origins: true


class PromptTokensDetails(TypedDict):
    cached_tokens: int
    skipped_tokens: NotRequired[int]


class CompletionTokensDetails(TypedDict):
    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class CompletionUsage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    service_tier: Literal["default"]
    system_fingerprint: str
    metadata: NotRequired[dict[str, str]]
    choices: list[ChatChoice]
    usage: CompletionUsage


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class FunctionCallDelta(TypedDict):
    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ChatDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[FunctionCallDelta]]


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_origins: NotRequired[list[OriginOfToken]]  # with return_token_origins: true


class ChunkPromptProgress(TypedDict):
    total: int
    cache: int  # tokens from the prefix cache
    processed: int  # tokens, those from the cache included
    time_ms: int  # since the row's first step


class ChatCompletionChunk(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    service_tier: Literal["default"]
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[CompletionUsage | None]
    prompt_progress: NotRequired[ChunkPromptProgress]  # with return_progress: true


class CompletionLogprobLists(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]  # null for the first token of a prompt
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobLists | None
    finish_reason: FinishReason


class CompletionChunkChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobLists | None
    finish_reason: FinishReason | None


class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: CompletionUsage


class CompletionChunk(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChunkChoice]
    usage: NotRequired[CompletionUsage | None]


# -- models ----------------------------------------------------------------------------------------------


class DefaultSamplingParams(TypedDict):
    """The values of a request that leaves them out."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float


class Model(TypedDict):
    """Read by OpenAI's and by Anthropic's clients."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    state: Literal["not_loaded", "loading", "loaded", "unloading", "failed"]
    max_model_len: int | None  # null: not known before the model is loaded
    default_sampling_params: DefaultSamplingParams
    type: Literal["model"]
    display_name: str
    created_at: str
    max_input_tokens: int | None
    max_tokens: int | None
    lifecycle: Literal["active"]
    input_modalities: list[Literal["text", "image"]]
    output_modalities: list[Literal["text", "embeddings", "rerank"]]
    parent: NotRequired[str]  # of an adapter (base:adapter): the base


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]
    has_more: Literal[False]
    first_id: str
    last_id: str


# -- embeddings ------------------------------------------------------------------------------------------


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # str: base64 of little-endian float32


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
