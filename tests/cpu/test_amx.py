"""Matmuls with AMX on CPUs that have none: the same source, with tile registers in memory (amx/registers.h).

On CPUs that have AMX, the other tests of products use it as well.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from outrider.cpu.extension import COMPILERS, FLAGS, SOURCES

PROGRAM = Path(__file__).with_name("amx")


def test_products_are_those_of_avx512(native: ModuleType, tmp_path: Path) -> None:
    if not native.instructions().startswith("avx512"):
        pytest.skip("this CPU has no AVX-512")
    compiler = next(filter(None, map(shutil.which, COMPILERS)))
    sources = [SOURCES / "interleaved_avx512.cpp", PROGRAM / "compare.cpp"]
    simulated = ["-include", str(PROGRAM / "registers.h"), str(SOURCES / "interleaved_amx.cpp")]
    program = str(tmp_path / "compare")
    subprocess.run([compiler, *FLAGS, "-O1", f"-I{SOURCES}", *simulated, *sources, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.stdout.endswith(" products are equal\n"), done
    assert int(done.stdout.split()[0]) > 1000
