"""Gives MLX an optimised BLAS for float32 matmuls on a Linux CPU.

The mlx wheel for Linux brings the reference BLAS. The dynamic linker takes `cblas_sgemm` from the first
library of the global scope that exports it, so an OpenBLAS that is loaded with RTLD_GLOBAL before `import
mlx.core` replaces it: [64, 576] x [576, 1536] took 45 ms and takes 1.4 ms (2.5 and 80 GFLOP/s on one EPYC
core). LAPACK stays with MLX's own library. Other dtypes than float32, and quantized weights, never use a
BLAS.

    OUTRIDER_BLAS=off               leave MLX's BLAS in place
    OUTRIDER_BLAS=/path/to/lib.so   use this library
    OUTRIDER_BLAS_THREADS=n         threads of one matmul (default: cpu/threads.py)
    OUTRIDER_KERNEL=off             use the library for matmuls of few tokens too (default: cpu/matmul.py;
                                    other values: cpu/kernel_switch.py)

Libraries are tried in this order: the one that the user names, the pip package scipy-openblas32, the system's
libopenblas.

Nothing here may import mlx, directly or indirectly: this module has to run first.
"""

import ctypes
import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from outrider.cpu.library_cache import Unusable, load_cached
from outrider.cpu.matmul import SgemmKernel, install
from outrider.cpu.matmul_check import NO_TRANSPOSE, TRANSPOSE, sgemm_is_correct
from outrider.cpu.openblas_package import renamed_copy
from outrider.cpu.threads import ThreadCounts, ThreadWatch, thread_counts

log = logging.getLogger("outrider.cpu.blas")

SYSTEM_LIBRARIES = ("libopenblas.so.0", "libopenblas.so", "libopenblasp.so.0")
# With OpenBLAS's AVX2 kernels sums depend on the number of threads and on the rows beside a token. With those
# for AVX-512 they do not: a CPU that has it uses them, whatever OPENBLAS_CORETYPE says. On other CPUs this
# concerns only what cpu/matmul.py passes on: x @ w.T of more than 512 tokens, with float32 weights.
AVX512_CORE = "SkylakeX"
AVX512_FLAGS = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# An idle OpenBLAS thread sleeps after 2^16 cycles. By default it holds a core busy for 0.1 s, and what
# other threads compute meanwhile takes a quarter longer.
SPIN_CYCLES_LOG2 = "16"


@dataclass(frozen=True)
class BlasReport:
    """Which library computes the matmuls of this process, and why."""

    name: str
    reason: str
    path: str | None = None  # None: MLX's own library
    threads: int | None = None  # None: the library does not report it
    kernel: str = ""  # what computes most matmuls instead of the library
    no_kernel: str = ""  # why the library computes them
    is_watched: bool = False  # True: `threads` is the maximum, and fewer are used while others need the cores

    @property
    def active(self) -> bool:
        """True if MLX's own BLAS was replaced."""
        return self.path is not None

    def __str__(self) -> str:
        up_to = "up to " if self.is_watched else ""
        threads = f", {up_to}{self.threads} thread{'s' if self.threads != 1 else ''}" if self.threads else ""
        kernel = f"{self.kernel}, " if self.kernel else ""
        no_kernel = f"; no own matmul: {self.no_kernel}" if self.no_kernel else ""
        return f"{kernel}{self.name}{threads} ({self.reason}{no_kernel})"


@dataclass(frozen=True)
class _Loaded:
    """The libraries that replaced MLX's BLAS."""

    library: ctypes.CDLL
    kernel: SgemmKernel | None
    threads: ThreadCounts


_report: BlasReport | None = None
_loaded: _Loaded | None = None


def activate() -> BlasReport:
    """Give MLX an optimised BLAS if one is available. Never raises. Only the first call has an effect."""
    global _report
    if _report is None:
        _report = _decide()
        log.log(logging.INFO if _report.active else logging.DEBUG, "BLAS: %s", _report)
    return _report


def report() -> BlasReport:
    """The result of `activate`."""
    return _report or BlasReport("mlx's own BLAS", "not activated")


def watch_threads() -> BlasReport:
    """From now on let matmuls use all free cores, unless the user has set a number of threads."""
    global _report
    found = report()
    if _loaded is None or found.is_watched or _loaded.threads.max == _loaded.threads.initial:
        return found
    can_change = _can_change_threads(_loaded.library)
    if _loaded.kernel is None and not can_change:
        return found
    if _loaded.kernel:  # never waits for a thread that has no core, so it may always have all threads
        _loaded.kernel.set_num_threads(_loaded.threads.max)
    if can_change:
        ThreadWatch(_loaded.threads, _loaded.library.openblas_set_num_threads).start()
    _report = dataclasses.replace(found, threads=_loaded.threads.max, is_watched=True)
    return _report


def _can_change_threads(library: ctypes.CDLL) -> bool:
    """True if the number of threads may change while matmuls run. OpenMP builds do not allow that."""
    own_threads = 1  # 0: no threads; 2: OpenMP
    return hasattr(library, "openblas_get_parallel") and library.openblas_get_parallel() == own_threads


def _decide() -> BlasReport:
    if sys.platform == "darwin":
        return BlasReport("Accelerate", "macOS brings its own")
    try:
        reason = _reason_to_keep_mlx_blas()
        return BlasReport("mlx's own BLAS", reason) if reason else _first_usable()
    except Exception as error:  # `import outrider` must not fail because a fast BLAS is missing
        log.warning("BLAS: mlx keeps its own", exc_info=True)
        return BlasReport("mlx's own BLAS", f"{type(error).__name__}: {error}")


def _reason_to_keep_mlx_blas() -> str | None:
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
        except Exception as error:  # the next library may work
            failures.append(f"{origin}: {error}")
            level = logging.WARNING if origin.startswith("OUTRIDER_BLAS=") else logging.DEBUG
            log.log(level, "BLAS: %s cannot be used: %s", origin, error)
            continue
        return dataclasses.replace(found, reason="; ".join([found.reason or origin, *failures]))
    log.warning("BLAS: matrix products will be slow: %s", "; ".join(failures))
    return BlasReport("reference BLAS", "; ".join(failures))


def _candidates() -> Iterator[tuple[str, Callable[[], BlasReport]]]:
    """Names and loaders of the libraries, in the order in which they are tried."""
    named = os.environ.get("OUTRIDER_BLAS")
    if named:
        yield f"OUTRIDER_BLAS={named}", partial(_load, named)
    yield "scipy-openblas32", _load_package
    for name in SYSTEM_LIBRARIES:
        yield name, partial(_load, name)


def _load_package() -> BlasReport:
    source, recipe = renamed_copy()
    loaded, is_cached = load_cached(recipe, _load)
    if is_cached:
        return loaded
    reason = "scipy-openblas32, copied for this process only: no cache folder"
    return dataclasses.replace(loaded, path=str(source), reason=reason)


def _load(path: str) -> BlasReport:
    """Open the library, check it, and only then let it replace MLX's BLAS. Leaves `reason` empty."""
    global _loaded
    threads = thread_counts(os.environ)
    settings = {
        # Otherwise OpenBLAS starts a thread for each CPU while it is loaded.
        "OPENBLAS_NUM_THREADS": str(threads.initial),
        "OPENBLAS_THREAD_TIMEOUT": os.environ.get("OPENBLAS_THREAD_TIMEOUT", SPIN_CYCLES_LOG2),
    }
    if _cpu_flags() >= AVX512_FLAGS:
        settings["OPENBLAS_CORETYPE"] = AVX512_CORE
    with ExitStack() as stack:
        for name, value in settings.items():
            stack.enter_context(_environment_variable(name, value))
        library = ctypes.CDLL(path, mode=ctypes.RTLD_LOCAL)
    config = _text_from(library, "openblas_get_config")
    if not hasattr(library, "cblas_sgemm"):
        raise Unusable("exports no cblas_sgemm")
    if "USE64BITINT" in config:
        raise Unusable("takes 64-bit integers where mlx passes 32-bit ones")
    if not all(sgemm_is_correct(library, form) for form in (NO_TRANSPOSE, TRANSPOSE)):
        raise Unusable(f"{path} computes wrong products")
    kernel, no_kernel = _install_kernel(library)
    # After the kernel: the linker takes a function from the first library that has it.
    ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    _loaded = _Loaded(library, kernel, threads)
    # Like "OpenBLAS 0.3.34 SkylakeX"; other libraries have only a path.
    name = " ".join([*config.split()[:2], *_text_from(library, "openblas_get_corename").split()]) or path
    found = BlasReport(name, "", path, _set_threads(library, threads.initial))
    if kernel is None:
        return dataclasses.replace(found, no_kernel=no_kernel)
    kernel.set_num_threads(threads.initial)
    return dataclasses.replace(found, threads=threads.initial, kernel=str(kernel))


def _cpu_flags() -> set[str]:
    """What Linux says that the CPU can do; nothing where it does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split()[2:]) for line in lines if line.startswith("flags")), set())


def _install_kernel(library: ctypes.CDLL) -> tuple[SgemmKernel | None, str]:
    """The matmul for few tokens in front of the library, or the reason why there is none."""
    try:
        return install(library), ""
    except Unusable as reason:
        return None, str(reason)
    except Exception as error:  # the library works without the kernel
        log.warning("BLAS: no own matmul", exc_info=True)
        return None, f"{type(error).__name__}: {error}"


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
