"""Environment variables of MLX whose defaults do not suit a server. Variables that the user has set stay.

On CUDA, MLX caches the graphs that it has launched, by their shapes. By default the cache holds 400 graphs,
and MLX raises an error after twice as many misses in the life of the process. A batch has a new shape
whenever rows join or end, drafts get longer or a context grows, so a server would reach that limit.

Nothing here may import mlx, directly or indirectly: MLX reads the variables when it is imported.
"""

import os

SERVER_SETTINGS = {  # cache sizes in entries; chosen by hand, well above the shapes of a busy server
    "MLX_CUDA_GRAPH_CACHE_SIZE": "2000",
    "MLX_CUDA_SDPA_CACHE_SIZE": "1000",
    "MLX_CUDA_CONV_CACHE_SIZE": "1000",
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
}


def activate() -> None:
    for name, value in SERVER_SETTINGS.items():
        os.environ.setdefault(name, value)
