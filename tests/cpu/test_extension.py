"""How the native extension comes into a process: with which instructions, and from which compiler."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fresh_process import REPORT, in_fresh_process
from outrider.cpu import extension
from outrider.cpu.kernel_switch import INSTRUCTIONS
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
        assert found["kernel"].split()[1] == ("avx512" if name.startswith("avx512") else "avx2")


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


# -- compilers -------------------------------------------------------------------------------------------


def add(folder: Path, name: str, script: str) -> None:
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def stem_with(folder: Path, version: str) -> str:
    add(folder, "c++", f"echo '{version}'; echo 'a licence in the language of the user'")
    return extension._stem()


def test_a_library_of_another_compiler_is_not_used(programs: Path) -> None:
    old, new = stem_with(programs, "c++ 12.2"), stem_with(programs, "c++ 12.4")
    assert old != new
    assert stem_with(programs, "c++ 12.2") == old
    add(programs, "clang++", "echo clang 14")
    assert stem_with(programs, "c++ 12.2") != old


def test_without_a_compiler_that_runs_a_library_of_any_compiler_is_used(programs: Path) -> None:
    assert stem_with(programs, "c++ 12.2").startswith(f"{extension._sources_name()}-")
    add(programs, "c++", "exit 1")
    assert extension._stem() == extension._sources_name()
    (programs / "c++").unlink()
    assert extension._stem() == extension._sources_name()


def test_the_fingerprint_of_costs_does_not_depend_on_compilers(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extension, "if_loaded", SimpleNamespace)
    stem_with(programs, "c++ 12.2")
    name = extension.build_name()
    (programs / "c++").unlink()
    assert extension.build_name() == name


# Writes the file after `-o`.
WRITE = 'for OUT in "$@"; do [ "$LAST" = -o ] && break; LAST=$OUT; done; echo "$*" > "$OUT"'


def test_a_compiler_that_fails_with_amx_compiles_the_rest(
    programs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fail = "echo no such instruction >&2; exit 1"
    fails = "*interleaved_amx.cpp*|*avx2.cpp*"
    add(programs, "c++", f'case "$*" in *HAS_AMX=0*HAS_AVX_VNNI=0*) ;; {fails}) {fail} ;; esac; {WRITE}')
    with caplog.at_level(logging.WARNING):
        extension._compile(tmp_path / "library.so")
    assert (tmp_path / "library.so").is_file()
    assert "without AMX" in caplog.text
    assert "no such instruction" in caplog.text


def test_a_compiler_that_always_fails_is_named_with_the_first_failure(programs: Path, tmp_path: Path) -> None:
    add(programs, "c++", "echo no such file >&2; exit 1")
    with pytest.raises(Unusable, match=r"c\+\+ failed \(1\): no such file"):
        extension._compile(tmp_path / "library.so")
