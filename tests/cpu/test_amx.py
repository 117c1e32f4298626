"""Matmuls with AMX on CPUs that have none: the same source, with tile registers in memory (amx/registers.h).

On CPUs that have AMX, the other tests of products use it as well.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from outrider.cpu.extension import COMPILERS, FLAGS, SOURCES

PROGRAM = Path(__file__).with_name("amx")
AMX, AVX512 = SOURCES / "interleaved_amx.cpp", SOURCES / "interleaved_avx512.cpp"
HAS_AMX = '#include "quantized_kernels.h"\nHAS_AMX'
# In the place of `ldtilecfg`: copies its operand.
COPY = [
    r"leaq \1, %r11",
    *(f"movups {16 * i}(%r11), %xmm15; movups %xmm15, loaded+{16 * i}(%rip)" for i in range(4)),
]

Compile = Callable[..., None]


@pytest.fixture(scope="module")
def compiler(native: ModuleType) -> Compile:
    """Runs a compiler with these arguments, with the flags of the native extension."""
    if not native.use_instructions("avx512vnni"):
        pytest.skip("this CPU has no AVX-512")
    assert native.use_instructions("")
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    if found is None:
        pytest.skip("there is no C++ compiler")
    command = [found, *FLAGS, f"-I{SOURCES}"]
    expanded = subprocess.run(
        [*command, "-E", "-P", "-x", "c++", "-"], input=HAS_AMX, capture_output=True, text=True, check=True
    )
    if expanded.stdout.split()[-1] != "1":
        pytest.skip("this compiler has no AMX")
    return lambda *arguments: subprocess.run([*command, *map(str, arguments)], check=True)


def output_of(program: Path) -> str:
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done
    return done.stdout


def test_products_are_those_of_avx512(compiler: Compile, tmp_path: Path) -> None:
    program = tmp_path / "compare"
    simulated = "-include", PROGRAM / "registers.h", AMX
    compiler("-O1", *simulated, AVX512, PROGRAM / "compare.cpp", "-o", program)
    found = output_of(program)
    assert found.endswith(" products are equal\n")
    assert int(found.split()[0]) > 1000


def test_all_sizes_are_in_memory_when_they_are_loaded(compiler: Compile, tmp_path: Path) -> None:
    """Compilers have dropped the stores to most of them."""
    assembly, program = tmp_path / "amx.s", tmp_path / "sizes"
    compiler("-S", AMX, "-o", assembly)
    copied, num_loads = re.subn(r"ldtilecfg\s+(\S.*)", "; ".join(COPY), assembly.read_text())
    assert num_loads == 1
    assembly.write_text(copied)
    compiler("-O1", assembly, AVX512, PROGRAM / "sizes.cpp", "-o", program)
    assert output_of(program).split() == [sizes_for(num_tokens).hex() for num_tokens in range(6, 17)]


def sizes_for(num_tokens: int) -> bytes:
    """The palette, the bytes of a row of each tile register, and its number of rows."""
    row_bytes = 4 * [64] + 2 * [32] + 2 * [64]
    rows = 6 * [num_tokens] + 2 * [8]
    return struct.pack("<B15x8H16x8B8x", 1, *row_bytes, *rows)
