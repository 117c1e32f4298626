"""The configs and the tokenizer of the hybrids, and the writing of a model folder.

The folder looks like a Qwen3.5 checkpoint that mlx-lm has converted, with the MTP head beside the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from outrider.train.head_file import write_head

VOCAB_SIZE = 768
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPES: dict[str, dict[str, int]] = {  # by name; the largest part of the parameters is in the layers
    "1m": {
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "max_position_embeddings": 1024,
    },
    "50m": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "max_position_embeddings": 4096,
    },
}


def config_of(shape: str) -> dict[str, Any]:
    """The config.json of a model folder."""
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "eos_token_id": SPECIAL.index("<|im_end|>"),
        "text_config": {
            "model_type": "qwen3_5_text",
            "vocab_size": VOCAB_SIZE,
            **SHAPES[shape],
            "full_attention_interval": 4,
            "linear_conv_kernel_dim": 4,
            "mtp_num_hidden_layers": 1,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    }


def prompt_text(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def exchange_text(question: str, answer: str) -> str:
    return f"{prompt_text(question)}{answer}<|im_end|>\n"


def new_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE. Every digit is one token, as in Qwen's tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_folder(
    folder: Path,
    config: dict[str, Any],
    model: nn.Module,
    head: nn.Module,
    tokenizer: Tokenizer,
    held_out: list[str],
) -> None:
    """`held_out`: questions that are not in the training data."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(folder / "config.json", config)
    _write_json(folder / "held_out_prompts.json", held_out)
    # "format": "mlx" tells readers that the norms are not zero-centred and must not be shifted.
    weights = dict(tree_flatten(_halved(model)))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    write_head(folder / "mtp.safetensors", _halved(head), None, {})


def _halved(module: nn.Module) -> Any:
    return tree_map(lambda array: array.astype(mx.float16), module.parameters())


def _write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
