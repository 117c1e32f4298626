"""An array in host memory, for threads and files that know no MLX."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class HostArray:
    """bfloat16, which numpy has not, as the 16-bit integers that it is made of."""

    dtype: str  # as safetensors names it
    data: np.ndarray
