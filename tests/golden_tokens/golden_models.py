"""The models that the golden requests run on.

A model is built here from fixed seeds, or lies in tests/data, or is one of Outrider's own (fetched once).
"""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from outrider.cli.main import main
from tiny_models import SPECIAL_TOKENS, write_checkpoint, write_tokenizer
from tiny_vision import write_vision_checkpoint

TINY_HYBRID = Path(__file__).parents[1] / "data" / "tiny-hybrid"
DEFAULT_MODEL = "SmolLM2-135M-Instruct"
VISION_MODEL = "outrider-vision-135m"

CONTEXT = 4096
HIDDEN_SIZE = 64
ATTENTION_LAYER = 2  # of the tiny qwen3_5: the layer whose shapes the block of an MTP head has

THINKING_TOKENS = (
    *SPECIAL_TOKENS,
    "<|tool|>",
    "<|endoftext|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
)
THINK_END_ID = THINKING_TOKENS.index("</think>")
THINKING_TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "Call with <tool_call></tool_call>.<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>"
    "{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>{% endif %}"
    "{% endif %}"
)


def tiny_llama(folder: Path) -> Path:
    write_checkpoint(folder, "llama", max_position_embeddings=CONTEXT)
    return folder


def tiny_thinker(folder: Path) -> Path:
    """A tiny qwen3_5 (a hybrid) with an MTP head, whose chat template has reasoning and tools."""
    model = write_checkpoint(folder, "qwen3_5", max_position_embeddings=CONTEXT)
    write_tokenizer(folder, THINKING_TOKENS, THINKING_TEMPLATE)
    language_model = getattr(model, "language_model", model)
    block = dict(tree_flatten(language_model.layers[ATTENTION_LAYER].parameters()))
    keys = mx.random.split(mx.random.key(7), 2)
    head = {
        "mtp.fc.weight": mx.random.normal((HIDDEN_SIZE, 2 * HIDDEN_SIZE), key=keys[0]) / 8,
        "mtp.pre_fc_norm_embedding.weight": mx.ones(HIDDEN_SIZE),
        "mtp.pre_fc_norm_hidden.weight": mx.ones(HIDDEN_SIZE),
        "mtp.norm.weight": 1 + 0.1 * mx.random.normal((HIDDEN_SIZE,), key=keys[1]),
        **{f"mtp.layers.0.{name}": array for name, array in block.items()},
    }
    mx.save_safetensors(str(folder / "mtp.safetensors"), head, {"format": "mlx"})
    return folder


def tiny_vision(folder: Path, family: str) -> Path:
    write_vision_checkpoint(folder, family)
    return folder


def own_model(name: str) -> str:
    """The name, once the model is in the cache. The test skips where the model cannot be had."""
    with redirect_stderr(io.StringIO()) as errors:
        exit_status = main(["models", "pull", name])
    if exit_status != 0:
        pytest.skip(f"the default model cannot be fetched here: {errors.getvalue()}")
    return name
