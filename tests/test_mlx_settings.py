"""MLX is set up for a server when outrider is imported, unless the user has set it up."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from outrider.mlx_settings import SERVER_SETTINGS

SHOW = """
import os, json, sys, outrider
assert "mlx.core" not in sys.modules, "MLX may have read its settings before they were made"
print(json.dumps(dict(os.environ)))
"""


def environment_after_import(**own: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MLX_")}
    shown = subprocess.run([sys.executable, "-c", SHOW], env=clean | own, capture_output=True, check=True)
    found: dict[str, str] = json.loads(shown.stdout)
    return found


def test_settings_are_made_before_mlx_is_imported() -> None:
    assert environment_after_import().items() >= SERVER_SETTINGS.items()


WITH_GRAPHS = """
import mlx.core as mx
{work}
from outrider.mlx_settings import has_cuda_graphs
print(has_cuda_graphs())
"""


def test_graphs_count_as_off_only_if_mlx_has_not_computed_before() -> None:
    found = {}
    for work in ("", "mx.eval(mx.ones(3))"):
        run = [sys.executable, "-c", WITH_GRAPHS.format(work=work)]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MLX_")}
        shown = subprocess.run(run, env=clean, capture_output=True, check=True, text=True)
        found[work] = shown.stdout.strip()
    assert list(found.values()) == ["False", "True"]


def test_what_the_user_has_set_stays() -> None:
    found = environment_after_import(MLX_CUDA_GRAPH_CACHE_SIZE="7", MLX_USE_CUDA_GRAPHS="1")
    assert found["MLX_CUDA_GRAPH_CACHE_SIZE"] == "7"
    assert found["MLX_USE_CUDA_GRAPHS"] == "1"
    assert found["MLX_ENABLE_CACHE_THRASHING_CHECK"] == "0"
