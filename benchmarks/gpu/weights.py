"""Models with random weights, built in the device's memory: each tensor in its dtype, one at a time.

mlx-lm's modules start with lazy float32 arrays. These are replaced before anything is computed, so that at
most one tensor is in memory twice. A quantised model is quantised block by block.
"""

from __future__ import annotations

import copy
import importlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from benchmarks.gpu.shapes import SHAPES
from outrider.models import heads, loader
from outrider.models.files.shipped_head import shipped_head
from outrider.models.heads import LoadedHead
from outrider.models.trunk import Trunk

GROUP_SIZE = 64
BITS = {"4bit": 4, "8bit": 8}
ROUTER_BITS = 8  # of layers that choose experts, as mlx-lm quantises them
MAX_CONTEXT = 4096
SHARPNESS, SLOWNESS = 4.0, 6.0  # of models with a long memory; chosen by hand
DTYPES = ("bf16", *BITS, "f32")  # of random models; one from a folder has its own


@dataclass(frozen=True)
class Subject:
    """A model under test: mlx-lm's object, a trunk around the same object, and a head."""

    name: str
    dtype: str
    model: nn.Module  # for mlx-lm's generators
    trunk: Trunk
    head: LoadedHead

    @property
    def num_parameters(self) -> int:
        """As if nothing were quantised."""
        return count_parameters(self.model)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, without embeddings that are not the output projection."""
        total = _bytes(self.trunk.model)
        return total - (_bytes(self.trunk.embedding) if self._is_untied else 0)

    def bytes_read(self, num_tokens: int) -> int:
        """Bytes of weights that a pass over so many tokens reads: of experts, those that are chosen."""
        return self.weight_bytes - self._unread_expert_bytes(self.trunk.model, num_tokens)

    def head_bytes_read(self, num_tokens: int) -> int:
        return self.head_bytes - sum(
            self._unread_expert_bytes(layer, num_tokens) for layer in self.head.layers
        )

    def _unread_expert_bytes(self, module: nn.Module, num_tokens: int) -> int:
        """As if every token chose its experts at random."""
        config = SHAPES[self.name][1] if self.name in SHAPES else {}
        if "num_experts" not in config:
            return 0
        share_unread = (1 - config["num_experts_per_tok"] / config["num_experts"]) ** num_tokens
        experts = (
            part
            for _, part in module.named_modules()
            if isinstance(part, SwitchLinear | QuantizedSwitchLinear)
        )
        return round(share_unread * sum(map(_bytes, experts)))

    @property
    def projection_bytes(self) -> int:
        """Bytes of the output projection, which every draft reads again."""
        return _bytes(self.trunk.model.lm_head if self._is_untied else self.trunk.embedding)

    @property
    def head_bytes(self) -> int:
        return sum(map(_bytes, self.head.layers))

    @property
    def _is_untied(self) -> bool:
        return isinstance(getattr(self.trunk.model, "lm_head", None), nn.Module)


def random_subject(name: str, dtype: str, seed: int = 0, long_memory: bool = False) -> Subject:
    """A model of one of SHAPES; `dtype` is one of DTYPES.

    `long_memory`: its tokens and drafts depend on all tokens before them. Otherwise the last few decide.
    """
    mx.random.seed(seed)
    family, config = SHAPES[name]
    model = new_model(family, config)
    model.eval()
    kept = mx.float32 if dtype == "f32" else mx.bfloat16
    for block in model.layers:
        _fill(block, kept)
        _quantise(block, dtype)
    _fill(model, kept, done=model.layers)
    _quantise(model, dtype)
    mx.clear_cache()
    trunk = Trunk(model, MAX_CONTEXT)
    head = _random_head(trunk)
    if long_memory:
        for module in (model, *head.layers):
            _lengthen_memory(module)
    return _as_served(Subject(name, dtype, model, trunk, head))


def subject_from(folder: Path) -> Subject:
    """The model of a folder, with the head beside it or the head shipped for it, else a random head."""
    loaded = loader.load(folder)
    file = heads.locate(loaded.path) or shipped_head(loaded.path)
    trunk = loaded.trunk
    head = heads.load_head(file, trunk, None, loaded.config) if file is not None else _random_head(trunk)
    dtype = "bf16" if trunk.dtype == mx.bfloat16 else str(trunk.dtype).removeprefix("mlx.core.")
    return _as_served(Subject("default", dtype, trunk.model, trunk, head))


def _as_served(subject: Subject) -> Subject:
    """With the layers that an engine gives it on this device."""
    subject.trunk.prepare_for_serving()
    subject.head.prepare_for_serving(subject.trunk)
    return subject


def new_model(family: str, config: dict[str, Any]) -> nn.Module:
    """mlx-lm's model, with nothing computed yet."""
    arch = importlib.import_module(f"mlx_lm.models.{family}")
    own = copy.deepcopy(config)
    if family.startswith("qwen3_5"):
        own = {"model_type": family, "text_config": own}
    model: nn.Module = arch.Model(arch.ModelArgs.from_dict(own))
    return model


def _random_head(trunk: Trunk) -> LoadedHead:
    head = heads.new_head(trunk)
    _fill(head, trunk.dtype)
    return LoadedHead((head,), "random weights")


def _fill(module: nn.Module, dtype: mx.Dtype, done: list[nn.Module] | None = None) -> None:
    """Gives random values to all parameters, except those of the modules in `done`."""
    ready = {id(array) for part in done or () for _, array in tree_flatten(part.parameters())}
    for name, array in tree_flatten(module.parameters()):
        if id(array) in ready or not mx.issubdtype(array.dtype, mx.floating):
            continue
        made = _random(name, array, dtype)
        mx.eval(made)
        module.update(tree_unflatten([(name, made)]), strict=False)


def _random(name: str, array: mx.array, dtype: mx.Dtype) -> mx.array:
    """Scaled so that hidden states keep about the same size from layer to layer."""
    if name.endswith("A_log"):
        return mx.log(mx.random.uniform(0.5, 16.0, array.shape))  # float32, as in the family's checkpoints
    if array.ndim < 2:
        return mx.ones(array.shape, dtype)
    num_inputs = math.prod(array.shape[1:])
    return mx.random.normal(array.shape, dtype, scale=1 / math.sqrt(num_inputs))


def _lengthen_memory(module: nn.Module) -> None:
    """Attention chooses few cells instead of a mean of all, and recurrent states decay slowly."""
    for name, array in tree_flatten(module.parameters()):
        if name.endswith("q_norm.weight"):
            module.update(tree_unflatten([(name, array * SHARPNESS)]), strict=False)
        elif name.endswith("A_log"):
            module.update(tree_unflatten([(name, array - SLOWNESS)]), strict=False)


def _quantise(module: nn.Module, dtype: str) -> None:
    if dtype not in BITS:
        return

    def how(path: str, part: nn.Module) -> bool | dict[str, int]:
        if not hasattr(part, "to_quantized") or part.weight.shape[-1] % GROUP_SIZE:
            return False
        if path.endswith(("mlp.gate", "shared_expert_gate")):
            return {"group_size": GROUP_SIZE, "bits": ROUTER_BITS}
        return True

    nn.quantize(module, GROUP_SIZE, BITS[dtype], class_predicate=how)
    mx.eval(module.parameters())
    mx.clear_cache()


def count_parameters(model: nn.Module) -> int:
    """As if nothing were quantised."""
    return sum(_num_weights(module) for _, module in model.named_modules())


def _num_weights(module: nn.Module) -> int:
    """Weights of the module itself, without its submodules."""
    own = {name: array for name, array in module.items() if isinstance(array, mx.array)}
    bits = getattr(module, "bits", None)
    if bits is None:
        return sum(array.size for array in own.values())
    return own["weight"].size * 32 // bits


def _bytes(module: nn.Module) -> int:
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))
