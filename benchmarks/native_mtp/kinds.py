"""The servers that draft with an MTP head: how each is started with MTP and without it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import MLX_LAUNCHER
from benchmarks.server_process import Peer

VERSION = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
RAPID_MTP = '{"method": "mtp", "model": "FOLDER", "num_speculative_tokens": 3}'
RAPID_CONTINUOUS = f'{RAPID_MTP[:-1]}, "continuous_batching": true, "allow_dynamic_membership": true}}'


@dataclass(frozen=True)
class Kind:
    """FOLDER, ROWS and PORT in the words are replaced. `package`: the one whose version is shown."""

    title: str
    package: str
    words: tuple[str, ...]  # the module to run, and its arguments
    with_mtp: tuple[str, ...]
    plain: tuple[str, ...] = ()


SERVE = ("--host", "127.0.0.1", "--port", "PORT")
VLLM_MLX = ("vllm_mlx.cli", "serve", "FOLDER", *SERVE, "--continuous-batching", "--max-num-seqs", "ROWS")
RAPID_MLX = ("rapid_mlx.cli", "serve", "FOLDER", *SERVE, "--max-num-seqs", "ROWS", "--disable-prefix-cache")
OUTRIDER = Kind(
    "Outrider",
    "outrider",
    (
        *("outrider", "serve", "FOLDER", *SERVE, "--served-model-name", "FOLDER", "--max-rows", "ROWS"),
        *("--log-level", "warning", "--no-supervisor"),  # so that the process is the server
    ),
    ("--mtp", "on"),
    ("--mtp", "off"),
)
# Prompt caches are off where a flag allows it: every prompt is computed, as by Outrider.
PEERS: dict[str, Kind] = {
    "vllm-mlx": Kind(
        "vllm-mlx", "vllm-mlx", (*VLLM_MLX, "--disable-prefix-cache", "--mllm"), ("--enable-mtp",)
    ),
    "vllm-mlx-text": Kind(
        "vllm-mlx without --mllm", "vllm-mlx", (*VLLM_MLX, "--disable-prefix-cache"), ("--enable-mtp",)
    ),
    "mlx-vlm": Kind(
        "mlx-vlm",
        "mlx-vlm",
        ("mlx_vlm.server", "--model", "FOLDER", *SERVE, "--max-num-seqs", "ROWS"),
        ("--draft-model", "FOLDER", "--draft-kind", "mtp"),
    ),
    "rapid-mlx": Kind("Rapid-MLX", "rapid-mlx", RAPID_MLX, ("--speculative-config", RAPID_MTP)),
    # Its MTP in batches is refused for models that are not in its catalogue, unless it is forced.
    "rapid-mlx-forced": Kind(
        "Rapid-MLX (--force-spec-decode)",
        "rapid-mlx",
        RAPID_MLX,
        ("--force-spec-decode", "--speculative-config", RAPID_CONTINUOUS),
    ),
    "mtplx": Kind(
        "MTPLX",
        "mtplx",
        ("mtplx.cli", "serve", "--model", "FOLDER", *SERVE),
        ("--generation-mode", "mtp"),
        ("--generation-mode", "ar"),
    ),
    "optiq": Kind("OptiQ", "mlx-optiq", ("optiq.cli", "serve", "--model", "FOLDER", *SERVE), ("--mtp",)),
}


def peer_of(
    kind: Kind, python: str, folder: Path, num_rows: int, has_mtp: bool, environ: Mapping[str, str]
) -> Peer:
    """`environ`: for the servers of others."""
    words = [*kind.words, *(kind.with_mtp if has_mtp else kind.plain)]
    filled = [word.replace("FOLDER", str(folder)).replace("ROWS", str(num_rows)) for word in words]
    name = f"{kind.title}{', MTP' if has_mtp else ', plain'}"
    if kind is OUTRIDER:
        return Peer(name, [python, "-m", *filled], is_outrider=True)
    return Peer(name, [python, str(MLX_LAUNCHER), *filled], dict(environ))


def version_of(kind: Kind, python: str) -> str | None:
    """None if the package is not installed there, or if there is no such Python."""
    try:
        found = subprocess.run(
            [python, "-c", VERSION, kind.package], capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() if found.returncode == 0 else None


def read_choice(text: str) -> tuple[str, str]:
    """NAME or NAME=PYTHON, as name and Python; this process's Python by default. ValueError: unknown."""
    name, _, python = text.partition("=")
    if name not in PEERS:
        raise ValueError(f"{name}: unknown server; known are {', '.join(PEERS)}")
    return name, python or sys.executable
