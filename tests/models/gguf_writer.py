"""Writes small GGUF files: a container writer, random quantised blocks, and tiny random models."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf_reference import BLOCKS

TYPE_IDS = {
    "F32": 0, "F16": 1, "BF16": 30, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8,
    "Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14,
}  # fmt: skip
# The float16 factors of a block: (first byte, number of factors).
FACTORS = {
    "Q4_0": (0, 1), "Q4_1": (0, 2), "Q5_0": (0, 1), "Q5_1": (0, 2), "Q8_0": (0, 1),
    "Q2_K": (80, 2), "Q3_K": (108, 1), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208, 1),
}  # fmt: skip
SPREAD = {"Q8_0": 2e-3, "Q2_K": 2e-3, "Q3_K": 5e-4, "Q4_K": 2e-4, "Q5_K": 1e-4, "Q6_K": 3e-5}


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    type_id: int
    data: bytes


@dataclass
class File:
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)

    def write(self, path: Path) -> Path:
        path.write_bytes(self.to_bytes())
        return path

    def to_bytes(self) -> bytes:
        head = b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self.metadata))
        head += b"".join(_text(key) + _value(value) for key, value in self.metadata.items())
        body = b""
        for tensor in self.tensors:
            sizes = b"".join(struct.pack("<Q", size) for size in reversed(tensor.shape))
            head += _text(tensor.name) + struct.pack("<I", len(tensor.shape)) + sizes
            head += struct.pack("<IQ", tensor.type_id, len(body))
            body += _padded(tensor.data)
        return _padded(head) + body


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 32)


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    kind, payload = _typed(value)
    return struct.pack("<I", kind) + payload


def _typed(value: Any) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, _text(value)
    items = [_typed(item) for item in value]
    kind = items[0][0] if items else 4
    return 9, struct.pack("<IQ", kind, len(items)) + b"".join(payload for _, payload in items)


def plain(name: str, array: np.ndarray, kind: str = "F32") -> Tensor:
    array = np.asarray(array, np.float32)
    if kind == "BF16":
        data = (array.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    else:
        data = array.astype({"F32": np.float32, "F16": np.float16}[kind]).tobytes()
    return Tensor(name, array.shape, TYPE_IDS[kind], data)


def random_blocks(name: str, shape: tuple[int, ...], kind: str, rng: np.random.Generator) -> Tensor:
    """A quantised tensor of random codes, with factors that make weights well below 1."""
    block, block_bytes = BLOCKS[TYPE_IDS[kind]]
    raw = rng.integers(0, 256, size=(int(np.prod(shape)) // block, block_bytes), dtype=np.uint8)
    at, count = FACTORS[kind]
    factors = (rng.normal(size=(len(raw), count)) * SPREAD.get(kind, 0.02)).astype(np.float16)
    raw[:, at : at + 2 * count] = factors.view(np.uint8)
    return Tensor(name, shape, TYPE_IDS[kind], raw.tobytes())


@dataclass(frozen=True)
class TinyModel:
    """The shape of a random model."""

    architecture: str = "llama"
    hidden: int = 64
    inner: int = 96
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    num_layers: int = 2
    vocab: int = 320
    tied: bool = True

    def metadata(self) -> dict[str, Any]:
        values: Mapping[str, Any] = {
            "embedding_length": self.hidden,
            "feed_forward_length": self.inner,
            "block_count": self.num_layers,
            "context_length": 256,
            "attention.head_count": self.num_heads,
            "attention.head_count_kv": self.num_kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 10000.0,
        }
        named = {f"{self.architecture}.{key}": value for key, value in values.items()}
        return {"general.architecture": self.architecture, **named, **tiny_tokenizer(self.vocab)}

    def matrices(self) -> dict[str, tuple[int, int]]:
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes = {"token_embd.weight": (self.vocab, self.hidden)}
        if not self.tied:
            shapes["output.weight"] = (self.vocab, self.hidden)
        for index in range(self.num_layers):
            shapes |= {
                f"blk.{index}.attn_q.weight": (queries, self.hidden),
                f"blk.{index}.attn_k.weight": (keys, self.hidden),
                f"blk.{index}.attn_v.weight": (keys, self.hidden),
                f"blk.{index}.attn_output.weight": (self.hidden, queries),
                f"blk.{index}.ffn_gate.weight": (self.inner, self.hidden),
                f"blk.{index}.ffn_up.weight": (self.inner, self.hidden),
                f"blk.{index}.ffn_down.weight": (self.hidden, self.inner),
            }
        return shapes

    def vectors(self) -> dict[str, int]:
        lengths = {"output_norm.weight": self.hidden}
        for index in range(self.num_layers):
            lengths |= {
                f"blk.{index}.attn_norm.weight": self.hidden,
                f"blk.{index}.ffn_norm.weight": self.hidden,
            }
            if self.architecture == "qwen3":
                lengths |= {f"blk.{index}.attn_{part}_norm.weight": self.head_dim for part in "qk"}
            if self.architecture == "qwen2":
                lengths[f"blk.{index}.attn_q.bias"] = self.num_heads * self.head_dim
                lengths |= {
                    f"blk.{index}.attn_{part}.bias": self.num_kv_heads * self.head_dim for part in "kv"
                }
        return lengths

    def file(self, *kinds: str, seed: int = 0) -> File:
        """The model as a file. The matrices have the given types in turn."""
        rng = np.random.default_rng(seed)
        tensors = []
        for at, (name, shape) in enumerate(self.matrices().items()):
            kind = kinds[at % len(kinds)]
            if kind in FACTORS:
                tensors.append(random_blocks(name, shape, kind, rng))
            else:
                tensors.append(plain(name, rng.normal(size=shape) * 0.1, kind))
        tensors += [plain(name, 1 + 0.3 * rng.normal(size=size)) for name, size in self.vectors().items()]
        return File(self.metadata(), tensors)


def tiny_tokenizer(vocab: int) -> dict[str, Any]:
    """One token per byte, two control tokens, padding."""
    tokens = ["<|endoftext|>", "<|im_end|>", *byte_letters().values()]
    types = [3, 3] + [1] * 256
    padding = [f"[PAD{index}]" for index in range(vocab - len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens + padding,
        "tokenizer.ggml.token_type": types + [5] * len(padding),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": 1,
    }


def byte_letters() -> dict[int, str]:
    """GPT-2's letter for each byte: the byte if printable, else the next unused character from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + at) for at, byte in enumerate(others)
    }
    return {byte: letters[byte] for byte in range(256)}
