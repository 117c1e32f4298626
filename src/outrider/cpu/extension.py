"""The native extension: MLX operations for CPUs in C++ (native/extension/), compiled at first use.

It is built against the headers and the library in MLX's own wheel, and stored like the other libraries
(cpu/library_cache.py). nanobind connects it with Python; its version has to match the one that MLX was built
with. Without a C++ compiler there is no extension: quantised layers are then dequantised (models/dtypes.py).

    OUTRIDER_KERNEL=off         use no extension
    OUTRIDER_KERNEL=portable    use it also on CPUs without AVX2: slower than float32 weights, but smaller
    OUTRIDER_KERNEL=avx2        use these instructions (cpu/kernel_switch.py has all names)

The delta rule (recurrence.cpp) has no intrinsics: it uses the best instructions, whatever is named here.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import mlx.core as mx

from outrider import fallbacks
from outrider.cpu.extension_check import wrong_operations
from outrider.cpu.kernel_switch import INSTRUCTIONS, SWITCH, wanted_instructions
from outrider.cpu.library_cache import Recipe, Unusable, failure_of, load_cached
from outrider.cpu.threads import thread_counts, usable_cpus

log = logging.getLogger(__name__)

NAME = "_outrider_cpu"
SOURCES = Path(__file__).parent / "native" / "extension"
SHARED_HEADER = SOURCES.parent / "late_helper.h"  # with the matmul's library
COMPILERS = ("c++", "g++", "clang++")
# No contraction: a product and a sum are rounded separately, on every CPU.
FLAGS = ("-std=c++20", "-O3", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-DNB_DOMAIN=mlx", "-w")
PART, INSTEAD = "native extension", "float32 copies of quantised weights and slower MLX operations"
# For an assembler that is older than the compiler's headers.
WITHOUT_NEWEST = ("-DHAS_AMX=0", "-DHAS_AVX_VNNI=0")
BUILD_TIMEOUT_S = 600  # seconds for one file; chosen by hand: 7 s on an idle core
VERSION_TIMEOUT_S = 10  # seconds; it takes some 5 ms


@cache
def extension() -> ModuleType | None:
    """The loaded extension, or None; then a warning has the reason."""
    try:
        return _load()
    except Unusable as reason:
        log.warning("no native operations for this CPU: %s", reason)
        fallbacks.note(PART, str(reason), INSTEAD)
    except Exception as error:  # everything works without the extension
        log.warning("no native operations for this CPU", exc_info=True)
        fallbacks.note(PART, f"{type(error).__name__}: {error}", INSTEAD)
    return None


def loaded() -> ModuleType:
    """The extension, for layers that exist only if there is one."""
    found = extension()
    assert found is not None
    return found


def if_loaded() -> ModuleType | None:
    """The extension, if something else has needed it: it is not built for this. None while MLX's device is a
    GPU, where the arrays are."""
    is_on_cpu = mx.default_device() == mx.Device(mx.cpu)
    return extension() if is_on_cpu and extension.cache_info().currsize else None


def build_name() -> str | None:
    """Identifies the operations' source, if they are loaded."""
    return _sources_name() if if_loaded() is not None else None


def instructions() -> str | None:
    """Those that the operations use, if they are loaded."""
    native = if_loaded()
    return None if native is None else str(native.instructions())


def _load() -> ModuleType:
    wanted = wanted_instructions()
    if sys.platform != "linux":
        raise Unusable(f"not for {sys.platform}")
    module, _is_cached = load_cached(Recipe(_stem(), _compile), partial(_open, wanted))
    return module


def _open(wanted: str, path: str) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(NAME, path)
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise OSError(str(error)) from error
    module.set_num_threads(thread_counts(os.environ).max)
    _use_instructions(module, wanted)
    try:
        if wrong := wrong_operations(module):
            raise Unusable(f"{path} computes wrong results: {', '.join(wrong)}")
    except TypeError as error:  # arrays of another nanobind
        raise Unusable(f"nanobind does not match MLX: {str(error).splitlines()[0]}") from None
    return module


def _use_instructions(module: ModuleType, wanted: str) -> None:
    """Before anything is computed: the user may avoid those that crash. Raises Unusable."""
    if not module.use_instructions(wanted):
        found = ", ".join(name for name in INSTRUCTIONS if module.use_instructions(name))
        raise Unusable(f"{SWITCH}={wanted}, but on this CPU there are only {found}")
    if module.instructions() == "portable" and wanted != "portable":
        raise Unusable(f"this CPU has neither AVX-512 nor AVX2 ({SWITCH}=portable uses slower operations)")


# Compiling --------------------------------------------------------------------------------------------------


def _stem() -> str:
    """Without a compiler a library of any compiler serves."""
    versions = [version for compiler in _compilers() if (version := _version_of(compiler))]
    digest = hashlib.sha256(repr(versions).encode()).hexdigest()
    return f"{_sources_name()}-{digest[:6]}" if versions else _sources_name()


def _sources_name() -> str:
    parts = [*FLAGS, sys.version, *(importlib.metadata.version(name) for name in ("mlx", "nanobind"))]
    digest = hashlib.sha256(repr(parts).encode())
    for source in (SHARED_HEADER, *sorted((*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")))):
        digest.update(source.read_bytes())
    return f"libcpu-{digest.hexdigest()[:12]}"


def _compilers() -> list[str]:
    """Without those that are another one by another name."""
    found = {os.path.realpath(path): path for path in map(shutil.which, COMPILERS) if path}
    return list(found.values())


def _version_of(compiler: str) -> str:
    """The line that has the compiler's name and version. "": it cannot be run."""
    try:
        done = subprocess.run(
            [compiler, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=VERSION_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.partition("\n")[0] if done.returncode == 0 else ""


def _compile(library: Path) -> None:
    """Use the first compiler that works. Raises Unusable."""
    compilers = _compilers()
    if not compilers:
        raise Unusable(f"no C++ compiler ({', '.join(COMPILERS)})")
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        raise Unusable("Python's headers are not installed (python3-dev)")
    log.info("compiling operations for this CPU (once; some ten seconds)")
    failures = []
    for compiler in compilers:
        failure = _failure_with(compiler, library, FLAGS)
        if failure and not _failure_with(compiler, library, (*FLAGS, *WITHOUT_NEWEST)):
            log.warning("the operations are compiled without AMX and AVX-VNNI: %s %s", compiler, failure)
            return
        if not failure:
            return
        failures.append(f"{compiler} {failure}")
    raise Unusable("; ".join(failures))


def _failure_with(compiler: str, library: Path, flags: Sequence[str]) -> str:
    import nanobind  # type: ignore[import-untyped]

    bindings = Path(nanobind.include_dir()).parent
    mlx = Path(mx.__file__).parent
    folders = [
        bindings / "include",
        bindings / "ext" / "robin_map" / "include",
        bindings / "src",
        mlx / "include",
        sysconfig.get_paths()["include"],
    ]
    includes = [f"-I{folder}" for folder in folders]
    sources = [*sorted(SOURCES.glob("*.cpp")), bindings / "src" / "nb_combined.cpp"]
    objects = [library.with_name(f"{source.stem}.o") for source in sources]
    commands = [
        [compiler, *flags, *includes, "-c", str(source), "-o", str(made)]
        for source, made in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(usable_cpus()) as pool:
        failures = list(pool.map(partial(failure_of, timeout_s=BUILD_TIMEOUT_S), commands))
    if any(failures):
        return next(filter(None, failures))
    links = [f"-L{mlx / 'lib'}", "-lmlx", f"-Wl,-rpath,{mlx / 'lib'}", "-pthread"]
    return failure_of([compiler, "-shared", *map(str, objects), *links, "-o", str(library)])
