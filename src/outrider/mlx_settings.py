"""MLX's own settings where its defaults do not suit a server. What the user has set stays.

On CUDA, MLX keeps the graphs that it has launched, by their shape, and raises an error once it has missed
more than twice as often as it has places, 400, in all its life. A batch brings a new shape whenever rows
join or end, drafts are longer or a context has grown, so a server would come to that.

Nothing here may import mlx, directly or not: it reads these once.
"""

import os

FOR_A_SERVER = {
    "MLX_CUDA_GRAPH_CACHE_SIZE": "2000",
    "MLX_CUDA_SDPA_CACHE_SIZE": "1000",
    "MLX_CUDA_CONV_CACHE_SIZE": "1000",
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
}


def activate() -> None:
    for name, value in FOR_A_SERVER.items():
        os.environ.setdefault(name, value)
