"""Loads a model from a folder, a GGUF file or a name: files, family check, dtype, tokenizer, vision encoder.

Uses mlx-lm's own loader and unmodified model definitions. Must not know the engine.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from outrider.config import DTYPES, GenerationConfigSource
from outrider.models import groups_of_16
from outrider.models.dtypes import settle_dtype
from outrider.models.errors import ModelUnavailable
from outrider.models.families import check_supported
from outrider.models.files import generation_config as generation_files
from outrider.models.files import hub
from outrider.models.files.eos_tokens import eos_ids
from outrider.models.files.named import NAMED, make_ready, named_model
from outrider.models.gguf import convert as gguf
from outrider.models.heads.layouts import recognise
from outrider.models.part_reads import RowNumbers, stored_tensors
from outrider.models.quantization_check import check_quantization, check_tensors
from outrider.models.sharding import shard
from outrider.models.trunk import Trunk
from outrider.models.vision.encoder import LoadedVision, has_extra, has_vision_weights, load_vision
from outrider.models.vision.families import VisionFamily, vision_family, why_text_only
from outrider.models.vision.mrope import MRopeSections
from outrider.models.vision.text_model import mrope_sections, text_classes
from outrider.request import NO_DEFAULTS, SamplingDefaults

log = logging.getLogger(__name__)

DEFAULT_CONTEXT = 8192  # tokens, if the config names no limit; chosen by hand
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_context_length", "seq_length")
UNPACKED_LATER = (None, "awq", "gptq", "bitnet")  # formats whose tensors are not MLX's after `sanitize`
PROJECTION = re.compile(r"^(?:language_model\.)?lm_head\.")
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*tiktoken*")
READ_BYTES = 256 << 20  # of weights that are read at once; chosen by hand: 0.2 s from an SSD


class ModelLoadError(ModelUnavailable):
    """The model could not be loaded. The message names the file and the reason."""


@dataclass(frozen=True)
class LoadedModel:
    """The parts of a checkpoint that the engine needs."""

    path: Path
    family: str
    trunk: Trunk
    tokenizer: Any  # mlx_lm.tokenizer_utils.TokenizerWrapper
    config: dict[str, Any]
    eos_ids: frozenset[int]
    vision: LoadedVision | None = None  # None: the model reads no images
    no_images_reason: str | None = None  # why a vision model reads no images
    sampling: SamplingDefaults = NO_DEFAULTS  # from its generation_config.json


def load(
    model: str | Path,
    dtype: str = "auto",
    revision: str | None = None,
    generation_config: GenerationConfigSource = "none",
    needs_logits: bool = True,
    group: mx.distributed.Group | None = None,
    reads_images: bool = True,
    check_wanted: Callable[[], None] = lambda: None,
) -> LoadedModel:
    """`dtype` is one of DTYPES. "auto": float32 on the CPU, elsewhere the dtype of the checkpoint.

    `revision`: commit, tag or branch of a Hugging Face id. `generation_config`: "auto" reads the sampling
    values in generation_config.json. `needs_logits` False: for embeddings, which need no output projection.
    `group`: load this rank's part of the model only. `reads_images` False: of a vision model, load the
    language model only. `check_wanted`: called after each part of the weights.
    """
    if dtype not in DTYPES:
        raise ModelLoadError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}.")
    path = find_folder(model, revision)
    if path.parent.name == "snapshots":  # a folder of the Hugging Face cache has the name of its commit
        log.info("%s: commit %s", model, path.name)
    config = read_config(path)
    sampling = _sampling(path, generation_config)
    vision = vision_family(config)
    family = _family(config, vision)
    check_supported(family)
    stored: dict[str, mx.array] | None = None if group is None else {}
    network, mrope = _load_network(path, config, vision, needs_logits, stored)
    if group is not None and stored is not None:
        _divide(path, network, stored, group, family, check_wanted)
    _read_weights(path, network, check_wanted)
    settle_dtype(network, dtype)
    tokenizer = _load_tokenizer(path)
    trunk = _new_trunk(network, config, vision, mrope)
    loaded_vision: LoadedVision | None = None
    no_images_reason: str | None = None
    # Rank 0 sends the embeddings of images to the others.
    if reads_images and (group is None or group.rank() == 0):
        loaded_vision, no_images_reason = _load_vision(path, vision, config, trunk)
    ends = eos_ids(tokenizer, config)
    return LoadedModel(
        path, family, trunk, tokenizer, config, ends, loaded_vision, no_images_reason, sampling
    )


def _sampling(path: Path, source: GenerationConfigSource) -> SamplingDefaults:
    if source == "auto":
        return generation_files.sampling_defaults(path)
    generation_files.read(path)  # mlx-lm crashes on a file that is no JSON object
    return NO_DEFAULTS


def trunk_on_disk(folder: Path) -> Trunk:
    """The trunk of a model folder as it is stored. A weight is read from the disk when it is first used."""
    config = read_config(folder)
    vision = vision_family(config)
    check_supported(_family(config, vision))
    network, mrope = _load_network(folder, config, vision)
    return _new_trunk(network, config, vision, mrope)


def _new_trunk(
    network: nn.Module, config: dict[str, Any], vision: VisionFamily | None, mrope: MRopeSections | None
) -> Trunk:
    vision_config = config["vision_config"] if vision is not None else {}
    num_deepstack = len(vision_config.get("deepstack_visual_indexes") or ())
    return Trunk(network, max_context(config), mrope, num_deepstack)


def local_folder(model: str | Path, revision: str | None = None) -> Path | None:
    """A model's folder, if nothing has to be downloaded or converted for it."""
    path = Path(model).expanduser()
    if path.exists():
        return path if path.is_dir() else None
    if (own := named_model(model)) is not None:
        return own.folder() if own.folder().is_dir() else None
    is_id = str(model).count("/") == 1 and not str(model).startswith((".", "/", "~"))
    return hub.downloaded(str(model), revision) if is_id else None


def find_folder(model: str | Path, revision: str | None = None) -> Path:
    """Return a model's local folder. Convert a GGUF file; download a named model or a Hugging Face id."""
    path = Path(model).expanduser()
    if revision is not None and (path.exists() or named_model(model) is not None):
        raise ModelLoadError(f"--revision {revision} needs a Hugging Face id (owner/name), not {model}.")
    if path.is_dir():
        return path
    if path.is_file() and path.suffix == ".gguf":
        return gguf.ensure_converted(path)
    if path.exists():
        raise ModelLoadError(
            f"{path} is a file, but a model is a .gguf file or a folder with config.json and *.safetensors."
        )
    if (own := named_model(model)) is not None:
        return make_ready(own)
    if str(model).count("/") != 1 or str(model).startswith((".", "/", "~")):
        raise ModelLoadError(
            f"{model}: no such folder, and not a Hugging Face id of the form owner/name. "
            f"Names without an owner: {', '.join(named.NAME for named in NAMED)}."
        )
    try:
        return hub.download(str(model), revision)
    except hub.DownloadFailed as error:
        raise ModelLoadError(str(error)) from error


def read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise ModelLoadError(f"{file} is missing: this is not a model folder.") from None
    except (ValueError, OSError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelLoadError(f"{file} has no model_type.")
    return config


def _family(config: dict[str, Any], vision: VisionFamily | None) -> str:
    """Return mlx-lm's module name for this checkpoint."""
    from mlx_lm.utils import MODEL_REMAPPING

    if vision is not None and vision.images == "tiles":  # mlx-lm does not know these model types
        return vision.text
    return str(MODEL_REMAPPING.get(config["model_type"], config["model_type"]))


def _load_network(
    path: Path,
    config: dict[str, Any],
    vision: VisionFamily | None,
    needs_logits: bool = True,
    stored: dict[str, mx.array] | None = None,
) -> tuple[nn.Module, MRopeSections | None]:
    """The text model, or the language part of a vision checkpoint, and its mrope sections.

    A weight is read from the disk when it is first used. `stored` gets the tensors of the weight files.
    """
    from mlx_lm.utils import _get_classes, load_model

    get_classes = _get_classes if vision is None else text_classes(vision, path) or _get_classes
    try:
        network, _ = load_model(
            path,
            lazy=True,
            get_model_classes=lambda config: _with_checks(
                config, *get_classes(config), needs_logits=needs_logits, stored=stored
            ),
            trust_remote_code=False,
        )
        mrope = None if vision is None else mrope_sections(vision, config)
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path} has no weights (model*.safetensors).") from error
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise _load_error(path, error) from error
    return network, mrope


def _divide(
    path: Path,
    network: nn.Module,
    stored: dict[str, mx.array],
    group: mx.distributed.Group,
    family: str,
    check_wanted: Callable[[], None],
) -> None:
    """Keep this rank's part of the network, and read its rows of the weight files."""
    try:
        numbers = RowNumbers(network, stored_tensors(path, stored), group.size())
        stored.clear()  # a tensor of which a part is read would stay in memory
        shard(network, group, family)
        numbers.read(network, check_wanted)
    except (OSError, ValueError) as error:
        raise _load_error(path, error) from error


def _read_weights(path: Path, network: nn.Module, check_wanted: Callable[[], None]) -> None:
    """Read the weights from the disk, a part at a time."""
    part: list[mx.array] = []
    for _, array in cast(list[tuple[str, mx.array]], tree_flatten(network.parameters())):
        part.append(array)
        if sum(each.nbytes for each in part) >= READ_BYTES:
            _evaluate(path, part)
            part = []
            check_wanted()
    _evaluate(path, part)


def _evaluate(path: Path, arrays: list[mx.array]) -> None:
    try:
        mx.eval(arrays)
    except (RuntimeError, ValueError) as error:
        raise _load_error(path, error) from error


def _load_error(path: Path, error: Exception) -> ModelLoadError:
    where = _unreadable_file(path) or path
    reason = f"there is no {error}" if isinstance(error, KeyError) else error
    return ModelLoadError(f"the model in {where} cannot be loaded: {reason}")


def _with_checks(
    config: dict[str, Any],
    kind: type[nn.Module],
    args: type,
    *,
    needs_logits: bool,
    stored: dict[str, mx.array] | None,
) -> tuple[type[nn.Module], type]:
    """Return the model's classes with a `sanitize` that drops an MTP head and checks quantised tensors.

    Most of mlx-lm's families drop the weights of a head themselves. The others would refuse the checkpoint.
    """

    def sanitize(self: nn.Module, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        if stored is not None:
            stored.update(weights)
        weights = weights if needs_logits else _completed(self, weights)
        head = recognise(weights, config)
        if head is not None:
            weights = {name: array for name, array in weights.items() if name not in head}
        arranged: dict[str, mx.array] = kind.sanitize(self, weights) if hasattr(kind, "sanitize") else weights
        arranged = _without_tied_copy(self, arranged, config)
        if groups_of_16.CONFIG_KEY in config:
            arranged = groups_of_16.load_groups_of_16(self, arranged, config[groups_of_16.CONFIG_KEY])
        if config.get("quantization") is not None:
            check_quantization(self, arranged, config["quantization"])
        elif _method(config.get("quantization_config")) not in UNPACKED_LATER:
            check_tensors(self, arranged)
        return arranged

    return type(kind.__name__, (kind,), {"sanitize": sanitize, "__module__": kind.__module__}), args


def _completed(network: nn.Module, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """The weights of an embedding model under the names that mlx-lm expects.

    Qwen3-Embedding, for example, is published without the name of its inner stack and without an output
    projection, which nobody uses: the embedding takes the place of the projection.
    """
    if "embed_tokens.weight" in weights:
        weights = {f"model.{name}": array for name, array in weights.items()}
    if "lm_head" not in network or "lm_head.weight" in weights:
        return weights
    embedding = "model.embed_tokens."
    rows = {name.removeprefix(embedding): a for name, a in weights.items() if name.startswith(embedding)}
    return weights | {f"lm_head.{name}": array for name, array in rows.items()}


def _without_tied_copy(
    model: nn.Module, weights: dict[str, mx.array], config: dict[str, Any]
) -> dict[str, mx.array]:
    """Drop the copy of the embeddings that some files with tied embeddings have for the output projection.

    mlx-lm drops it in text models only.
    """
    text = config.get("text_config") or config
    has_projection = any(path.endswith("lm_head") for path, _ in model.named_modules())
    if has_projection or not text.get("tie_word_embeddings"):
        return weights
    return {name: array for name, array in weights.items() if not PROJECTION.match(name)}


def _method(quantization_config: object) -> object:
    return quantization_config.get("quant_method") if isinstance(quantization_config, dict) else None


def _load_vision(
    path: Path, vision: VisionFamily | None, config: dict[str, Any], trunk: Trunk
) -> tuple[LoadedVision | None, str | None]:
    """Return the vision encoder, or the reason why a vision model reads no images."""
    reason = why_text_only(config)
    if vision is not None and not has_vision_weights(path):
        reason = "images are not read: the checkpoint has no vision encoder"
    elif vision is not None and not has_extra():
        reason = "images are not read: install outrider[vision]"
    if reason is not None:
        log.warning("%s is a vision model and will read text only: %s", path.name, reason)
    if vision is None or reason is not None:
        return None, reason
    return load_vision(path, vision, config, trunk.hidden_size, trunk.dtype), None


def _unreadable_file(path: Path) -> Path | None:
    """Return the first file that is cut short or not a safetensors file, None if all files are sound."""
    for file in sorted(path.glob("model*.safetensors")):
        try:
            mx.load(str(file))  # reads the header only
        except RuntimeError:
            return file
    return None


def _load_tokenizer(path: Path) -> Any:
    from mlx_lm.utils import load_config, load_tokenizer

    if not any(found for pattern in TOKENIZER_FILES for found in path.glob(pattern)):
        raise ModelLoadError(f"{path} has no tokenizer (tokenizer.json or tokenizer.model).")
    try:
        # Without this, transformers asks on the terminal whether to run code from the folder.
        settings = {"trust_remote_code": False}
        return load_tokenizer(path, settings, load_config(path).get("eos_token_id"))
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise ModelLoadError(f"the tokenizer in {path} cannot be loaded: {error}") from error


def max_context(config: dict[str, Any]) -> int:
    """Return the context limit. A model with learned positions has no position past the limit."""
    limits = (part.get(key) for part in (config, config.get("text_config") or {}) for key in CONTEXT_KEYS)
    return int(next((limit for limit in limits if limit), DEFAULT_CONTEXT))
