"""Small models with random weights and a random MTP head, in the precision that this device serves with."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from outrider.models import heads, machine
from outrider.models.dtypes import settle_dtype
from outrider.models.heads import LoadedHead
from outrider.models.trunk import Trunk

GROUP_SIZE = 64
MAX_CONTEXT = 4096
COMMON: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": MAX_CONTEXT,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
RECURRENT: dict[str, Any] = {  # three layers with a recurrent state, then one with attention
    "model_type": "qwen3_5_text",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
LARGER: dict[str, Any] = {  # 100 million weights: a step is more than its overhead
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 16384,
}
DENSE: dict[str, Any] = {"model_type": "qwen3", "rope_theta": 1e6}
CONFIGS: dict[str, dict[str, Any]] = {
    "dense": COMMON | DENSE,
    "hybrid": COMMON | RECURRENT,
    "larger": COMMON | DENSE | LARGER,
}


@dataclass(frozen=True)
class RandomModel:
    name: str
    trunk: Trunk
    head: LoadedHead

    @property
    def networks(self) -> tuple[nn.Module, ...]:
        return self.trunk.model, *self.head.layers


def random_model(kind: str, bits: int | None) -> RandomModel:
    """`kind` is one of CONFIGS. `bits`: of quantised weights; None: the weights are not quantised.

    The layers are those that an engine serves with on this device.
    """
    config = CONFIGS[kind]
    family = "qwen3_5" if config["model_type"] == "qwen3_5_text" else config["model_type"]
    module = importlib.import_module(f"mlx_lm.models.{family}")
    given = {"model_type": family, "text_config": config} if family == "qwen3_5" else config
    model: nn.Module = module.Model(module.ModelArgs.from_dict(given))
    model.eval()
    _fill(model, _dtype(), mx.random.key(0))
    if bits is not None:
        nn.quantize(model, GROUP_SIZE, bits, class_predicate=_is_quantized)
    settle_dtype(model, "auto")
    trunk = Trunk(model, MAX_CONTEXT)
    head = heads.new_head(trunk)
    _fill(head, trunk.dtype, mx.random.key(1))
    loaded = LoadedHead((head,), "random weights")
    trunk.prepare_for_serving()
    loaded.prepare_for_serving(trunk)
    precision = str(trunk.dtype).removeprefix("mlx.core.") if bits is None else f"{bits} bits"
    return RandomModel(f"{kind}, {precision}", trunk, loaded)


def _dtype() -> mx.Dtype:
    return mx.float32 if machine.is_cpu() else mx.bfloat16


def _is_quantized(_: str, module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % GROUP_SIZE == 0


def _fill(network: nn.Module, dtype: mx.Dtype, key: mx.array) -> None:
    """Scaled so that hidden states keep about the same size from layer to layer."""
    filled = []
    parameters: Any = tree_flatten(network.parameters())
    for name, array in parameters:
        if not mx.issubdtype(array.dtype, mx.floating):
            continue
        key, own = mx.random.split(key)
        if name.endswith("A_log"):  # float32, as in the family's checkpoints
            made = mx.log(mx.random.uniform(0.5, 16.0, array.shape, key=own))
        elif array.ndim < 2:
            made = mx.ones(array.shape, dtype)
        else:
            scale = 1 / math.sqrt(math.prod(array.shape[1:]))
            made = mx.random.normal(array.shape, dtype, scale=scale, key=own)
        filled.append((name, made))
    network.update(tree_unflatten(filled), strict=False)
    mx.eval(network.parameters())
