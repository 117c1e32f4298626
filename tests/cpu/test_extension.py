"""How the native extension comes into a process: with which instructions."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from cpu.quantized_products import INSTRUCTIONS
from fresh_process import REPORT, in_fresh_process
from outrider.cpu import extension
from outrider.cpu.library_cache import Unusable

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the native extension is for Linux")

IN_USE = """
import mlx.core as mx
mx.set_default_device(mx.cpu)
from outrider.cpu import extension
check = extension.wrong_operations
def noting(module):
    found["checked"] = module.instructions()
    return check(module)
extension.wrong_operations = noting
extension.extension()
found["instructions"] = extension.instructions()
"""


class CPU:
    """An extension on a CPU that has some of the instructions."""

    def __init__(self, *names: str) -> None:
        self.names, self.chosen = names, "portable"

    def use_instructions(self, wanted: str) -> bool:
        if wanted and wanted not in self.names:
            return False
        self.chosen = wanted or self.names[0]
        return True

    def instructions(self) -> str:
        return self.chosen


def choose(wanted: str, *names: str) -> str:
    cpu: Any = CPU(*names)
    extension._use_instructions(cpu, wanted)
    return cpu.chosen


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_the_user_chooses_the_instructions(name: str, native: ModuleType) -> None:
    has_it = native.use_instructions(name)
    assert native.use_instructions("")
    if not has_it:
        pytest.skip(f"this CPU has no {name}")
    found = in_fresh_process(REPORT + IN_USE, OUTRIDER_KERNEL=name)
    assert found["checked"] == found["instructions"] == name  # others may crash, also in the check
    if found["kernel"]:
        assert found["kernel"].split()[1] == ("avx512" if name.startswith("avx512") else name)


def test_the_best_instructions_are_used_if_none_are_named() -> None:
    assert choose("", "avx512vnni", "avx2", "portable") == "avx512vnni"


def test_portable_operations_are_used_only_if_they_are_named() -> None:
    assert choose("portable", "portable") == "portable"
    with pytest.raises(Unusable, match=r"neither AVX-512 nor AVX2 \(OUTRIDER_KERNEL=portable"):
        choose("", "portable")


def test_instructions_that_the_cpu_does_not_have_are_refused_with_those_that_it_has() -> None:
    with pytest.raises(
        Unusable, match="OUTRIDER_KERNEL=avx512amx, but on this CPU there are only avx2, portable"
    ):
        choose("avx512amx", "avx2", "portable")
