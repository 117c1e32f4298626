"""Copies the MTP head of an original checkpoint into a model folder that was converted without it.

Only the files that contain tensors of the head are fetched, and only its bytes are copied, unchanged. The new
file appears when it is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.files.atomic import atomic_file
from outrider.files.safetensors import SafetensorsHeader, lay_out
from outrider.models.heads.errors import HeadError
from outrider.models.heads.head_files import (
    HEAD_FILES,
    HeadFiles,
    StoredTensor,
    find_head,
    read_config,
    search,
)
from outrider.models.heads.layouts import QWEN, HeadTensors, expected, recognise
from outrider.models.heads.originals import Original
from outrider.models.heads.weights import is_as_published
from outrider.progress import Listener, Progress, ignore

COPIED_AT_ONCE = 8 << 20  # bytes; chosen by hand


@dataclass(frozen=True)
class Extracted:
    file: Path
    layout: str
    num_depths: int
    num_tensors: int
    num_bytes: int


def extract(source: Original, into: Path, force: bool = False, progress: Listener = ignore) -> Extracted:
    """Write `into`/mtp/weights.safetensors from the head of `source`. Refuses the head of another model."""
    target = _target(into, force)
    shards, config = source.shards(), source.config()
    named = recognise(shards, config)
    if named is None or not named.targets:
        if expected(config):
            reason = "was itself converted without its MTP head. Name the original checkpoint."
        else:
            reason = "has no MTP head of a known layout. Train one: outrider mtp train MODEL."
        raise HeadError(f"{source.name} {reason}")
    _check_is_for(into, source, config, named)
    files = [source.fetch(shard) for shard in sorted({shards[name] for name in named.targets})]
    head = search(files, files[0], config, is_inside=True)
    if head is None or head.stored.keys() != named.targets.keys():
        missing = sorted(named.targets.keys() - (head.stored.keys() if head else set()))
        raise HeadError(f"{source.name} is incomplete: its files do not hold {missing[0]}.")
    metadata = {"format": _format(head), "taken_from": source.name}
    if source.commit is not None:
        metadata["commit"] = source.commit
    _write(target, head.stored, metadata, progress)
    return Extracted(target, named.layout.name, named.num_depths, len(head.stored), head.num_bytes)


def _target(into: Path, force: bool) -> Path:
    if not (into / "config.json").is_file():
        raise HeadError(f"{into} is not a model folder: it has no config.json.")
    found = find_head(into)
    if found is not None and not force:
        raise HeadError(f"{found} exists already. Replace it with --force.")
    return found or into / HEAD_FILES[0]


def _check_is_for(into: Path, source: Original, config: Mapping[str, Any], head: HeadTensors) -> None:
    """Compare the configs: the hidden sizes, and for layouts that follow the trunk the numbers of layers."""
    model = read_config(into)
    keys = ["hidden_size", *(["num_hidden_layers"] if head.layout.follows_trunk else [])]
    for key in keys:
        ours, theirs = _setting(model, key), _setting(config, key)
        if ours != theirs:
            raise HeadError(
                f"{source.name} is the original of another model: its {key} is {theirs}, "
                f"that of {into} is {ours}."
            )


def _setting(config: Mapping[str, Any], key: str) -> Any:
    return config.get(key, (config.get("text_config") or {}).get(key))


def _format(head: HeadFiles) -> str:
    """ "pt" for published tensors, "mlx" for converted ones. Some families store their norms differently."""
    try:
        return "pt" if is_as_published(head) else "mlx"
    except HeadError:
        if head.tensors.layout is QWEN:
            raise
        return "pt"


def _write(
    target: Path, stored: Mapping[str, StoredTensor], metadata: Mapping[str, str], progress: Listener
) -> None:
    tensors = lay_out((name, one.dtype, one.shape, one.num_bytes) for name, one in stored.items())
    header = SafetensorsHeader(tensors, metadata)
    total = sum(tensor.num_bytes for tensor in stored.values())
    done = 0
    try:
        target.parent.mkdir(exist_ok=True)
        with atomic_file(target) as file:
            file.write(header.encode())
            for tensor in stored.values():
                for chunk in _chunks(tensor):
                    file.write(chunk)
                    done += len(chunk)
                    progress(Progress("Copying the head", done, total))
    except OSError as error:
        raise HeadError(f"{target} cannot be written: {error.strerror or error}.") from error


def _chunks(tensor: StoredTensor) -> Iterator[bytes]:
    left = tensor.num_bytes
    with open(tensor.file, "rb") as shard:
        shard.seek(tensor.begin)
        while left:
            chunk = shard.read(min(left, COPIED_AT_ONCE))
            if not chunk:
                raise HeadError(f"{tensor.file} is cut short.")
            left -= len(chunk)
            yield chunk
