"""The vision encoder of a checkpoint: mlx-vlm's modules, without the language part.

mlx-vlm's own code computes the embeddings. It adds them to the token embeddings of the language model, which
are zeros here, so the result holds the image features alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from outrider.media.image_reader import ImageReader
from outrider.models.errors import ModelUnavailable
from outrider.models.quantization_check import check_group_size, check_quantization
from outrider.models.vision.families import VisionFamily
from outrider.models.vision.image_processor import GridReader, SpanReader, SquareReader, TileReader
from outrider.models.vision.text_model import IDEFICS_VISION

READERS: Mapping[str, Callable[..., ImageReader]] = {
    "tiles": TileReader,
    "grid": GridReader,
    "spans": SpanReader,
    "squares": SquareReader,
}
LANGUAGE = "language_model"


@dataclass(frozen=True)
class LoadedVision:
    """The parts of a vision checkpoint beside its trunk."""

    reader: ImageReader  # for any thread
    encoder: VisionEncoder  # for the engine's thread only


class VisionEncoder:
    """Turns pixels into embeddings."""

    def __init__(
        self, model: nn.Module, image_token_id: int, hidden_size: int, dtype: mx.Dtype, scale: float = 1.0
    ) -> None:
        """`scale`: the language model multiplies its input by this, the embeddings of images too."""
        self.model = model
        self._scale = scale
        self._image_token_id = image_token_id
        self._dtype = dtype
        object.__setattr__(model, LANGUAGE, _ZeroEmbeddings(hidden_size, dtype))

    def encode(self, inputs: Mapping[str, np.ndarray], num_tokens: int) -> mx.array:
        """The embeddings of one media piece, then its deepstack levels.  [tokens, (1 + levels) x hidden]"""
        arrays = {name: mx.array(array) for name, array in inputs.items()}
        token_ids = mx.full((1, num_tokens), self._image_token_id, mx.int32)
        found = self.model.get_input_embeddings(token_ids, **arrays)
        levels = getattr(found, "deepstack_visual_embeds", None)
        wide = [found.inputs_embeds[0], *(levels if levels is not None else ())]
        joined = mx.concatenate(wide, axis=-1)
        return (joined if self._scale == 1 else joined / self._scale).astype(self._dtype)


class _ZeroEmbeddings:
    """Replaces the language model from which mlx-vlm's code gets token embeddings."""

    embed_scale = 1.0  # of Gemma's token embeddings
    hidden_size_per_layer_input = 0  # Gemma's embeddings for each layer: the trunk has them

    def __init__(self, hidden_size: int, dtype: mx.Dtype) -> None:
        self._hidden_size = hidden_size
        self._dtype = dtype
        self.model = self

    def embed_tokens(self, token_ids: mx.array) -> mx.array:
        return mx.zeros((*token_ids.shape, self._hidden_size), self._dtype)

    def get_rope_index(self, *_: Any, **__: Any) -> tuple[None, None]:
        """No positions: they depend on the prompt, which the vision encoder does not know."""
        return None, None


def load_vision(
    path: Path, family: VisionFamily, config: dict[str, Any], hidden_size: int, dtype: mx.Dtype
) -> LoadedVision:
    """`hidden_size` and `dtype` are the trunk's."""
    package = importlib.import_module(f"mlx_vlm.models.{family.package}")
    processor = _load_processor(path, family)
    try:
        model, settings = _new_model(package, config)
        _load_weights(model, package, family, path, config)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise ModelUnavailable(f"the vision encoder in {path} cannot be loaded: {error}") from error
    _settle_dtype(model, dtype)
    reader = READERS[family.images](processor, config, family)
    image_token_id = int(getattr(settings, "image_token_index", None) or settings.image_token_id)
    if family.images == "squares":
        settings.hidden_size = 1  # mlx-vlm divides by its root; `scale` is what the trunk multiplies by
    scale = _scale(family, hidden_size)
    return LoadedVision(reader, VisionEncoder(model, image_token_id, hidden_size, dtype, scale))


def _scale(family: VisionFamily, hidden_size: int) -> float:
    if family.scales_embeddings is None:
        return 1.0
    return cast(float, mx.array(hidden_size**0.5, getattr(mx, family.scales_embeddings)).item())


def has_extra() -> bool:
    """True if outrider[vision] is installed."""
    return importlib.util.find_spec("mlx_vlm") is not None


def has_vision_weights(path: Path) -> bool:
    """True if a checkpoint holds vision weights. Conversions to text models drop them."""
    names = (str(name) for file in path.glob("model*.safetensors") for name in mx.load(str(file)))
    return any("vision" in name or "visual" in name for name in names)


def _load_processor(path: Path, family: VisionFamily) -> Any:
    """mlx-vlm's own processor, which needs no torch."""
    name = f"mlx_vlm.models.{family.package}.processing_{family.package}"
    if importlib.util.find_spec(name) is None:  # the family uses Qwen3-VL's processor
        name = "mlx_vlm.models.qwen3_vl.processing_qwen3_vl"
    module = importlib.import_module(name)
    others = ("ImageProcessor", "VideoProcessor")
    names = (name for name in module.__all__ if name.endswith("Processor") and not name.endswith(others))
    processor_class = getattr(module, next(names))
    try:
        with _quiet():
            return processor_class.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # transformers raises many types of exceptions
        raise ModelUnavailable(f"the image processor in {path} cannot be loaded: {error}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides transformers' warnings about how mlx-vlm calls it."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)


def _new_model(package: Any, config: dict[str, Any]) -> tuple[nn.Module, Any]:
    """mlx-vlm's model without its language part. MLX is lazy: the dropped weights are never computed."""
    from mlx_vlm.utils import update_module_configs

    config = {name: part for name, part in config.items() if name != "audio_config"}  # no audio is read
    settings = package.ModelConfig.from_dict(config)
    settings = update_module_configs(settings, package, config, ["text", "vision"])
    model: nn.Module = package.Model(settings)
    del model[LANGUAGE]
    return model, settings


def _load_weights(
    model: nn.Module, package: Any, family: VisionFamily, path: Path, config: dict[str, Any]
) -> None:
    weights: dict[str, mx.array] = {}
    for file in sorted(path.glob("model*.safetensors")):
        weights.update(mx.load(str(file)))  # type: ignore[arg-type]
    if family.images == "tiles":  # mlx-vlm may not know the names of the text model's weights
        weights = {name: array for name, array in weights.items() if IDEFICS_VISION.match(name)}
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)
    weights = {name: array for name, array in weights.items() if not name.startswith(f"{LANGUAGE}.")}
    encoder = next(module for _, module in model.named_modules() if isinstance(module, package.VisionModel))
    if hasattr(encoder, "sanitize"):
        weights = encoder.sanitize(weights)
    quantization = config.get("quantization")
    if quantization:
        check_quantization(model, weights, quantization)
        check_group_size(model, weights, quantization)
        nn.quantize(
            model,
            group_size=quantization["group_size"],
            bits=quantization["bits"],
            mode=quantization.get("mode", "affine"),
            class_predicate=lambda name, module: (
                hasattr(module, "to_quantized")
                and f"{name}.scales" in weights
                and quantization.get(name, True)
            ),
        )
    model.eval()
    model.load_weights(list(weights.items()))
    mx.eval(model.parameters())


def _settle_dtype(model: nn.Module, dtype: mx.Dtype) -> None:
    """Cast to the trunk's dtype. On the CPU also dequantise: MLX's quantised matmuls are slow there."""
    from mlx.utils import tree_map
    from mlx_lm.utils import dequantize_model

    is_quantized = any(hasattr(module, "bits") for _, module in model.named_modules())
    if is_quantized and mx.default_device() != mx.Device(mx.cpu):
        return
    if is_quantized:
        dequantize_model(model)

    def cast(array: mx.array) -> mx.array:
        return array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array

    model.update(tree_map(cast, model.parameters()))
    mx.eval(model.parameters())
