"""Converts a GGUF file into an ordinary model folder: config.json, weights, tokenizer, chat template.

Owns the names, the row order and the dtypes of the weights. `convert` writes the files; `ensure_converted`
stores the folder in the cache. Must not know how a model is run.

Weights of most types stay quantised (see blocks.py); the others become float16. A file that cannot be
converted is refused before anything is written.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from outrider.models import groups_of_16
from outrider.models.errors import ModelUnavailable, UnreadableGGUF
from outrider.models.files import origin
from outrider.models.files.folders import build_once, models_folder
from outrider.models.gguf import tokenizer as gguf_tokenizer
from outrider.models.gguf.blocks import (
    GROUP_SIZE,
    PLAIN_TYPES,
    QUANTIZED_TYPES,
    SMALL_GROUP_SIZE,
    QuantizedType,
    quantized_type,
    read_tensor,
    readable_types,
)
from outrider.models.gguf.config import Family, family_of, model_config
from outrider.models.gguf.header import Header, read_header

log = logging.getLogger(__name__)

ROPE_FACTORS = "rope_freqs.weight"
FORMAT_VERSION = 2  # of converted folders: older ones are converted again

MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ATTENTION_BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
MLP_BIASES = ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")

Weights = dict[str, mx.array]


def ensure_converted(path: Path) -> Path:
    """Return the cached model folder of a GGUF file. Convert the file on first use and after a change."""
    path = path.expanduser().resolve()
    try:
        stat = path.stat()
    except OSError as error:
        raise UnreadableGGUF(f"{path} cannot be opened: {error.strerror}.") from error
    key = hashlib.sha256(f"{path}|{stat.st_size}|{stat.st_mtime_ns}|{FORMAT_VERSION}".encode()).hexdigest()[
        :12
    ]

    def build(folder: Path) -> None:
        license = convert(path, folder)
        with open(path, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()  # finds the head of a known file
        origin.write(folder, origin.Origin(path.stem, str(path), license, sha256))

    return build_once(models_folder() / f"{path.stem}-{key}", build, origin.is_intact)


def convert(path: Path, folder: Path) -> str:
    """Write the model of the GGUF file `path` into the existing `folder`. Return the licence the file names.

    Raises UnreadableGGUF for a file that is damaged or not supported, before anything is written.
    """
    header = read_header(path)
    _check_tensors(header)
    tokenizer = gguf_tokenizer.from_header(header)
    tensors = _load(path, header)
    factors = tensors.pop(ROPE_FACTORS, None)
    config = model_config(header, None if factors is None else factors.tolist())  # type: ignore[arg-type]
    weights = _settle_dtype(_rename(tensors, family_of(header), config))
    config |= _storage_config(header, weights) | tokenizer.special_ids()
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", tokenizer.special_ids())
    tokenizer.save(folder, config["max_position_embeddings"])
    _save(folder / "model.safetensors", weights)
    return str(header.metadata.get("general.license", "unknown"))


def _check_tensors(header: Header) -> None:
    """Refuse a file with missing tensors, unknown tensors or types that cannot be read."""
    expected = _expected_names(header)
    if missing := sorted(expected - header.tensors.keys()):
        raise UnreadableGGUF(f"The file lacks tensors of its architecture: {_listed(missing)}.")
    if unknown := sorted(header.tensors.keys() - expected - {ROPE_FACTORS}):
        raise UnreadableGGUF(f"The file has tensors that this architecture does not use: {_listed(unknown)}.")
    types = Counter(info.type_name for info in header.tensors.values())
    if unreadable := types.keys() - set(readable_types()):
        raise UnreadableGGUF(
            f"The file stores weights as {_counted(types, unreadable)}, which Outrider cannot read. Readable "
            f"types: {', '.join(readable_types())}. Use another quantisation of the model."
        )
    if dense := types.keys() - QUANTIZED_TYPES.keys() - PLAIN_TYPES.keys():
        log.warning("MLX has no quantised form of %s: these weights become float16", _counted(types, dense))


def _counted(types: Mapping[str, int], names: set[str]) -> str:
    return ", ".join(f"{name} ({types[name]} tensors)" for name in sorted(names))


def _expected_names(header: Header) -> set[str]:
    family = family_of(header)
    present = header.tensors
    num_layers = model_config(header)["num_hidden_layers"]
    layer = [
        f"{name}.weight"
        for name in LAYER_NAMES
        if family.has_qk_norm or not name.endswith(("q_norm", "k_norm"))
    ]
    if family.has_qkv_bias:
        layer += ATTENTION_BIASES
    if header.architecture == "llama" and "blk.0.attn_q.bias" in present:
        layer += [*ATTENTION_BIASES, "attn_output.bias"]
    if header.architecture == "llama" and "blk.0.ffn_gate.bias" in present:
        layer += MLP_BIASES
    names = {"token_embd.weight", "output_norm.weight"} | ({"output.weight"} & present.keys())
    return names | {f"blk.{index}.{name}" for index in range(num_layers) for name in layer}


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _load(path: Path, header: Header) -> Weights:
    """Read all tensors. A quantised tensor gives NAME.weight, NAME.scales and NAME.biases."""
    tensors: Weights = {}
    for info in header.tensors.values():
        stem, _, kind = info.name.rpartition(".")
        for part, array in read_tensor(path, info).items():
            tensors[f"{stem}.{kind if part == 'weight' else part}"] = array
    return tensors


def _rename(tensors: Mapping[str, mx.array], family: Family, config: Mapping[str, Any]) -> Weights:
    renamed = {}
    for name, array in tensors.items():
        stem, _, kind = name.rpartition(".")  # kind: weight, bias, or scales and biases of a quantised weight
        if family.has_interleaved_rope and stem.endswith(("attn_q", "attn_k")):
            heads = "num_attention_heads" if stem.endswith("attn_q") else "num_key_value_heads"
            array = _halves_from_pairs(array, config[heads])
        renamed[f"{_module_name(stem)}.{kind}"] = array
    return renamed


def _module_name(stem: str) -> str:
    if stem in MODEL_NAMES:
        return MODEL_NAMES[stem]
    _, index, part = stem.split(".")
    return f"model.layers.{index}.{LAYER_NAMES[part]}"


def _halves_from_pairs(array: mx.array, num_heads: int) -> mx.array:
    """Reorder the rows of each head for mlx-lm's rope.

    in the file:  r0 r(h/2) r1 r(h/2+1) r2 ...     (the two rows of a rotated pair side by side)
    for mlx-lm:   r0 r1 r2 ... r(h/2) r(h/2+1) ... (first halves, then second halves)

    Only whole rows move, so the function also serves quantised rows and their scales.
    """
    pairs = array.reshape(num_heads, -1, 2, *array.shape[1:])
    return mx.contiguous(pairs.swapaxes(1, 2)).reshape(array.shape)


def _settle_dtype(weights: Weights) -> Weights:
    """Cast float32 tensors (norms, biases) to the dtype of the matrices, if no value changes.

    With one dtype for all weights a GPU computes the whole model in this dtype.
    """
    dtype = _matrix_dtype(weights)
    cast = {name: array.astype(dtype) for name, array in weights.items() if array.dtype == mx.float32}
    is_exact = all(mx.array_equal(cast[name].astype(mx.float32), weights[name]).item() for name in cast)
    return weights | cast if is_exact else weights


def _matrix_dtype(weights: Weights) -> mx.Dtype:
    embedding = weights.get("model.embed_tokens.scales", weights["model.embed_tokens.weight"])
    return embedding.dtype


def _storage_config(header: Header, weights: Weights) -> dict[str, Any]:
    config: dict[str, Any] = {"torch_dtype": str(_matrix_dtype(weights)).removeprefix("mlx.core.")}
    types = {
        _module_name(info.name.removesuffix(".weight")): kind
        for info in header.tensors.values()
        if (kind := quantized_type(info)) is not None
    }
    formats = {name: _format(kind) for name, kind in types.items() if kind.group_size == GROUP_SIZE}
    if formats:
        config["quantization"] = _quantisation(formats)
    small = {name: kind.bits for name, kind in types.items() if kind.group_size == SMALL_GROUP_SIZE}
    if small:
        config[groups_of_16.CONFIG_KEY] = small
    return config


def _format(kind: QuantizedType) -> tuple[int, str]:
    return kind.bits, kind.mode


def _quantisation(formats: Mapping[str, tuple[int, str]]) -> dict[str, Any]:
    """Return mlx-lm's entry: the most common format, and the modules with another one."""
    usual = Counter(formats.values()).most_common(1)[0][0]
    others = {name: _entry(*own) for name, own in formats.items() if own != usual}
    return {**_entry(*usual), "mode": usual[1], **others}


def _entry(bits: int, mode: str) -> dict[str, Any]:
    """A module's own entry. Without a mode it is affine."""
    return {"group_size": GROUP_SIZE, "bits": bits} | ({} if mode == "affine" else {"mode": mode})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _save(path: Path, weights: Weights) -> None:
    try:
        mx.save_safetensors(str(path), weights, metadata={"format": "mlx"})
    except RuntimeError as error:  # MLX gives no reason; the usual one is a full disk
        raise ModelUnavailable(f"Cannot write {path}: {error}. Is the disk full?") from error
    if path.stat().st_size <= sum(array.nbytes for array in weights.values()):
        raise ModelUnavailable(f"{path} was written only in part. Is the disk full?")
