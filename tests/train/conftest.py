"""One tiny model that talks, and a head trained for it as a user would, for all tests here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from patience import PATIENCE_S

TESTS = Path(__file__).parents[1]
TRAIN_OPTIONS = {"conversations": 60, "steps": 60, "batch-tokens": 256, "max-tokens": 48, "seed": 1}
# `import outrider` first: a process of its own has the fast BLAS, which must be there before MLX is.
WRITE_MODEL = "import sys, outrider, talking_model; talking_model.write_talking_model(sys.argv[1], 'llama')"


@dataclass(frozen=True)
class Trained:
    folder: Path
    head: Path
    stdout: str
    stderr: str


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without a head."""
    folder = tmp_path_factory.mktemp("talker") / "tiny-talker"
    places = [str(TESTS), str(TESTS / "train"), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-c", WRITE_MODEL, str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
    subprocess.run(command, env=environment, check=True, timeout=4 * PATIENCE_S)
    return folder


@pytest.fixture(scope="session")
def trained(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The same model with a head that `outrider mtp train` has put beside it."""
    folder = tmp_path_factory.mktemp("trained") / "tiny-talker"
    shutil.copytree(talker, folder)
    command = [sys.executable, "-m", "outrider", "mtp", "train", str(folder)]
    command += [word for name, value in TRAIN_OPTIONS.items() for word in (f"--{name}", str(value))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=4 * PATIENCE_S)
    assert result.returncode == 0, result.stderr
    return Trained(folder, folder / "mtp" / "weights.safetensors", result.stdout, result.stderr)
