"""The native extension: MLX operations for CPUs in C++ (native/extension/), compiled at first use.

It is built against the headers and the library in MLX's own wheel, and stored like the other libraries
(cpu/library_cache.py). nanobind connects it with Python; its version has to match the one that MLX was built
with. Without a C++ compiler there is no extension: quantised layers are then dequantised (models/dtypes.py).

    OUTRIDER_KERNEL=off    use no extension
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import mlx.core as mx

from outrider.cpu.library_cache import Recipe, Unusable, failure_of, load_cached
from outrider.cpu.matmul import SWITCH
from outrider.cpu.threads import thread_counts, usable_cpus

log = logging.getLogger(__name__)

NAME = "_outrider_cpu"
SOURCES = Path(__file__).parent / "native" / "extension"
COMPILERS = ("c++", "g++", "clang++")
# No contraction: a product and a sum are rounded separately, on every CPU.
FLAGS = ("-std=c++20", "-O3", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-DNB_DOMAIN=mlx", "-w")
BUILD_TIMEOUT_S = 600  # seconds for one file; chosen by hand: 7 s on an idle core


@cache
def extension() -> ModuleType | None:
    """The loaded extension, or None; then a warning has the reason."""
    try:
        return _load()
    except Unusable as reason:
        log.warning("no native operations for this CPU: %s", reason)
    except Exception:  # everything works without the extension
        log.warning("no native operations for this CPU", exc_info=True)
    return None


def _load() -> ModuleType:
    if os.environ.get(SWITCH, "on").lower() == "off":
        raise Unusable(f"{SWITCH}=off")
    if sys.platform != "linux":
        raise Unusable(f"not for {sys.platform}")
    module, _is_cached = load_cached(Recipe(_stem(), _compile), _open)
    module.set_num_threads(thread_counts(os.environ).max)
    return module


def _open(path: str) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(NAME, path)
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise OSError(str(error)) from error
    if not _is_correct(module):
        raise Unusable(f"{path} computes wrong products")
    return module


def _is_correct(module: ModuleType) -> bool:
    """Compare small products of integers, which are exact whatever the order of the sums."""
    size, num_rows = 128, 21
    for bits in (4, 5, 8):
        codes = (mx.arange(num_rows * size) * 7 % (1 << bits)).reshape(num_rows, size).astype(mx.float32)
        # Each group has the smallest and the largest code, so that quantising gives the codes back.
        codes[:, ::32], codes[:, 1::32] = 0, (1 << bits) - 1
        weight, scales, biases = mx.quantize(codes, group_size=32, bits=bits)
        x = (mx.arange(3 * size) * 5 % 253 - 126).reshape(3, size).astype(mx.float32)
        x[:, ::32] = 127  # the scale of each block is 1
        expected = x @ mx.dequantize(weight, scales, biases, group_size=32, bits=bits).T
        try:
            found = module.quantized_matmul(x, weight, scales, biases, 32, bits)
        except TypeError as error:  # arrays of another nanobind
            raise Unusable(f"nanobind does not match MLX: {str(error).splitlines()[0]}") from None
        if not mx.allclose(found, expected, rtol=1e-5, atol=1e-2).item():
            return False
    return True


# Compiling --------------------------------------------------------------------------------------------------


def _stem() -> str:
    parts = [*FLAGS, sys.version, *(importlib.metadata.version(name) for name in ("mlx", "nanobind"))]
    digest = hashlib.sha256(repr(parts).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return f"libcpu-{digest.hexdigest()[:12]}"


def _compile(library: Path) -> None:
    """Use the first compiler that works. Raises Unusable."""
    compilers = list(filter(None, map(shutil.which, COMPILERS)))
    if not compilers:
        raise Unusable(f"no C++ compiler ({', '.join(COMPILERS)})")
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        raise Unusable("Python's headers are not installed (python3-dev)")
    log.info("compiling operations for this CPU (once; some ten seconds)")
    failures = []
    for compiler in compilers:
        failure = _failure_with(compiler, library)
        if not failure:
            return
        failures.append(f"{compiler} {failure}")
    raise Unusable("; ".join(failures))


def _failure_with(compiler: str, library: Path) -> str:
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
        [compiler, *FLAGS, *includes, "-c", str(source), "-o", str(made)]
        for source, made in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(usable_cpus()) as pool:
        failures = list(pool.map(partial(failure_of, timeout_s=BUILD_TIMEOUT_S), commands))
    if any(failures):
        return next(filter(None, failures))
    links = [f"-L{mlx / 'lib'}", "-lmlx", f"-Wl,-rpath,{mlx / 'lib'}", "-pthread"]
    return failure_of([compiler, "-shared", *map(str, objects), *links, "-o", str(library)])
