"""What products with quantised weights cost on this CPU, format by format, beside float32.

    python -m benchmarks.quantized [--rows 4096] [--size 4096] [--tokens 1 4 16 128] [--rounds 25]
    python -m benchmarks.quantized --experts 8                    experts of gpt-oss in mxfp4
    python -m benchmarks.quantized --latent 20 [--cells 2048]     latent attention with so many heads

A figure is the best of several rounds, in which all formats take turns. --latent compares one layer of
latent attention (GLM-4.7-Flash: 20 heads, DeepSeek-V3: 128) in one form for passes of any width
(cpu/latent_attention.py) with mlx-lm's two forms.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.switch_layers import SwitchLinear

from outrider.cache.placement import Placement
from outrider.cache.ragged_kv import KVSpec, LayerView, RaggedKV
from outrider.cpu import layers as cpu_layers
from outrider.cpu.quantized import interleave_weights, keep_quantized, new_linear

FORMATS = {  # bits, group size, mode
    "affine, 4 bits, groups of 64": (4, 64, "affine"),
    "affine, 4 bits, groups of 32": (4, 32, "affine"),
    "affine, 6 bits, groups of 64": (6, 64, "affine"),
    "affine, 8 bits, groups of 64": (8, 64, "affine"),
    "Q6_K: 6 bits, groups of 16": (6, 16, "affine"),
    "mxfp4": (4, 32, "mxfp4"),
    "nvfp4": (4, 16, "nvfp4"),
    "mxfp8": (8, 32, "mxfp8"),
}
LATENT = {"hidden_size": 2048, "q_lora_rank": 768, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
HEADS = {20: {"qk_nope_head_dim": 192, "v_head_dim": 256}}  # of GLM-4.7-Flash
OTHER_HEADS = {"qk_nope_head_dim": 128, "v_head_dim": 128}  # of DeepSeek-V3
GPT_OSS_SIZE = 2880
WIDTHS = (1, 2, 4, 9, 128, 512)

Call = Callable[[], mx.array]
Name = TypeVar("Name", bound=Hashable)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 128])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--experts", type=int, metavar="NUM", help="measure experts instead")
    parser.add_argument("--latent", type=int, metavar="HEADS", help="measure latent attention instead")
    parser.add_argument("--cells", type=int, default=2048)
    args = parser.parse_args()
    if args.latent:
        _print_latent(args.latent, args.cells, args.rounds)
    elif args.experts:
        _print_experts(args.experts, args.tokens, args.rounds)
    else:
        _print_products(args.rows, args.size, args.tokens, args.rounds)


def _print_products(num_rows: int, size: int, num_tokens: Sequence[int], rounds: int) -> None:
    dense = mx.random.normal((num_rows, size)) * 0.02
    layers = {"float32": nn.Linear(size, num_rows, bias=False)}
    layers["float32"].weight = dense
    layers |= {name: _quantised(dense, *how) for name, how in FORMATS.items()}
    print(f"{num_rows} x {size}, ms" + "".join(f"{n:>9} tok" for n in num_tokens) + "   bits a weight")
    columns = []
    for n in num_tokens:
        x = mx.random.normal((n, size))
        mx.eval(x)
        columns.append(_best({name: partial(layer, x) for name, layer in layers.items()}, rounds))
    for name, layer in layers.items():
        stored = sum(array.nbytes for array in layer.parameters().values()) * 8 / dense.size
        print(f"{name:<30}" + "".join(f"{column[name]:13.2f}" for column in columns) + f"{stored:16.2f}")


def _quantised(dense: mx.array, bits: int, group_size: int, mode: str) -> nn.Module:
    if group_size == 16 and mode == "affine":
        words = mx.random.randint(0, 2**31, (len(dense), dense.shape[1] * bits // 32)).astype(mx.uint32)
        scales = mx.random.normal((len(dense), dense.shape[1] // 16)).astype(mx.float16)
        return new_linear({"weight": words, "scales": scales}, group_size, bits, mode)
    holder = nn.Module()
    plain = nn.Linear(dense.shape[1], dense.shape[0], bias=False)
    plain.weight = dense.astype(mx.float16)
    holder.layer = nn.QuantizedLinear.from_linear(plain, group_size, bits, mode)
    if keep_quantized(holder):
        raise SystemExit("This CPU has no operations for quantised weights: see docs/SERVING.md.")
    interleave_weights(holder)
    layer: nn.Module = holder.layer
    return layer


def _print_experts(num_experts: int, num_tokens: Sequence[int], rounds: int) -> None:
    """One matrix of each expert. Each token has the experts of gpt-oss: four of them."""
    plain = SwitchLinear(GPT_OSS_SIZE, GPT_OSS_SIZE, num_experts, bias=False)
    holder = nn.Module()
    holder.experts = plain.to_quantized(32, 4, "mxfp4")
    if keep_quantized(holder):
        raise SystemExit("This CPU has no operations for quantised weights: see docs/SERVING.md.")
    interleave_weights(holder)
    mx.eval(plain.parameters(), holder.parameters())
    print(f"{num_experts} experts of {GPT_OSS_SIZE} x {GPT_OSS_SIZE}, ms     mxfp4    float32   ratio")
    for n in num_tokens:
        x = mx.random.normal((n, 1, 1, GPT_OSS_SIZE))
        chosen = mx.random.randint(0, num_experts, (n, 4))
        mx.eval(x, chosen)
        calls = {"mxfp4": partial(holder.experts, x, chosen), "float32": partial(plain, x, chosen)}
        found = _best(calls, rounds)
        ratio = found["mxfp4"] / found["float32"]
        print(f"{n:>5} tokens {found['mxfp4']:29.2f} {found['float32']:10.2f} {ratio:7.2f}")


def _print_latent(num_heads: int, num_cells: int, rounds: int) -> None:
    layers = {is_one: _latent_layer(num_heads, is_one) for is_one in (True, False)}
    print(f"{num_heads} heads, {num_cells} cells before, ms    one form   mlx-lm's   ratio")
    for width in WIDTHS:
        found = _best({one: _attention(layer, width, num_cells) for one, layer in layers.items()}, rounds)
        ratio = found[True] / found[False]
        print(f"{width:>5} tokens {found[True]:32.2f} {found[False]:10.2f} {ratio:7.2f}")


def _latent_layer(num_heads: int, is_one_form: bool) -> nn.Module:
    """A layer of random weights in 4 bits. In mlx-lm's forms, the projections of the latents are float32."""
    from mlx_lm.models.deepseek_v3 import DeepseekV3Attention, ModelArgs

    sizes = LATENT | HEADS.get(num_heads, OTHER_HEADS)
    holder = nn.Module()
    holder.self_attn = DeepseekV3Attention(ModelArgs(num_attention_heads=num_heads, **sizes))
    kinds = (nn.Linear, MultiLinear) if is_one_form else nn.Linear
    nn.quantize(holder, 64, 4, class_predicate=lambda _, layer: isinstance(layer, kinds))
    keep_quantized(holder)
    interleave_weights(holder)
    cpu_layers.use_fast_math(holder)
    if not is_one_form:
        for layer in (holder.self_attn.embed_q, holder.self_attn.unembed_out):
            layer.__class__ = MultiLinear
    mx.eval(holder.parameters())
    found: nn.Module = holder.self_attn
    return found


def _attention(layer: nn.Module, width: int, num_cells: int) -> Call:
    """A pass of one row."""
    end = num_cells + width
    kv = RaggedKV(KVSpec(1, layer.kv_lora_rank, layer.qk_rope_head_dim, mx.float32))
    kv.resize(1, end)
    kv.keys, kv.values = mx.random.normal(kv.keys.shape), mx.random.normal(kv.values.shape)
    x = mx.random.normal((1, width, layer.hidden_size))
    mx.eval(x, kv.keys, kv.values)

    def call() -> mx.array:
        place = Placement([0], mx.array([num_cells]), mx.array([width]), width, end, end)
        found: mx.array = layer(x, place.mask(None), LayerView(kv, place))
        return found

    return call


def _best(calls: Mapping[Name, Call], rounds: int) -> dict[Name, float]:
    """Milliseconds of each call. The calls take turns."""
    times: dict[Name, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):  # the first round warms up
        for name, call in calls.items():
            started = time.perf_counter()
            mx.eval(call())
            if number:
                times[name].append(1000 * (time.perf_counter() - started))
    return {name: min(own) for name, own in times.items()}


if __name__ == "__main__":
    main()
