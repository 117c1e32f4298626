"""The JSON that /v1/responses sends, for /openapi.json only: no answer is validated."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from outrider.api.openai.answer_models import CompletionTokensDetails, TokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class OutputReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(TypedDict):
    id: str
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[OutputReasoningText]
    status: ItemStatus


class OutputFunctionCall(TypedDict):
    id: str
    type: Literal["function_call"]
    status: ItemStatus
    arguments: str
    call_id: str
    name: str
    namespace: NotRequired[str]


OutputItem = OutputMessage | OutputReasoning | OutputFunctionCall


class InputTokensDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int
    skipped_tokens: NotRequired[int]


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class ResponseError(TypedDict):
    code: str
    message: str


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class ResponseReasoning(TypedDict):
    effort: str | None
    summary: None


class ResponseText(TypedDict):
    format: dict[str, Any]
    verbosity: Literal["medium"]


class ResponseTool(TypedDict):
    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any]
    strict: bool


class ResponseObject(TypedDict):
    """Most fields repeat those of the request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: NotRequired[int]
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ResponseReasoning
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: ResponseText
    tool_choice: str | dict[str, Any]
    tools: list[ResponseTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None


class ResponseEvent(TypedDict):
    """The events of OpenAI's responses API. `type` tells which of the optional fields an event has."""

    type: str
    sequence_number: int
    response: NotRequired[ResponseObject]
    output_index: NotRequired[int]
    item: NotRequired[OutputItem]
    item_id: NotRequired[str]
    content_index: NotRequired[int]
    part: NotRequired[OutputText | OutputReasoningText]
    delta: NotRequired[str]
    text: NotRequired[str]
    logprobs: NotRequired[list[TokenLogprob]]
    name: NotRequired[str]
    arguments: NotRequired[str]


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


class InputItems(TypedDict):
    object: Literal["list"]
    data: list[dict[str, Any]]  # the items as the client sent them
    has_more: Literal[False]
    first_id: str | None
    last_id: str | None


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]
