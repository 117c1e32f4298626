"""Which tokens end an answer. Published files name them in four places, and rarely all of them in one.

generation_config.json, config.json and the tokenizer's own eos: read by mlx-lm, together. Vision checkpoints
have theirs in `text_config`. The chat template ends an assistant's turn with a token that some tokenizers do
not name: their eos is <|endoftext|>, and the chat ends with <|im_end|>.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import takewhile
from typing import Any

log = logging.getLogger(__name__)

PROBE = "outrider-probe"
CHANNELS = "<|channel|>"  # in the templates of harmony, where a message ends and the turn goes on


def eos_ids(tokenizer: Any, config: Mapping[str, Any]) -> frozenset[int]:
    """`tokenizer` is mlx-lm's, `config` the model's config.json."""
    known = frozenset(tokenizer.eos_token_ids)
    text_config = config.get("text_config")
    inner = text_config.get("eos_token_id") if isinstance(text_config, Mapping) else None
    special = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    # An ordinary token would cut off answers: some configs have the default of their class here.
    named = inner if isinstance(inner, list) else [inner]
    found = {i for i in named if isinstance(i, int) and i in special} | _turn_ends(tokenizer, special)
    if new := found - known:
        names = ", ".join(special[i] for i in sorted(new))
        log.info("answers also end at %s: the tokenizer and generation_config.json do not name it", names)
    return known | found


def _turn_ends(tokenizer: Any, special: Mapping[int, str]) -> set[int]:
    """The special token with which the chat template ends an assistant's turn, if it does.

    It is the last one that follows the turn both at the end of a conversation and before another question,
    and that does not start turns: some templates write the start of an answer, asked for or not.
    """
    if CHANNELS in special.values():
        return set()
    texts = [_rendered(tokenizer, num_messages) for num_messages in (2, 3)]
    if None in texts:
        return set()
    before, rests = str(texts[0]).split(PROBE)[0], [str(text).split(PROBE)[2] for text in texts]
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(*rests, strict=False))
    end = "".join(character for character, _ in pairs)
    places = {end.rfind(token): i for i, token in special.items() if token in end and token not in before}
    return {places[max(places)]} if places else set()


def _rendered(tokenizer: Any, num_messages: int) -> str | None:
    """A conversation of so many messages, each of which is PROBE; None if the template does not show them."""
    if not getattr(tokenizer, "has_chat_template", False):
        return None
    for content in (PROBE, [{"type": "text", "text": PROBE}]):  # some vision templates take lists only
        roles = ("user", "assistant", "user")[:num_messages]
        messages = [{"role": role, "content": content} for role in roles]
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
        except Exception:  # a template may raise anything; requests will get its message
            continue
        if isinstance(text, str) and text.count(PROBE) == num_messages:
            return text
    return None
