"""An independent reader of GGUF files in plain NumPy: container, dequantisation and forward pass.

Shares nothing with the code under test. Weights are used as the file orders them: llama's q and k rows
are left interleaved and rope turns neighbouring pairs.
"""

import struct
from pathlib import Path

import numpy as np

Array = np.ndarray


def read(path: Path) -> tuple[dict, dict[str, Array]]:
    """Metadata, and every tensor as float32."""
    data = Path(path).read_bytes()
    at = 4
    assert data[:4] == b"GGUF"

    def take(code: str):
        nonlocal at
        (value,) = struct.unpack_from("<" + code, data, at)
        at += struct.calcsize("<" + code)
        return value

    def text() -> str:
        nonlocal at
        length = take("Q")
        at += length
        return data[at - length : at].decode()

    def value(kind: int):
        if kind == 8:
            return text()
        if kind == 9:
            inner, length = take("I"), take("Q")
            return [value(inner) for _ in range(length)]
        return take(
            {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}[kind]
        )

    assert take("I") in (2, 3)
    num_tensors, num_entries = take("Q"), take("Q")
    metadata = {}
    for _ in range(num_entries):
        key = text()
        metadata[key] = value(take("I"))
    infos = []
    for _ in range(num_tensors):
        name = text()
        shape = [take("Q") for _ in range(take("I"))][::-1]
        infos.append((name, shape, take("I"), take("Q")))
    start = -(-at // 32) * 32
    tensors = {}
    for name, shape, kind, offset in infos:
        size = int(np.prod(shape)) // BLOCKS[kind][0] * BLOCKS[kind][1]
        raw = np.frombuffer(data, np.uint8, size, start + offset)
        tensors[name] = DEQUANTISE[kind](raw.reshape(-1, BLOCKS[kind][1])).astype(np.float32).reshape(shape)
    return metadata, tensors


def _half(raw: Array) -> Array:
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _nibbles(raw: Array) -> Array:
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _q4_0(raw: Array) -> Array:
    return _half(raw[:, :2]) * (_nibbles(raw[:, 2:]).astype(np.float32) - 8)


def _q4_1(raw: Array) -> Array:
    return _half(raw[:, :2]) * _nibbles(raw[:, 4:]) + _half(raw[:, 2:4])


def _q8_0(raw: Array) -> Array:
    return _half(raw[:, :2]) * raw[:, 2:].view(np.int8)


def _bf16(raw: Array) -> Array:
    return (raw.reshape(-1).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _q4_k(raw: Array) -> Array:
    d, dmin, packed = _half(raw[:, :2]), _half(raw[:, 2:4]), raw[:, 4:16]
    low, mid, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=-1)
    least = np.concatenate([mid & 63, (high >> 4) | ((mid >> 6) << 4)], axis=-1)
    values = _nibbles(raw[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32).astype(np.float32)
    return values * (d * scale)[..., None] - (dmin * least)[..., None]


def _q2_k(raw: Array) -> Array:
    """One weight at a time: two bits of byte i % 32 of its half, scale and minimum of its 16."""
    out = np.empty((len(raw), 256), np.float32)
    d, dmin = _half(raw[:, 80:82])[:, 0], _half(raw[:, 82:84])[:, 0]
    for i in range(256):
        code = raw[:, 16 + i // 128 * 32 + i % 32] >> (i % 128 // 32 * 2) & 3
        packed = raw[:, i // 16]
        out[:, i] = d * (packed & 15) * code - dmin * (packed >> 4)
    return out


def _q3_k(raw: Array) -> Array:
    """One weight at a time: two bits as in Q2_K, a third bit that adds 4, minus 4; a 6-bit scale minus 32."""
    out = np.empty((len(raw), 256), np.float32)
    packed = raw[:, 96:108].astype(int)
    for i in range(256):
        low = raw[:, 32 + i // 128 * 32 + i % 32] >> (i % 128 // 32 * 2) & 3
        third = raw[:, i % 32] >> (i // 32) & 1
        group = i // 16
        scale = (packed[:, group % 8] >> (4 if group >= 8 else 0) & 15) - 32
        scale = scale + 16 * (packed[:, 8 + group % 4] >> (group // 4 * 2) & 3)
        out[:, i] = _half(raw[:, 108:110])[:, 0] * scale * (low + 4.0 * third - 4)
    return out


def _q6_k(raw: Array) -> Array:
    low, high = raw[:, :128].reshape(-1, 2, 64), raw[:, 128:192].reshape(-1, 2, 1, 32)
    low = _nibbles(low).reshape(-1, 2, 4, 32)
    high = (high >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)) & 3
    values = (low | (high << 4)).reshape(-1, 16, 16).astype(np.float32) - 32
    return values * (_half(raw[:, 208:210]) * raw[:, 192:208].view(np.int8))[..., None]


def _q5(raw: Array, header: int, zero: int) -> Array:
    """Decode one weight at a time by the definition: nibble i or i - 16, plus bit i of the 32 fifth bits."""
    out = np.empty((len(raw), 32), np.float32)
    high = np.ascontiguousarray(raw[:, header : header + 4]).view(np.uint32)[:, 0]
    for i in range(32):
        nibble = raw[:, header + 4 + i % 16] >> (4 if i >= 16 else 0) & 15
        out[:, i] = nibble + 16.0 * (high >> i & 1) - zero
    return out * _half(raw[:, :2])


def _q5_k(raw: Array) -> Array:
    """A Q4_K block with 32 bytes of fifth bits before the nibbles. A set bit adds 16 * scale."""
    base = _q4_k(np.concatenate([raw[:, :16], raw[:, 48:]], axis=-1))
    ones = np.zeros((len(raw), 144), np.uint8)
    ones[:, [0, 1, *range(4, 16)]] = raw[:, [0, 1, *range(4, 16)]]
    ones[:, 16:] = 0x11
    scale = _q4_k(ones)  # minimum 0, code 1 everywhere: the scale of each weight
    bit = np.stack([raw[:, 16:48] >> group & 1 for group in range(8)], axis=1)
    return base + 16 * scale * bit


BLOCKS = {
    0: (1, 4), 1: (1, 2), 30: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210),
}  # fmt: skip
DEQUANTISE = {
    0: lambda raw: raw.reshape(-1).view(np.float32),
    1: lambda raw: _half(raw.reshape(-1)),
    30: _bf16,
    2: _q4_0,
    3: _q4_1,
    6: lambda raw: _q5(raw, 2, 16),
    7: lambda raw: _q5(raw, 4, 0) + _half(raw[:, 2:4]),
    8: _q8_0,
    10: _q2_k,
    11: _q3_k,
    12: _q4_k,
    13: _q5_k,
    14: _q6_k,
}


def logits(metadata: dict, tensors: dict[str, Array], ids: list[int]) -> Array:
    """`[len(ids), vocabulary]` of a llama, qwen2 or qwen3 model."""
    arch = metadata["general.architecture"]
    eps = metadata[f"{arch}.attention.layer_norm_rms_epsilon"]
    x = tensors["token_embd.weight"][ids]
    for index in range(metadata[f"{arch}.block_count"]):
        layer = {
            name.split(".", 2)[2]: array
            for name, array in tensors.items()
            if name.startswith(f"blk.{index}.")
        }
        x = x + _attention(metadata, arch, layer, _norm(x, layer["attn_norm.weight"], eps), eps)
        x = x + _mlp(layer, _norm(x, layer["ffn_norm.weight"], eps))
    x = _norm(x, tensors["output_norm.weight"], eps)
    return x @ tensors.get("output.weight", tensors["token_embd.weight"]).T


def _norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + eps).astype(np.float32) * weight


def _linear(layer: dict[str, Array], name: str, x: Array) -> Array:
    return x @ layer[f"{name}.weight"].T + layer.get(f"{name}.bias", np.float32(0))


def _mlp(layer: dict[str, Array], x: Array) -> Array:
    gate = _linear(layer, "ffn_gate", x)
    return _linear(layer, "ffn_down", gate / (1 + np.exp(-gate)) * _linear(layer, "ffn_up", x))


def _attention(metadata: dict, arch: str, layer: dict[str, Array], x: Array, eps: float) -> Array:
    num_heads = metadata[f"{arch}.attention.head_count"]
    num_kv_heads = metadata[f"{arch}.attention.head_count_kv"]
    length = len(x)
    q = _linear(layer, "attn_q", x).reshape(length, num_heads, -1)
    k = _linear(layer, "attn_k", x).reshape(length, num_kv_heads, -1)
    v = _linear(layer, "attn_v", x).reshape(length, num_kv_heads, -1)
    if arch == "qwen3":
        q, k = _norm(q, layer["attn_q_norm.weight"], eps), _norm(k, layer["attn_k_norm.weight"], eps)
    base = metadata[f"{arch}.rope.freq_base"]
    q, k = _rope(q, base, arch == "llama"), _rope(k, base, arch == "llama")
    group = num_heads // num_kv_heads
    out = np.empty((length, num_heads, v.shape[-1]), np.float32)
    for head in range(num_heads):
        scores = q[:, head] @ k[:, head // group].T / np.sqrt(np.float32(q.shape[-1]))
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, head // group]
    return _linear(layer, "attn_output", out.reshape(length, -1))


def _rope(x: Array, base: float, interleaved: bool) -> Array:
    """x: [length, heads, dim]. Turns the pairs (0, 1), (2, 3), ... if interleaved, else (0, dim/2), ..."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None, None] * base ** (-np.arange(half) / half)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = (first * cos - second * sin, first * sin + second * cos)
    return np.stack(turned, -1).reshape(x.shape) if interleaved else np.concatenate(turned, -1)
