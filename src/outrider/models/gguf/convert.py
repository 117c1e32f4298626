"""From a GGUF file to an ordinary model folder: config.json, weights, tokenizer, chat template.

Owns the names, the order of rows and the dtypes of the weights. `convert` writes the files;
`ensure_converted` keeps the result in the cache. Must not know how a model is run.

Quantised weights stay quantised (gguf_blocks says how); what cannot be read is refused by name, at once.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from outrider.models.errors import ModelUnavailable, UnreadableGGUF
from outrider.models.files import origin
from outrider.models.files.folders import build_once, models_folder
from outrider.models.gguf import tokenizer as gguf_tokenizer
from outrider.models.gguf.blocks import AFFINE_TYPES, GROUP_SIZE, READ_TYPES, read_tensor
from outrider.models.gguf.config import Family, family_of, model_config
from outrider.models.gguf.header import Header, read_header

ROPE_FACTORS = "rope_freqs.weight"

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
    """The cached model folder of a GGUF file, made on first use and again when the file has changed."""
    path = path.expanduser().resolve()
    try:
        stat = path.stat()
    except OSError as error:
        raise UnreadableGGUF(f"{path} cannot be opened: {error.strerror}.") from error
    key = hashlib.sha256(f"{path}|{stat.st_size}|{stat.st_mtime_ns}".encode()).hexdigest()[:12]

    def build(folder: Path) -> None:
        convert(path, folder)
        origin.write(folder, origin.Origin(name=path.stem, source=str(path), license=license_of(path)))

    return build_once(models_folder() / f"{path.stem}-{key}", build, origin.is_intact)


def convert(path: Path, folder: Path) -> None:
    """Write the model of the GGUF file `path` into the existing `folder`.

    Raises UnreadableGGUF for a file that is damaged or not supported, before anything is written.
    """
    header = read_header(path)
    check_tensors(header)
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


def license_of(path: Path) -> str:
    return str(read_header(path).metadata.get("general.license", "unknown"))


def check_tensors(header: Header) -> None:
    """Refuse a file with tensors that are missing, unknown or stored in a way that is not read here."""
    expected = _expected_names(header)
    if missing := sorted(expected - header.tensors.keys()):
        raise UnreadableGGUF(f"The file lacks tensors of its architecture: {_listed(missing)}.")
    if unknown := sorted(header.tensors.keys() - expected - {ROPE_FACTORS}):
        raise UnreadableGGUF(f"The file has tensors that this architecture does not use: {_listed(unknown)}.")
    unread = Counter(each.type_name for each in header.tensors.values() if each.type_name not in READ_TYPES)
    if unread:
        kinds = ", ".join(f"{kind} ({count} tensors)" for kind, count in sorted(unread.items()))
        raise UnreadableGGUF(
            f"The file stores weights as {kinds}, which is not supported. These are: "
            f"{', '.join(READ_TYPES)}. Take another quantisation of the model."
        )


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
    """Every tensor; a quantised one as its three parts NAME.weight, NAME.scales and NAME.biases."""
    tensors: Weights = {}
    for info in header.tensors.values():
        stem, _, kind = info.name.rpartition(".")
        for part, array in read_tensor(path, info).items():
            tensors[f"{stem}.{kind if part == 'weight' else part}"] = array
    return tensors


def _rename(tensors: Mapping[str, mx.array], family: Family, config: Mapping[str, Any]) -> Weights:
    renamed = {}
    for name, array in tensors.items():
        stem, _, kind = name.rpartition(".")  # kind: weight, bias; scales, biases of a quantised weight
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
    """Order the rows of each head as rope wants them here.

    in the file:  r0 r(h/2) r1 r(h/2+1) r2 ...     (a rotated pair side by side)
    wanted:       r0 r1 r2 ... r(h/2) r(h/2+1) ... (first halves, then second halves)

    Only whole rows move, so quantised rows and their scales are treated alike.
    """
    pairs = array.reshape(num_heads, -1, 2, *array.shape[1:])
    return mx.contiguous(pairs.swapaxes(1, 2)).reshape(array.shape)


def _settle_dtype(weights: Weights) -> Weights:
    """Give the float32 side tensors (norms, biases) the dtype of the matrices, if that loses nothing at all.

    Otherwise they stay float32. One dtype lets a GPU run the whole model in it.
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
    bits = {
        _module_name(info.name.removesuffix(".weight")): AFFINE_TYPES[info.type_name].bits
        for info in header.tensors.values()
        if info.type_name in AFFINE_TYPES
    }
    if bits:
        config["quantization"] = _quantisation(bits)
    return config


def _quantisation(bits: Mapping[str, int]) -> dict[str, Any]:
    """mlx-lm's entry: the most common width for all, and the modules that differ by name."""
    usual = Counter(bits.values()).most_common(1)[0][0]
    others = {
        name: {"group_size": GROUP_SIZE, "bits": width} for name, width in bits.items() if width != usual
    }
    return {"group_size": GROUP_SIZE, "bits": usual, "mode": "affine", **others}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _save(path: Path, weights: Weights) -> None:
    try:
        mx.save_safetensors(str(path), weights, metadata={"format": "mlx"})
    except RuntimeError as error:  # MLX does not say why: mostly a full disk
        raise ModelUnavailable(f"Cannot write {path}: {error}. Is the disk full?") from error
    _check_length(path, weights.values())


def _check_length(path: Path, arrays: Iterable[mx.array]) -> None:
    if path.stat().st_size <= sum(array.nbytes for array in arrays):
        raise ModelUnavailable(f"{path} was written only in part. Is the disk full?")
