"""What `import outrider` does about BLAS, watched from fresh processes: it can happen only once in each."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from outrider.cpu import threads
from patience import PATIENCE_S

OUR_VARIABLES = (
    *("OUTRIDER_BLAS", "OUTRIDER_KERNEL", "OUTRIDER_CACHE", "LD_PRELOAD", "XDG_CACHE_HOME"),
    *threads.THREAD_VARIABLES,
)

REPORT = """
import ctypes, dataclasses, json, os
from outrider.cpu import blas, threads
found = dataclasses.asdict(blas.activate()) | {"active": blas.report().active}
"""

# Which mapped file holds the cblas_sgemm that a library loaded from now on will call.
PROVIDER = """
def provider(name):
    function = getattr(ctypes.CDLL(None), name, None)
    if function is None:
        return None
    address = ctypes.cast(function, ctypes.c_void_p).value
    for line in open("/proc/self/maps"):
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return line.split(maxsplit=5)[5].strip()
found["provider"] = provider("cblas_sgemm")
found["scipy_names"] = provider("scipy_dgemm_") is not None
"""

PRODUCT = """
import time
import mlx.core as mx
import numpy as np
mx.set_default_device(mx.cpu)
rng = np.random.default_rng(0)
x = rng.standard_normal((64, 576), dtype=np.float32)
w = rng.standard_normal((1536, 576), dtype=np.float32)
mx_x, mx_w = mx.array(x), mx.array(w)
seconds = []
for _ in range(10):
    start = time.perf_counter()
    y = mx_x @ mx_w.T
    mx.eval(y)
    seconds.append(time.perf_counter() - start)
exact = x.astype(np.float64) @ w.T.astype(np.float64)
found["error"] = float(np.abs(np.array(y) - exact).max() / np.abs(exact).max())
found["best_s"] = min(seconds)
"""

PRINT = "\nprint(json.dumps(found))"


def clean_environment(**variables: str | Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in OUR_VARIABLES}
    return kept | {name: str(value) for name, value in variables.items()}


def in_fresh_process(code: str, **variables: str | Path) -> dict[str, Any]:
    """What the code left in `found`, with the process's stderr beside it."""
    run = subprocess.run(
        [sys.executable, "-c", code + PRINT],
        env=clean_environment(**variables),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1]) | {"stderr": run.stderr}


def files_in(cache: Path) -> list[Path]:
    return sorted((cache / "outrider" / "blas").iterdir())
