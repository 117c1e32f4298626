"""Outrider's cache folder. Models, measured step costs and compiled libraries are stored under it.

Must not import mlx: cpu/blas.py needs the folder before mlx is imported.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import platformdirs


def cache_folder() -> Path:
    """`$OUTRIDER_CACHE`, else the platform's cache folder. RuntimeError: the user has no home folder."""
    if chosen := os.environ.get("OUTRIDER_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        # Before platformdirs, Outrider ignored XDG_CACHE_HOME on macOS. Models of that time are here.
        earlier = Path.home() / "Library" / "Caches" / "outrider"
        if earlier.is_dir():
            return earlier
    return Path(platformdirs.user_cache_dir("outrider", appauthor=False)).expanduser()
