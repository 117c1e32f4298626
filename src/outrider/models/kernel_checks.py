"""The fast code that this project brings for each device: one list of checks, each against a portable form.

`outrider doctor` runs all of them. Serving runs each one when a model first needs the code, and falls back to
the portable form where it fails. The functions are the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from outrider import fallbacks, gpu_kernels
from outrider.cache import cell_writes
from outrider.cache.cell_format import CellFormat
from outrider.cpu import blas, extension
from outrider.fallbacks import Fallback
from outrider.models import attention_kernels, cuda_qmm, machine, paged_attention
from outrider.models.recurrent import fused_layer, recurrent_kernels
from outrider.models.recurrent.layer_inputs import LayerSizes

DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16}  # of the weights' scales


@dataclass(frozen=True)
class Check:
    name: str  # begins with the name of the part in fallbacks.py
    applies: Callable[[], bool]  # whether the code is made for this device
    run: Callable[[], bool]  # builds it and compares it with the portable form; False: it is switched off

    def fallback(self) -> Fallback | None:
        """Why the code is switched off, if `run` has found that."""
        return next((one for one in fallbacks.noted() if self.name.startswith(one.part)), None)


def all_checks() -> list[Check]:
    """One line for each piece of code. GPU kernels have the name that they give to `gpu_kernels.is_close`."""
    return [
        Check("BLAS", _on_linux_cpu, lambda: blas.report().active),
        Check("own matmul", machine.has_own_matmul, lambda: bool(blas.report().kernel)),
        Check(extension.PART, _on_linux_cpu, lambda: extension.extension() is not None),
        *(_quantized_matmul(*one, "bfloat16") for one in sorted(cuda_qmm.FORMATS)),
        _quantized_matmul(4, 64, "float16"),
        *(_quantized_matmul(4, 64, name, has_experts=True) for name in DTYPES),
        Check("delta-rule kernels", gpu_kernels.is_available, recurrent_kernels._agrees),
        *(_delta_layer(name) for name in DTYPES),
        *(_attention(dim, bits) for dim in (64, 128, 256) for bits in (None, 8, 4)),
        *(_cell_writing(128, bits) for bits in (None, 8)),
        *(_masked_attention(name) for name in DTYPES),
    ]


def _on_linux_cpu() -> bool:
    return sys.platform == "linux" and machine.is_cpu()


def _quantized_matmul(bits: int, group_size: int, dtype: str, has_experts: bool = False) -> Check:
    name = f"quantised-matmul kernels, {bits} bits in groups of {group_size}, {dtype}"
    run = partial(cuda_qmm._agrees, bits, group_size, DTYPES[dtype], has_experts)
    return Check(f"{name}, experts" if has_experts else name, cuda_qmm.is_available, run)


def _attention(dim: int, bits: int | None) -> Check:
    cells = "bfloat16" if bits is None else f"{bits} bits"
    run = partial(attention_kernels.agrees, dim, mx.bfloat16, bits)
    return Check(f"attention kernels, heads of {dim}, {cells}", gpu_kernels.is_available, run)


def _cell_writing(dim: int, bits: int | None) -> Check:
    cells = "bfloat16" if bits is None else f"{bits} bits"
    run = partial(cell_writes.supports, CellFormat(dim, mx.bfloat16, bits))
    return Check(f"cell-writing kernels, heads of {dim}, {cells}", gpu_kernels.runs_in_order, run)


def _masked_attention(dtype: str) -> Check:
    run = partial(paged_attention.takes_numbers, DTYPES[dtype])
    return Check(f"masked-attention kernels, {dtype}", cuda_qmm.is_available, run)


def _delta_layer(dtype: str) -> Check:
    """With the sizes of Qwen3.5: 16 and 32 heads of 128, and a convolution over four inputs."""
    kept = DTYPES[dtype]
    sizes = LayerSizes(16, 32, 128, 128, 3, kept, (kept, mx.float32, kept, kept))
    run = partial(fused_layer._agrees, sizes)
    return Check(f"delta-layer kernels, {dtype}", gpu_kernels.is_available, run)
