"""Environment variables of MLX whose defaults do not suit a server. Variables that the user has set stay.

On CUDA, MLX collects operations in CUDA graphs, and finds a graph that it has launched before by its nodes.
Whether a buffer can be overwritten or has to be copied depends on what the device has finished by then. So
the nodes of a step differ from time to time, and each new graph takes 1 to 3 ms to instantiate: 2 to 4 of
them in a step of a 27B model with drafts, which took 30 ms instead of 15 (docs/LOG.md, "CUDA graphs").

For users who switch graphs on again: by default MLX caches 400 of them, and raises an error after twice as
many misses in the life of the process. A batch has a new shape whenever rows join or end, drafts get longer
or a context grows, so a server would reach that limit.

Nothing here may import mlx, directly or indirectly: MLX reads the variables when it is imported, or when it
first computes something.
"""

import os
import sys

SERVER_SETTINGS = {  # cache sizes in entries; chosen by hand, well above the shapes of a busy server
    "MLX_USE_CUDA_GRAPHS": "0",
    "MLX_CUDA_GRAPH_CACHE_SIZE": "2000",
    "MLX_CUDA_SDPA_CACHE_SIZE": "1000",
    "MLX_CUDA_CONV_CACHE_SIZE": "1000",
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
}


_was_early = True  # the settings were made before MLX had computed anything


def activate() -> None:
    global _was_early
    mlx = sys.modules.get("mlx.core")
    _was_early = mlx is None or mlx.get_peak_memory() == 0
    for name, value in SERVER_SETTINGS.items():
        os.environ.setdefault(name, value)


def has_cuda_graphs() -> bool:
    """False if MLX surely launches operations one by one."""
    return not _was_early or os.environ.get("MLX_USE_CUDA_GRAPHS") != "0"
