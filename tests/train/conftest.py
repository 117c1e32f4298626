"""One tiny model that talks, and a head trained for it as a user would, for all tests here."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from patience import PATIENCE_S
from train.talking_model import write_talking_model
from train.trained_head import TRAIN_OPTIONS, Trained


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without a head."""
    folder = tmp_path_factory.mktemp("talker") / "tiny-talker"
    write_talking_model(folder, "llama")
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
