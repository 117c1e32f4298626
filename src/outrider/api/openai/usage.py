"""Token counts and log-probabilities as OpenAI's chat and completions write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.api.token_text import TokenText
from outrider.chat.events import Usage
from outrider.plan import TokenLogprobs

FINISH_REASONS = {"stop": "stop", "length": "length", "tool_calls": "tool_calls"}


def usage_of(usages: Sequence[Usage], num_prompt: int | None = None) -> dict[str, Any]:
    """The sum over choices. Choices of one prompt pay for it once: `num_prompt` then says how long it was."""
    prompt = sum(usage.num_prompt for usage in usages) if num_prompt is None else num_prompt
    generated = sum(usage.num_generated for usage in usages)
    cached = [usage.num_cached for usage in usages]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": min(prompt, sum(cached))},
        "completion_tokens_details": {
            "reasoning_tokens": sum(usage.num_reasoning for usage in usages),
            "accepted_prediction_tokens": sum(usage.num_accepted for usage in usages),
            "rejected_prediction_tokens": sum(usage.num_rejected for usage in usages),
        },
    }


def chat_logprobs(tokens: Sequence[TokenLogprobs], text: TokenText) -> list[dict[str, Any]]:
    """One entry a token: its string, its bytes, and its strongest rivals."""
    return [
        {
            **_entry(token.token_id, token.logprob, text),
            "top_logprobs": [_entry(token_id, logprob, text) for token_id, logprob in token.top],
        }
        for token in tokens
    ]


def _entry(token_id: int, logprob: float, text: TokenText) -> dict[str, Any]:
    return {
        "token": text.text_of(token_id),
        "logprob": finite(logprob),
        "bytes": list(text.bytes_of(token_id)),
    }


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for what is out of reach."""
    return max(logprob, -9999.0)


class CompletionLogprobs:
    """The legacy shape: four lists, with each token's place in the text."""

    def __init__(self, text: TokenText, offset: int, with_top: bool) -> None:
        self._text = text
        self._offset = offset
        self._with_top = with_top

    def render(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The next tokens; offsets go on from those rendered before."""
        strings = [self._text.text_of(token.token_id) for token in tokens]
        offsets = []
        for string in strings:
            offsets.append(self._offset)
            self._offset += len(string)
        return {
            "tokens": strings,
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens] if self._with_top else None,
            "text_offset": offsets,
        }

    def _top(self, token: TokenLogprobs) -> dict[str, float]:
        """The picked token is always among them."""
        pairs = [*token.top, (token.token_id, token.logprob)]
        return {self._text.text_of(token_id): finite(logprob) for token_id, logprob in pairs}
