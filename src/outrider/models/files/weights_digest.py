"""A digest of a model's weight files, from their sizes and from samples of their bytes.

Two machines compare it before they run one model together. A fine-tune has files of the same names and sizes
as its base, so bytes are compared too. Samples suffice: the files of another training differ everywhere. To
read them takes milliseconds, also for a model of hundreds of gigabytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

NUM_SAMPLES = 64  # of each file, at equal distances; chosen by hand
SAMPLE_BYTES = 4096
LENGTH = 24  # hex digits


def weights_digest(folder: Path) -> str:
    return files_digest(sorted(folder.glob("model*.safetensors")))


def files_digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for i in range(NUM_SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * i // (NUM_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:LENGTH]
