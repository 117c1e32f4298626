"""A small real tokenizer with the tokens that chat templates use, and templates with real ones' habits."""

from __future__ import annotations

from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "[ARGS]")
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # added, not special: as Qwen has them

CHATML = (
    "{% if tools %}<|im_start|>system\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Call with <tool_call></tool_call>.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role + '\n' }}"
    "{% if m.role == 'assistant' and '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
BARE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def checked(test: str, complaint: str) -> str:
    """The start of a template that rejects conversations in which a message meets a test."""
    complain = f"{{{{ raise_exception('{complaint}') }}}}"
    return f"{{% for m in messages %}}{{% if {test} %}}{complain}{{% endif %}}{{% endfor %}}"


def new_tokenizer(template: str | None = CHATML, special: tuple[str, ...] = SPECIAL) -> Any:
    return TokenizerWrapper(plain_tokenizer(template, special))


def plain_tokenizer(template: str | None = CHATML, special: tuple[str, ...] = SPECIAL) -> Any:
    """Every byte is a token; then the added ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    symbols = [*special, *PLAIN, *alphabet]
    backend = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer
