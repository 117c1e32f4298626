"""Makes tokenizer.json, tokenizer_config.json and the chat template from GGUF metadata.

Owns byte-level BPE (GGUF's tokenizer model "gpt2") and the table of pre-tokenizers. SentencePiece
vocabularies are in sentencepiece.py. Must not read weights.

Text from a user must be encoded with `tokenizer.encode(text, add_special_tokens=False,
split_special_tokens=True)`. Then "<|im_end|>" typed by a user is ten characters and not the end of a turn.
Without `split_special_tokens` the markers in the text become special tokens, as rendered templates need.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from outrider.models.errors import UnreadableGGUF
from outrider.models.gguf import sentencepiece
from outrider.models.gguf.header import Header


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Control tokens that end a turn or a text in the converted families, in addition to the file's own eos.
END_MARKERS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "</s>",
)


@dataclass(frozen=True)
class PreTokenizer:
    """Rules that cut text into words. BPE then merges within each word."""

    split: str | None = None  # a regex whose matches are the words; None: GPT-2's regex
    isolates_digits: bool = False
    is_nfc: bool = False
    takes_whole_words: bool = False  # a word of the vocabulary becomes one token without merging
    adds_bos: bool = False  # the default if the file has no such key


_WORDS_AND_DIGITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

GPT2 = PreTokenizer()
SMOLLM = PreTokenizer(isolates_digits=True)
QWEN2 = PreTokenizer(_WORDS_AND_DIGITS.format(digits=""), is_nfc=True)
LLAMA3 = PreTokenizer(_WORDS_AND_DIGITS.format(digits="{1,3}"), takes_whole_words=True, adds_bos=True)
TEKKEN = PreTokenizer(_TEKKEN, takes_whole_words=True, adds_bos=True)

PRE_TOKENIZERS = {
    "default": GPT2,
    "gpt-2": GPT2,
    "smollm": SMOLLM,
    "starcoder": SMOLLM,
    "refact": SMOLLM,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "tekken": TEKKEN,
}


@dataclass(frozen=True)
class GGUFTokenizer:
    """A tokenizer that can be written into a model folder."""

    backend: Tokenizer
    named_tokens: Mapping[str, str]  # bos_token, eos_token, ...: the token's text
    bos_id: int | None
    pad_id: int | None
    eos_ids: tuple[int, ...]
    chat_template: str | None

    def special_ids(self) -> dict[str, Any]:
        """Return the entries that config.json and generation_config.json share."""
        ids = {
            "bos_token_id": self.bos_id,
            "pad_token_id": self.pad_id,
            "eos_token_id": list(self.eos_ids) or None,
        }
        return {name: value for name, value in ids.items() if value is not None}

    def save(self, folder: Path, max_length: int) -> None:
        (folder / "tokenizer.json").write_text(self.backend.to_str(pretty=True), encoding="utf-8")
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_length,
            "clean_up_tokenization_spaces": False,
            **self.named_tokens,
        }
        if self.chat_template:
            config["chat_template"] = self.chat_template
        content = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (folder / "tokenizer_config.json").write_text(content, encoding="utf-8")


def from_header(header: Header) -> GGUFTokenizer:
    """Return the tokenizer of a GGUF file. Raises UnreadableGGUF if it cannot be rebuilt exactly."""
    metadata = header.metadata
    tokens = _list(metadata, "tokenizer.ggml.tokens")
    types = _list(metadata, "tokenizer.ggml.token_type", [TokenType.NORMAL] * len(tokens))
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise UnreadableGGUF("The vocabulary has a token twice, or its tokens do not have one type each.")
    backend, adds_bos = _backend(metadata, tokens)
    _add_special_tokens(backend, tokens, types)
    named = _named_ids(metadata, len(tokens))
    _add_ends(backend, metadata, tokens, named, adds_bos)
    template = metadata.get("tokenizer.chat_template")
    return GGUFTokenizer(
        backend=backend,
        named_tokens={f"{name}_token": tokens[index] for name, index in named.items()},
        bos_id=named.get("bos"),
        pad_id=named.get("pad"),
        eos_ids=_eos_ids(metadata, tokens, types, named),
        chat_template=template if isinstance(template, str) else None,
    )


def _backend(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[Tokenizer, bool]:
    """Return the tokenizer without special tokens, and True if a text begins with bos by default."""
    builder = BUILDERS.get(str(metadata.get("tokenizer.ggml.model")))
    if builder is None:
        raise UnreadableGGUF(
            f"The tokenizer model {metadata.get('tokenizer.ggml.model')!r} is not supported. "
            f"Supported: {', '.join(sorted(BUILDERS))}. Use the model's safetensors folder instead."
        )
    try:
        return builder(metadata, tokens)
    except UnreadableGGUF:
        raise
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise UnreadableGGUF(f"The file's vocabulary and merges do not fit together: {error}.") from error


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[Tokenizer, bool]:
    pre = _pre_tokenizer(metadata)
    merges = [_merge(pair) for pair in _list(metadata, "tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.takes_whole_words))
    if pre.is_nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _splitter(pre)
    backend.decoder = decoders.ByteLevel()
    return backend, pre.adds_bos


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[Tokenizer, bool]:
    scores = _list(metadata, "tokenizer.ggml.scores")
    types = _list(metadata, "tokenizer.ggml.token_type")
    mergeable = (TokenType.NORMAL, TokenType.USER_DEFINED)
    pieces = [token if kind in mergeable else None for token, kind in zip(tokens, types, strict=True)]
    prefixes_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    return sentencepiece.backend(tokens, pieces, scores, prefixes_space), True


BUILDERS: Mapping[str, Callable[[Mapping[str, Any], list[str]], tuple[Tokenizer, bool]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}


def _pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre")
    if name is None:
        raise UnreadableGGUF(
            "The file does not name its pre-tokenizer (tokenizer.ggml.pre). Use a newer file."
        )
    if name not in PRE_TOKENIZERS:
        raise UnreadableGGUF(
            f"The pre-tokenizer {name!r} is not supported. Supported: {', '.join(sorted(PRE_TOKENIZERS))}. "
            "Use the model's safetensors folder instead."
        )
    return PRE_TOKENIZERS[name]


def _splitter(pre: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.split is None)
    if pre.split is not None:
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pre.split), "isolated"), to_bytes])
    if pre.isolates_digits:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), to_bytes])
    return to_bytes


def _merge(pair: str) -> tuple[str, str]:
    left, _, right = pair.partition(" ")
    return left, right


def _add_special_tokens(backend: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control tokens are special. User-defined tokens are matched whole but remain ordinary text."""
    kinds = (TokenType.CONTROL, TokenType.USER_DEFINED)
    added = [
        AddedToken(token, special=kind == TokenType.CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in kinds
    ]
    backend.add_tokens(added)


def _named_ids(metadata: Mapping[str, Any], num_tokens: int) -> dict[str, int]:
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: index for name, index in ids.items() if isinstance(index, int) and 0 <= index < num_tokens}


def _add_ends(
    backend: Tokenizer,
    metadata: Mapping[str, Any],
    tokens: list[str],
    named: Mapping[str, int],
    adds_bos: bool,
) -> None:
    """Make `add_special_tokens=True` put bos before and eos after a text, if the file requires them."""
    begins = metadata.get("tokenizer.ggml.add_bos_token", adds_bos) and "bos" in named
    ends = metadata.get("tokenizer.ggml.add_eos_token", False) and "eos" in named
    if not begins and not ends:
        return
    names = (["bos"] if begins else []) + (["eos"] if ends else [])
    text = {name: tokens[named[name]] for name in names}
    backend.post_processor = processors.TemplateProcessing(
        single=([text["bos"]] if begins else []) + ["$A"] + ([text["eos"]] if ends else []),
        special_tokens=[(text[name], named[name]) for name in names],
    )


def _eos_ids(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], named: Mapping[str, int]
) -> tuple[int, ...]:
    """Return the file's eos first, then the other tokens that end a turn."""
    ids = [named["eos"]] if "eos" in named else []
    ids += [
        index
        for key in ("eot", "eom")
        if isinstance(index := metadata.get(f"tokenizer.ggml.{key}_token_id"), int)
    ]
    control = {token: index for index, token in enumerate(tokens) if types[index] == TokenType.CONTROL}
    ids += [control[marker] for marker in END_MARKERS if marker in control]
    return tuple(dict.fromkeys(ids))


def _list(metadata: Mapping[str, Any], key: str, default: list | None = None) -> list:
    value = metadata.get(key, default)
    if not isinstance(value, list):
        raise UnreadableGGUF(f"The file lacks {key}: it has no complete tokenizer.")
    return value
