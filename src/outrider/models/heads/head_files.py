"""Where a model's head is stored: in a file beside the model, or among the tensors of the checkpoint itself.

Reads the headers of safetensors files, never a weight.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.files import safetensors
from outrider.models.drafter_kinds import drafter_kind
from outrider.models.heads.errors import HeadError
from outrider.models.heads.layouts import HeadTensors, recognise

QUANTIZATION = "head_quantization"  # the key of the formats of quantised layers in a head file's metadata
TAKEN_FROM = "taken_from"  # the key of the original checkpoint in the metadata of a head that `extract` wrote
# Where tools store a head beside a model: Outrider and vllm-mlx, MTPLX, Rapid-MLX, OptiQ.
HEAD_FILES = ("mtp/weights.safetensors", "mtp.safetensors", "mtp/model.safetensors", "optiq/mtp.safetensors")


@dataclass(frozen=True)
class StoredTensor:
    file: Path
    dtype: str  # as safetensors writes it: BF16, F8_E4M3, U32, ...
    shape: tuple[int, ...]
    num_bytes: int
    begin: int  # where its bytes start in the file


@dataclass(frozen=True)
class HeadFiles:
    """A head that was found: its tensors and their files."""

    source: Path  # the file beside the model, or the folder of the checkpoint that contains the head
    is_inside: bool  # True: among the checkpoint's own tensors
    tensors: HeadTensors
    stored: Mapping[str, StoredTensor]  # by the checkpoint's names, only the head's
    metadata: Mapping[str, str]  # of the head's files
    conv_is_raw: bool | None  # True: the checkpoint stores convolutions as PyTorch does; None: it has none
    is_apart: bool = False  # True: in files of its own, whose format is not that of the trunk's files

    @property
    def files(self) -> dict[Path, list[str]]:
        """The head's tensors by file."""
        found: dict[Path, list[str]] = {}
        for name, tensor in self.stored.items():
            found.setdefault(tensor.file, []).append(name)
        return found

    @property
    def dtypes(self) -> frozenset[str]:
        return frozenset(tensor.dtype for tensor in self.stored.values())

    @property
    def quantization(self) -> dict[str, Any] | None:
        """The formats of quantised layers that a head file declares, in the form of mlx-lm's config entry."""
        if QUANTIZATION not in self.metadata:
            return None
        try:
            found = json.loads(self.metadata[QUANTIZATION])
            formats = [found, *(entry for entry in found.values() if isinstance(entry, dict))]
            for entry in formats:
                entry["bits"], entry["group_size"] = int(entry["bits"]), int(entry["group_size"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise HeadError(
                f'the metadata "{QUANTIZATION}" of {self.source} cannot be read: {error!r}'
            ) from error
        return dict(found)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.stored.values())


def find_head(model_folder: Path) -> Path | None:
    """The head file beside a model, if there is one."""
    named = named_by_config(model_folder)
    candidates = [*([named] if named is not None else []), *(model_folder / name for name in HEAD_FILES)]
    return next((file for file in candidates if file.is_file()), None)


def named_by_config(model_folder: Path) -> Path | None:
    """The head file that config.json names, as MTPLX and OptiQ write it; None if it is outside the folder."""
    entry = read_config(model_folder).get("mlx_lm_extra_tensors")
    name = entry.get("mtp_file") if isinstance(entry, dict) else None
    if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
        return None
    return model_folder / name


def separate_drafter(model_folder: Path) -> Path | None:
    """The folder that `mlx_vlm convert --mtp` writes beside a model, if there is one with a head."""
    folder = model_folder.with_name(f"{model_folder.name}-mtp")
    try:
        return folder if folder.is_dir() and locate(folder) is not None else None
    except HeadError:
        return None


def locate(folder: Path) -> HeadFiles | None:
    """The head of the model in this folder: in a head file, else inside the checkpoint; None: no head."""
    config = read_config(folder)
    beside = find_head(folder)
    if beside is not None:
        return locate_file(beside, config)
    return search(sorted(folder.glob("*.safetensors")), folder, config, is_inside=True)


def locate_file(file: Path, config: Mapping[str, Any] | None = None) -> HeadFiles:
    """The head in this file, or of the model or drafter in this folder. `config` is that of its model."""
    if file.is_dir():
        within = locate(file)
        if within is None:
            kind = drafter_kind(read_config(file))
            what = "" if kind is None else f" It is {kind}, which Outrider does not serve yet."
            raise HeadError(
                f"{file} contains no MTP head, neither as a head file nor inside a checkpoint.{what}"
            )
        return within
    if not file.is_file():
        raise HeadError(f"{file}: no such head file.")
    found = search([file], file, config or {}, is_inside=False)
    if found is None:
        raise HeadError(f"{file} contains no MTP head of a known layout (mtp.*, nextn layers, ...).")
    return found


def read_config(folder: Path) -> dict[str, Any]:
    """The model's config.json; empty if it is missing or cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def search(files: list[Path], source: Path, config: Mapping[str, Any], is_inside: bool) -> HeadFiles | None:
    """The head among the tensors of these files."""
    stored: dict[str, StoredTensor] = {}
    metadata: dict[Path, Mapping[str, str]] = {}
    for file in files:
        found, metadata[file] = read_header(file)
        stored.update(found)
    tensors = recognise(stored, config)
    if tensors is None or not tensors.targets:
        return None
    head = {name: stored[name] for name in tensors.targets}
    notes = {key: value for one in head.values() for key, value in metadata[one.file].items()}
    # PyTorch stores a depthwise convolution as [channels, 1, kernel], MLX as [channels, kernel, 1].
    shapes = [one.shape for name, one in stored.items() if name.endswith("conv1d.weight")]
    conv_is_raw = any(shape[-1] != 1 for shape in shapes) if shapes else None
    is_apart = _is_apart(stored, tensors, metadata)
    return HeadFiles(source, is_inside, tensors, head, notes, conv_is_raw, is_apart)


def _is_apart(
    stored: Mapping[str, StoredTensor], tensors: HeadTensors, metadata: Mapping[Path, Mapping[str, str]]
) -> bool:
    """True if the head was written by another tool: alone in its files, in another format than the trunk."""
    own = {one.file for name, one in stored.items() if name in tensors}
    others = {one.file for name, one in stored.items() if name not in tensors}
    formats, other_formats = ({metadata[file].get("format") for file in files} for files in (own, others))
    return own.isdisjoint(others) and None not in formats and formats.isdisjoint(other_formats)


def read_header(file: Path) -> tuple[dict[str, StoredTensor], Mapping[str, str]]:
    """The tensors of a safetensors file, and its metadata."""
    try:
        with open(file, "rb") as stream:
            header = safetensors.read_header(stream)
    except (OSError, safetensors.InvalidSafetensors) as error:
        raise HeadError(f"{file} cannot be read as safetensors: {error}.") from error
    stored = {
        name: StoredTensor(file, info.dtype, info.shape, info.num_bytes, header.data_begin + info.begin)
        for name, info in header.tensors.items()
    }
    return stored, header.metadata
