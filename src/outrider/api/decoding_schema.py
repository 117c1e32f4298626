"""The parameters that every endpoint takes: OpenAI's sampling parameters and Outrider's extensions.

The extensions carry the names that vLLM's clients use. Ranges are checked where the parameters are honoured
(`outrider.request`), so that all doors say the same.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Shape(BaseModel):
    """JSON as it is: no string passes for a number. Unknown fields are kept, to be named in the log."""

    model_config = ConfigDict(strict=True, extra="allow")


class StructuredOutputs(Shape):
    """Exactly one of them says what the answer must look like."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="JSON schema")
    regex: str | None = None
    choice: list[str] | None = Field(None, description="One of these strings")
    grammar: str | None = Field(None, description="Lark grammar")
    json_object: bool | None = None


class Decoding(Shape):
    temperature: float | None = Field(None, description="0 is greedy")
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(None, description="Token id to bias")
    seed: int | None = Field(None, description="The same seed gives the same answer")

    top_k: int | None = Field(None, description="Extension. 0 or -1: off")
    min_p: float | None = Field(None, description="Extension")
    repetition_penalty: float | None = Field(None, description="Extension: over prompt and answer")
    min_tokens: int | None = Field(None, description="Extension")
    ignore_eos: bool | None = Field(None, description="Extension")
    stop_token_ids: list[int] | None = Field(None, description="Extension")
    skip_special_tokens: bool | None = Field(None, description="Extension")
    cache_salt: str | None = Field(
        None, description="Extension: only requests of the same salt (and API key) share cached prefixes"
    )
    draft_depth: int | Literal["auto"] | None = Field(
        None, description="Extension: drafts a step, 0..8; changes the speed, never the answer"
    )

    guided_json: dict[str, Any] | str | None = Field(None, description="Extension: JSON schema")
    guided_regex: str | None = Field(None, description="Extension")
    guided_grammar: str | None = Field(None, description="Extension: Lark grammar")
    guided_choice: list[str] | None = Field(None, description="Extension: one of these strings")
    structured_outputs: StructuredOutputs | None = Field(None, description="Extension")


class ChatDecoding(Decoding):
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Extension: variables for the chat template"
    )
    enable_thinking: bool | None = Field(
        None, description="Extension: short for chat_template_kwargs.enable_thinking"
    )
    add_generation_prompt: bool | None = Field(None, description="Extension: begin the answer's turn (true)")
    continue_final_message: bool | None = Field(
        None, description="Extension: the answer goes on with the last message"
    )


class StreamOptions(Shape):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(Shape):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None
