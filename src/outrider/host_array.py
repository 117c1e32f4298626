"""An array in host memory, for threads and files that do not use MLX."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class HostArray:
    """NumPy has no bfloat16: `data` holds such an array as 16-bit integers."""

    dtype: str  # the name in safetensors
    data: np.ndarray
