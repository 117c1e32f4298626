"""From a request's decoding fields to SamplingParams and a Grammar: the same for every endpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from outrider.api.decoding_schema import ChatDecoding, Decoding
from outrider.api.errors import invalid
from outrider.api.tenant import cache_salt
from outrider.request import Grammar, SamplingParams

MAX_STOP_STRINGS = 4  # OpenAI's limit

SAME_NAMES = (
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
    "skip_special_tokens",
    "draft_depth",
)

# Fields of other servers that would change the answer and that nothing here does.
UNSUPPORTED = {
    "use_beam_search": "beam search is not supported",
    "length_penalty": "it belongs to beam search, which is not supported",
    "early_stopping": "it belongs to beam search, which is not supported",
    "best_of": "not supported here; ask for n",
    "logits_processors": "not supported; see logit_bias and structured_outputs",
    "allowed_token_ids": "not supported; see logit_bias and structured_outputs",
    "bad_words": "not supported; see logit_bias",
    "include_stop_str_in_output": "not supported: answers end before the stop string",
    "truncate_prompt_tokens": "not supported: prompts are never cut",
    "prompt_logprobs": "not supported: logprobs are given for the answer only",
    "guided_whitespace_pattern": "not supported",
    "suffix": "not supported: this model completes prompts, it does not fill gaps",
}
UNSUPPORTED_IN_CHAT = UNSUPPORTED | {
    "chat_template": "the model's own template is used",
    "documents": "not supported: put them into a message",
    "echo": "not supported in chat",
    "mm_processor_kwargs": "not supported",
}


def sampling_params(
    body: Decoding,
    *,
    max_tokens: int | None,
    stop: str | list[str] | None = None,
    logprobs: int | None = None,
    grammar: Grammar | None = None,
) -> SamplingParams:
    """What was asked for; what was not said is left at the engine's defaults. Raises InvalidRequest."""
    given: dict[str, Any] = {name: getattr(body, name) for name in SAME_NAMES}
    given |= {"top_k": 0 if body.top_k == -1 else body.top_k, "logit_bias": _logit_bias(body.logit_bias)}
    given["cache_salt"] = cache_salt(body.cache_salt)
    given = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(
        max_tokens=max_tokens, stop=stop or None, logprobs=logprobs, grammar=grammar, **given
    )


def check_stop(stop: str | list[str] | None, name: str = "stop") -> None:
    if isinstance(stop, list) and len(stop) > MAX_STOP_STRINGS:
        raise invalid(name, f"at most {MAX_STOP_STRINGS} strings, not {len(stop)}")


def _logit_bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    try:
        return {int(token_id): value for token_id, value in bias.items()}
    except ValueError:
        raise invalid("logit_bias", "its keys must be token ids") from None


def template_kwargs(body: ChatDecoding, effort: str | None = None) -> dict[str, Any]:
    """Variables for the chat template; what chat_template_kwargs says itself goes before its short forms."""
    found: dict[str, Any] = {}
    if effort == "none":
        found["enable_thinking"] = False
    elif effort is not None:
        found["reasoning_effort"] = effort
    for name in ("enable_thinking", "add_generation_prompt", "continue_final_message"):
        if getattr(body, name) is not None:
            found[name] = getattr(body, name)
    return found | (body.chat_template_kwargs or {})


def grammar_of(body: Decoding, *others: tuple[str, Grammar | None]) -> Grammar | None:
    """The one form that the answer must have; two different wishes are an error. `others`: (name, wish)."""
    wishes = [(name, grammar) for name, grammar in (*others, *_guided(body)) if grammar is not None]
    if len(wishes) > 1:
        raise invalid(wishes[1][0], f"cannot be combined with {wishes[0][0]}")
    return wishes[0][1] if wishes else None


def schema_grammar(schema: Mapping[str, Any] | str) -> Grammar:
    return Grammar("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


def format_grammar(
    param: str, kind: str, schema: Mapping[str, Any] | None, *, where: str = "schema"
) -> Grammar | None:
    """OpenAI's three formats: text, json_object, json_schema."""
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_object")
    if schema is None:
        raise invalid(param, f"{where} is missing")
    return schema_grammar(schema)


def _guided(body: Decoding) -> list[tuple[str, Grammar | None]]:
    own = body.structured_outputs
    found = [
        ("guided_json", None if body.guided_json is None else schema_grammar(body.guided_json)),
        ("guided_regex", _regex(body.guided_regex)),
        ("guided_grammar", _lark(body.guided_grammar)),
        ("guided_choice", _choice("guided_choice", body.guided_choice)),
    ]
    if own is not None:
        found += [
            ("structured_outputs.json", None if own.json_ is None else schema_grammar(own.json_)),
            ("structured_outputs.regex", _regex(own.regex)),
            ("structured_outputs.grammar", _lark(own.grammar)),
            ("structured_outputs.choice", _choice("structured_outputs.choice", own.choice)),
            ("structured_outputs.json_object", Grammar("json_object") if own.json_object else None),
        ]
    return found


def _regex(expression: str | None) -> Grammar | None:
    return None if expression is None else Grammar("regex", expression)


def _lark(text: str | None) -> Grammar | None:
    return None if text is None else Grammar("lark", text)


def _choice(param: str, strings: list[str] | None) -> Grammar | None:
    if strings is None:
        return None
    if not strings or "" in strings:
        raise invalid(param, "needs at least one string, and none empty")
    return Grammar("regex", "|".join(re.escape(string) for string in strings))
