"""Writes a copy of a model in float32, not quantised.

MLX's quantised and 16-bit matrix products are very slow on CPUs, and other servers load a folder as it is.
With this copy all servers multiply the same numbers.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from outrider.models import loader
from outrider.models.heads import find_head, locate
from outrider.models.heads.extract import extract
from outrider.models.heads.originals import LocalOriginal

REMOVED_KEYS = ("quantization", "quantization_config")
LANGUAGE_MODEL = "language_model."  # before the names of weights in mlx-lm's vision families, such as Qwen3.5


def write_float32_copy(model: str | Path, folder: Path) -> Path:
    """Writes into `folder`, with the tokenizer, the other small files and the MTP head.

    The head keeps its dtype. A head inside the checkpoint is written into a head file beside the copy.
    """
    loaded = loader.load(model, "float32")
    folder.mkdir(parents=True)
    for file in loaded.path.iterdir():
        if file.is_dir():
            shutil.copytree(file, folder / file.name)
        elif ".safetensors" not in file.name or file == find_head(loaded.path):
            shutil.copy(file, folder)
    config = {name: value for name, value in loaded.config.items() if name not in REMOVED_KEYS}
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}, indent=2))
    prefix = LANGUAGE_MODEL if _has_wrapper(loaded.path) else ""
    weights = {prefix + name: array for name, array in tree_flatten(loaded.trunk.model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    head = locate(loaded.path)
    if head is not None and head.is_inside:
        extract(LocalOriginal(loaded.path), folder)
    return folder


def _has_wrapper(folder: Path) -> bool:
    """True if the weights are those of a language model within another model."""
    files = folder.glob("*.safetensors")
    return any(LANGUAGE_MODEL in name for file in files for name in mx.load(str(file)))
