"""The machine and the package versions of a benchmark, for its record."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from outrider import __version__
from outrider.cpu import blas

PACKAGES = ("mlx", "mlx-lm", "numpy", "transformers", "llguidance", "uvicorn", "scipy-openblas32")


def environment() -> dict[str, Any]:
    return {
        "outrider": __version__,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_name(),
        "num_cpus": os.cpu_count(),
        "blas": str(blas.report()),
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
    }


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
