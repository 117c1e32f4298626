"""When there is no native extension: what is refused, what the warning says, and that it comes once."""

from __future__ import annotations

import importlib.machinery
import logging
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

from cpu.test_extension_check import broken
from outrider import fallbacks
from outrider.cpu import extension as extension_module
from outrider.cpu.extension import PART, _compile, _load, _open, extension
from outrider.cpu.kernel_switch import SWITCH
from outrider.cpu.library_cache import Unusable

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the native extension is for Linux")


# A compiled file that is opened -----------------------------------------------------------------------------


def opens_as(patch: pytest.MonkeyPatch, module: Any) -> None:
    """Every file holds this module, or raises this ImportError."""

    class Loader:
        def __init__(self, name: str, path: str) -> None:
            pass

        def create_module(self, spec: object) -> Any:
            if isinstance(module, ImportError):
                raise module
            module.set_num_threads = lambda num: None
            module.use_instructions = lambda wanted: True
            module.instructions = lambda: "avx2"
            return module

        def exec_module(self, module: object) -> None:
            pass

    patch.setattr(importlib.machinery, "ExtensionFileLoader", Loader)


def test_an_extension_that_computes_wrong_results_is_refused(
    native: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens_as(monkeypatch, broken(native, "quantized_matmul", lambda found: found * 1.1))
    with pytest.raises(
        Unusable, match=r"^some\.so computes wrong results: products, 4 bits affine, products"
    ):
        _open("", "some.so")


def test_an_extension_that_takes_no_arrays_of_mlx_is_refused(
    native: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that was built with another nanobind than MLX."""

    def refuse(found: mx.array) -> mx.array:
        raise TypeError("quantized_matmul(): incompatible function arguments.\nInvoked with types: ...")

    opens_as(monkeypatch, broken(native, "quantized_matmul", refuse))
    with pytest.raises(
        Unusable, match=r"^nanobind does not match MLX: .* incompatible function arguments\.$"
    ):
        _open("", "some.so")


def test_a_file_that_cannot_be_imported_counts_as_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of libraries makes it anew after an OSError."""
    opens_as(monkeypatch, ImportError("undefined symbol: mlx"))
    with pytest.raises(OSError, match="undefined symbol: mlx"):
        _open("", "some.so")


# Compiling --------------------------------------------------------------------------------------------------

BROKEN = "#!/bin/sh\necho too old >&2\nexit 1\n"
WORKING = '#!/bin/sh\nfor last; do :; done\necho "made by $0" >"$last"\n'  # writes the file behind -o


def write_program(file: Path, script: str) -> None:
    file.write_text(script)
    file.chmod(0o755)


def test_no_compiler(programs: Path, tmp_path: Path) -> None:
    with pytest.raises(Unusable, match=r"^no C\+\+ compiler \(c\+\+, g\+\+, clang\+\+\)$"):
        _compile(tmp_path / "made.so")


def test_no_headers_of_python(programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_program(programs / "g++", WORKING)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(Unusable, match=r"^Python's headers are not installed \(python3-dev\)$"):
        _compile(tmp_path / "made.so")


@pytest.fixture
def headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})


@pytest.mark.usefixtures("headers")
def test_the_next_compiler_is_used_if_one_fails(programs: Path, tmp_path: Path) -> None:
    write_program(programs / "c++", BROKEN)
    write_program(programs / "clang++", WORKING)
    _compile(tmp_path / "made.so")
    assert (tmp_path / "made.so").read_text() == f"made by {programs}/clang++\n"


@pytest.mark.usefixtures("headers")
def test_compilers_that_fail_are_named_once_each(programs: Path, tmp_path: Path) -> None:
    write_program(programs / "g++", BROKEN)
    (programs / "c++").symlink_to(programs / "g++")
    write_program(programs / "clang++", BROKEN)
    with pytest.raises(Unusable) as caught:
        _compile(tmp_path / "made.so")
    reasons = [f"{programs / name} failed (1): too old" for name in ("g++", "clang++")]
    assert str(caught.value) == "; ".join(reasons)


# The switch -------------------------------------------------------------------------------------------------


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "OFF")
    with pytest.raises(Unusable, match=f"^{SWITCH}=off$"):
        _load()


# The warning ------------------------------------------------------------------------------------------------


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has not asked for the extension yet. The one that is loaded comes back."""
    before = extension()
    monkeypatch.setattr(fallbacks, "_noted", {})
    extension.cache_clear()
    yield
    extension.cache_clear()
    monkeypatch.setattr(extension_module, "_load", lambda: before)
    assert extension() is before


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("failure", "reason", "has_trace"),
    [
        (Unusable("no C++ compiler"), "no C++ compiler", False),
        (MemoryError("too large"), "MemoryError: too large", True),  # what nobody has foreseen
    ],
)
def test_without_it_there_is_one_warning_with_the_reason(
    failure: Exception,
    reason: str,
    has_trace: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> ModuleType:
        raise failure

    monkeypatch.setattr(extension_module, "_load", fail)
    with caplog.at_level(logging.WARNING, extension_module.__name__):
        assert [extension() for _ in range(3)] == [None] * 3
    (record,) = caplog.records
    assert record.getMessage().startswith("no native operations for this CPU")
    assert str(failure) in caplog.text
    assert (record.exc_info is not None) == has_trace
    assert [(one.part, one.reason) for one in fallbacks.noted()] == [(PART, reason)]
