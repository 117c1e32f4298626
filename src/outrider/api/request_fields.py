"""Request fields that several endpoints share, and their translation: sampling and structured output.

Extensions of OpenAI's API carry vLLM's names. Ranges are checked in `outrider.request`, so that HTTP and
Python users get the same messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from outrider.answer_form import Grammar
from outrider.api.errors import invalid, refused
from outrider.api.keep_alive import KeepAlive
from outrider.api.limits import (
    ALLOWED_IDS,
    ANSWERS,
    BAD_WORD,
    BAD_WORDS,
    CHOICES,
    GRAMMAR,
    INT_DIGITS,
    LOGIT_BIAS,
    STOP_IDS,
    TOP_LOGPROBS,
    AnyText,
    AtMost,
    GrammarText,
    JsonObject,
    Word,
)
from outrider.api.middleware import current_tenant
from outrider.api.thinking_fields import thinking_budget
from outrider.request import (
    MAX_BIAS,
    MAX_DEPTH,
    MAX_PRIORITY,
    MAX_REPETITION_PENALTY,
    MIN_REPETITION_PENALTY,
    SamplingDefaults,
    SamplingParams,
    SpecPrefill,
)

# Fields of other servers that change the answer there and that Outrider does not implement.
UNSUPPORTED = {
    "use_beam_search": "beam search is not supported",
    "length_penalty": "it belongs to beam search, which is not supported",
    "early_stopping": "it belongs to beam search, which is not supported",
    "best_of": "not supported: use n to get several answers",
    "logits_processors": "functions of Python, which only outrider.LLM takes: use logit_bias or bad_words",
    "prompt_logprobs": "not supported: use echo with logprobs of /v1/completions",
    "guided_whitespace_pattern": "not supported",
    "suffix": "not supported: models continue prompts here and do not fill in the middle",
}
UNSUPPORTED_IN_CHAT = UNSUPPORTED | {
    "chat_template": "not supported: the model's own chat template is used",
    "documents": "not supported: put the documents into a message",
    "echo": "not supported in chat: use /v1/completions",
    "mm_processor_kwargs": "not supported",
}


KEEP_ALIVE = (
    "Extension, Ollama's: how long the model stays loaded after its last use. A number of seconds, or a text "
    'such as "10m"; 0: unload it after this request; -1: keep it'
)
KEEP_RANGE: dict[str, Any] = {"exclusiveMinimum": 0, "maximum": 1}
NOT_NULL: dict[str, Any] = {"not": {"type": "null"}}  # JSON Schema of an optional field that is required here


def documented(description: str | None = None, /, **schema: Any) -> Any:
    """An optional field. `schema` is JSON Schema for /openapi.json; the code that reads the field checks it.

    The checks are not pydantic's, because theirs say more: what the server supports instead, for instance.
    """
    return Field(None, description=description, json_schema_extra=schema)


def one_of_types(**required: list[str]) -> dict[str, Any]:
    """JSON Schema of an object: the values of its `type`, and the fields that each of them requires."""
    return {
        "oneOf": [
            {
                "properties": {"type": {"const": kind}} | dict.fromkeys(names, NOT_NULL),
                "required": ["type", *names],
            }
            for kind, names in required.items()
        ]
    }


class RequestModel(BaseModel):
    """Strict JSON types: the string "1" is no number. Unknown fields stay in `model_extra`, for the log."""

    model_config = ConfigDict(strict=True, extra="allow")


def whole(value: Any) -> Any:
    """2.0 as 2: JSON has one type of number, and some clients write all of them with a point."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(whole)]
Bias = Annotated[float, Field(json_schema_extra={"minimum": -MAX_BIAS, "maximum": MAX_BIAS})]
TokenId = Annotated[Whole, Field(json_schema_extra={"minimum": 0})]
Choices = Annotated[list[AnyText], AtMost(CHOICES)]
BadWord = Annotated[str, AtMost(BAD_WORD), Field(json_schema_extra={"pattern": r"\S"})]
NumAnswers = Annotated[int, Field(ge=1, le=ANSWERS.most), BeforeValidator(whole)]
NumLogprobs = Annotated[int, Field(ge=0, le=TOP_LOGPROBS.most), BeforeValidator(whole)]


class StructuredOutputs(RequestModel):
    """The form of the answer. Exactly one of the fields may be set."""

    json_: JsonObject | GrammarText | None = Field(None, alias="json", description="JSON schema")
    regex: GrammarText | None = None
    choice: Choices | None = documented("One of these strings", minItems=1)
    grammar: GrammarText | None = Field(None, description="Lark grammar")
    json_object: bool | None = None


class SpecPrefillFields(RequestModel):
    """Not exact: the model reads only a share of the prompt's tokens, those that a scorer finds important."""

    keep: float = Field(description="Share of the tokens that is read", json_schema_extra=KEEP_RANGE)


class SamplingFields(RequestModel):
    temperature: float | None = documented(
        "0 is greedy. This and the other sampling parameters have defaults of the model: see /v1/models",
        minimum=0,
        maximum=100,
    )
    top_p: float | None = documented(exclusiveMinimum=0, maximum=1)
    presence_penalty: float | None = documented(minimum=-2, maximum=2)
    frequency_penalty: float | None = documented(minimum=-2, maximum=2)
    logit_bias: Annotated[dict[str, Bias], AtMost(LOGIT_BIAS)] | None = documented(
        "Token id to bias", propertyNames={"pattern": "^[0-9]+$"}
    )
    seed: Whole | None = documented(
        "The same seed gives the same answer", minimum=-(2**63), exclusiveMaximum=2**64
    )

    top_k: Whole | None = documented("Extension. 0 or -1: off", minimum=-1)
    min_p: float | None = documented("Extension", minimum=0, maximum=1)
    repetition_penalty: float | None = documented(
        "Extension: over prompt and answer", minimum=MIN_REPETITION_PENALTY, maximum=MAX_REPETITION_PENALTY
    )
    min_tokens: Whole | None = documented("Extension: at most max_tokens", minimum=0)
    ignore_eos: bool | None = Field(None, description="Extension")
    stop_token_ids: Annotated[list[TokenId], AtMost(STOP_IDS)] | None = Field(None, description="Extension")
    include_stop_str_in_output: bool | None = Field(
        None, description="Extension: the text ends after the stop string, or after the stop token's text"
    )
    allowed_token_ids: Annotated[list[TokenId], AtMost(ALLOWED_IDS), Field(min_length=1)] | None = Field(
        None, description="Extension: only these tokens are sampled. Cannot be combined with a grammar"
    )
    bad_words: Annotated[list[BadWord], AtMost(BAD_WORDS)] | None = Field(
        None, description="Extension: strings that the answer must not contain, as the tokenizer writes them"
    )
    truncate_prompt_tokens: Whole | None = documented(
        "Extension: only the last so many tokens of the prompt are read. -1: as many as fit",
        minimum=-1,
        **{"not": {"const": 0}},
    )
    skip_special_tokens: bool | None = Field(None, description="Extension")
    cache_salt: Word | None = Field(
        None, description="Extension: only requests of the same salt (and API key) share cached prefixes"
    )
    timeout: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Extension: seconds for the whole request"
    )
    keep_alive: KeepAlive | None = Field(None, description=KEEP_ALIVE)
    priority: Whole | None = documented(
        "Extension: requests of a lower value start first, among those of the same API key that wait",
        minimum=-MAX_PRIORITY,
        maximum=MAX_PRIORITY,
    )
    adapter: Word | None = Field(
        None, description="Extension: a loaded adapter; the model's name may also be base:adapter"
    )
    draft_depth: Whole | Literal["auto"] | None = documented(
        "Extension: drafts per step; changes the speed, never the answer", minimum=0, maximum=MAX_DEPTH
    )

    spec_prefill: SpecPrefillFields | None = Field(
        None, description="Extension, if the server allows it: skip the least important tokens of the prompt"
    )

    thinking_token_budget: Whole | None = documented(
        "Extension: most tokens of reasoning; at the limit its end is forced. -1: no limit", minimum=-1
    )
    max_thinking_tokens: Whole | None = documented(
        "Extension: another name of thinking_token_budget", minimum=-1
    )

    guided_json: JsonObject | GrammarText | None = Field(None, description="Extension: JSON schema")
    guided_regex: GrammarText | None = Field(None, description="Extension")
    guided_grammar: GrammarText | None = Field(None, description="Extension: Lark grammar")
    guided_choice: Choices | None = documented("Extension: one of these strings", minItems=1)
    structured_outputs: StructuredOutputs | None = Field(None, description="Extension")


class ChatFields(SamplingFields):
    chat_template_kwargs: JsonObject | None = Field(
        None, description="Extension: variables for the chat template"
    )
    enable_thinking: bool | None = Field(
        None, description="Extension: short for chat_template_kwargs.enable_thinking"
    )
    add_generation_prompt: bool | None = Field(
        None, description="Extension: append the template's start of an assistant message (default: true)"
    )
    continue_final_message: bool | None = Field(
        None, description="Extension: the answer continues the last message"
    )


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    include_obfuscation: bool | None = documented("Not supported", enum=[False, None])


# -- sampling --------------------------------------------------------------------------------------------

SAME_NAMES = (  # fields that SamplingParams has under the same name
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "include_stop_str_in_output",
    "allowed_token_ids",
    "bad_words",
    "truncate_prompt_tokens",
    "skip_special_tokens",
    "draft_depth",
    "priority",
)


def sampling_params(
    body: SamplingFields,
    defaults: SamplingDefaults,
    *,
    max_tokens: int | None,
    stop: str | list[str] | None = None,
    logprobs: int | None = None,
    grammar: Grammar | None = None,
    token_origins: bool = False,
    prompt_progress: bool = False,
    prompt_logprobs: int | None = None,
    thinking: int | None = None,
) -> SamplingParams:
    """Fields that the request leaves out get `defaults`, or else the engine's. Raises InvalidRequest.

    `thinking`: most tokens of reasoning by the endpoint's own fields.
    """
    given: dict[str, Any] = {name: getattr(body, name) for name in SAME_NAMES}
    given["thinking_token_budget"] = thinking_budget(body, thinking)
    given |= {"top_k": 0 if body.top_k == -1 else body.top_k, "logit_bias": _logit_bias(body.logit_bias)}
    tenant = given["tenant"] = current_tenant.get()
    if tenant or body.cache_salt:
        given["cache_salt"] = f"{tenant}/{body.cache_salt or ''}"
    if body.spec_prefill is not None:
        given["spec_prefill"] = SpecPrefill(body.spec_prefill.keep)
    given = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(
        max_tokens=max_tokens,
        stop=stop or None,
        logprobs=logprobs,
        grammar=grammar,
        token_origins=token_origins,
        prompt_progress=prompt_progress,
        prompt_logprobs=prompt_logprobs,
        **(defaults.given | given),
    )


def _logit_bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    if not all(map(_is_token_id, bias)):
        raise invalid("logit_bias", "its keys must be token ids, such as {'42': -100}")
    return {int(token_id): value for token_id, value in bias.items()}


def _is_token_id(key: str) -> bool:
    """Short, since the time that int() takes grows with the square of the number of digits."""
    return key.isascii() and key.isdigit() and len(key) <= INT_DIGITS.most


def template_kwargs(body: ChatFields, effort: str | None = None) -> dict[str, Any]:
    """Variables for the chat template. chat_template_kwargs overrides the short forms."""
    found: dict[str, Any] = {}
    if effort == "none":
        found["enable_thinking"] = False
    elif effort is not None:
        found["reasoning_effort"] = effort
    if (budget := thinking_budget(body)) is not None:
        found["thinking_budget"] = budget
    for name in ("enable_thinking", "add_generation_prompt", "continue_final_message"):
        if getattr(body, name) is not None:
            found[name] = getattr(body, name)
    return found | (body.chat_template_kwargs or {})


# -- structured output -----------------------------------------------------------------------------------


def grammar_of(body: SamplingFields, *others: tuple[str, Grammar | None]) -> Grammar | None:
    """The grammar of the answer. `others`: (name, grammar) of the endpoint's own fields. Two are an error."""
    given = [(name, grammar) for name, grammar in (*others, *_guided(body)) if grammar is not None]
    if len(given) > 1:
        raise invalid(given[1][0], f"cannot be combined with {given[0][0]}")
    return given[0][1] if given else None


def schema_grammar(schema: Mapping[str, Any] | str) -> Grammar:
    return Grammar("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


def format_grammar(
    param: str, kind: str, schema: Mapping[str, Any] | None, *, where: str = "schema"
) -> Grammar | None:
    """The grammar of OpenAI's formats: text, json_object, json_schema."""
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_object")
    if schema is None:
        raise invalid(param, f"{where} is missing")
    return schema_grammar(schema)


def _guided(body: SamplingFields) -> list[tuple[str, Grammar | None]]:
    forms = body.structured_outputs or StructuredOutputs.model_validate({})
    found: list[tuple[str, Grammar | None]] = []
    for prefix, schema, regex, lark, choice in (
        ("guided_", body.guided_json, body.guided_regex, body.guided_grammar, body.guided_choice),
        ("structured_outputs.", forms.json_, forms.regex, forms.grammar, forms.choice),
    ):
        found += [
            (f"{prefix}json", None if schema is None else schema_grammar(schema)),
            (f"{prefix}regex", None if regex is None else Grammar("regex", regex)),
            (f"{prefix}grammar", None if lark is None else Grammar("lark", lark)),
            (f"{prefix}choice", _choice_grammar(f"{prefix}choice", choice)),
        ]
    json_object = Grammar("json_object") if forms.json_object else None
    return [*found, ("structured_outputs.json_object", json_object)]


def _choice_grammar(param: str, strings: list[str] | None) -> Grammar | None:
    if strings is None:
        return None
    if not strings or "" in strings:
        raise invalid(param, "needs at least one string, and no empty string")
    if (num_characters := sum(map(len, strings))) > GRAMMAR.most:
        raise invalid(param, f"has {num_characters:,} characters together, of at most {GRAMMAR.most:,}")
    return Grammar("regex", "|".join(re.escape(string) for string in strings))


# -- other options ---------------------------------------------------------------------------------------


def check_verbosity(param: str, verbosity: str | None) -> None:
    if verbosity not in (None, "medium"):
        raise refused(param, "not supported: ask for short or long answers in the prompt")


def check_stream_options(options: StreamOptions | None, stream: bool | None) -> None:
    if options is None:
        return
    if not stream:
        raise invalid("stream_options", "is allowed only with stream: true")
    if options.include_obfuscation:
        raise refused("stream_options.include_obfuscation", "not supported: chunks are not padded")
