"""Copies the MTP head of an original checkpoint into a model folder that was converted without it.

Only the files that contain tensors of the head are fetched. Its bytes are copied unchanged, or its layers are
quantised and stored as a converter stores them. The new file appears when it is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from outrider.files.atomic import atomic_file
from outrider.files.safetensors import SafetensorsHeader, lay_out
from outrider.models.heads.errors import HeadError
from outrider.models.heads.head_files import (
    HEAD_FILES,
    TAKEN_FROM,
    HeadFiles,
    StoredTensor,
    find_head,
    read_config,
    search,
)
from outrider.models.heads.layouts import QWEN, HeadTensors, expected, recognise
from outrider.models.heads.loading import DRAFT_IDS, read_layers
from outrider.models.heads.norm_format import CONVERTED, PUBLISHED, is_as_published
from outrider.models.heads.originals import Original
from outrider.models.heads.quantization import Quantization, QuantizedLayers, quantize_layers
from outrider.models.loader import trunk_on_disk
from outrider.models.trunk import Trunk
from outrider.progress import Listener, Progress, ignore

COPIED_AT_ONCE = 8 << 20  # bytes; chosen by hand


@dataclass(frozen=True)
class Extracted:
    file: Path
    layout: str
    num_depths: int
    num_tensors: int
    num_bytes: int
    num_bytes_before: int  # in the original checkpoint
    quantized: QuantizedLayers | None = None  # by the paths of the new file


def extract(
    source: Original,
    into: Path,
    force: bool = False,
    progress: Listener = ignore,
    how: Quantization | None = None,
) -> Extracted:
    """Write `into`/mtp/weights.safetensors from the head of `source`. Refuses the head of another model.

    `how`: the format of quantised layers; None: all tensors are copied as they are.
    """
    target = _target(into, force)
    shards, config = source.shards(), source.config()
    named = _recognised(source, shards, config)
    _check_is_for(into, source, config, named)
    trunk = None if how is None else _trunk_for(into, source, named)
    files = [source.fetch(shard) for shard in sorted({shards[name] for name in named.targets})]
    head = search(files, files[0], config, is_inside=True)
    if head is None or head.stored.keys() != named.targets.keys():
        missing = sorted(named.targets.keys() - (head.stored.keys() if head else set()))
        raise HeadError(f"{source.name} is incomplete: its files do not hold {missing[0]}.")
    metadata = {TAKEN_FROM: source.name}
    if source.commit is not None:
        metadata["commit"] = source.commit
    layout, num_depths = named.layout.name, named.num_depths
    if how is None or trunk is None:
        _copy(target, head.stored, metadata | {"format": _format(head)}, progress)
        return Extracted(target, layout, num_depths, len(head.stored), head.num_bytes, head.num_bytes)
    tensors, quantized = _quantized(head, trunk, read_config(into), how)
    _write(target, tensors, metadata | {"format": CONVERTED} | quantized.metadata(), progress)
    num_bytes = sum(array.nbytes for array in tensors.values())
    return Extracted(target, layout, num_depths, len(tensors), num_bytes, head.num_bytes, quantized)


def _recognised(source: Original, shards: Mapping[str, str], config: Mapping[str, Any]) -> HeadTensors:
    named = recognise(shards, config)
    if named is not None and named.targets:
        return named
    if expected(config):
        reason = "was itself converted without its MTP head. Name the original checkpoint."
    else:
        reason = "has no MTP head of a known layout. Train one: outrider mtp train MODEL."
    raise HeadError(f"{source.name} {reason}")


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


def _trunk_for(into: Path, source: Original, head: HeadTensors) -> Trunk:
    """The trunk whose classes the head's layers have. Called before anything large is fetched."""
    packed = next((name for name in head.targets if name.endswith(".scales")), None)
    if packed is not None:
        raise HeadError(
            f"the head of {source.name} is quantised already: it has {packed}. Extract it without --bits."
        )
    return trunk_on_disk(into)


def _setting(config: Mapping[str, Any], key: str) -> Any:
    return config.get(key, (config.get("text_config") or {}).get(key))


def _format(head: HeadFiles) -> str:
    """ "pt" for published tensors, "mlx" for converted ones. Some families store their norms differently."""
    try:
        return PUBLISHED if is_as_published(head) else CONVERTED
    except HeadError:
        if head.tensors.layout is QWEN:
            raise
        return PUBLISHED


def _quantized(
    head: HeadFiles, trunk: Trunk, config: Mapping[str, Any], how: Quantization
) -> tuple[dict[str, mx.array], QuantizedLayers]:
    """The tensors of the new file, in the form of a converted model. Nothing is computed yet."""
    layers, draft_ids = read_layers(head, trunk, config)
    tensors: dict[str, mx.array] = {}
    formats = []
    for depth, layer in enumerate(layers):
        name = partial(_stored_name, head, depth)
        formats.append(quantize_layers(layer, how, trunk).renamed(name))
        parameters: dict[str, mx.array] = dict(tree_flatten(layer.parameters()))
        if not head.tensors.layout.spec.has_norm:
            del parameters["norm.weight"]  # the trunk's
        tensors |= {name(ours): array for ours, array in parameters.items()}
    if draft_ids is not None:
        tensors[_stored_name(head, None, DRAFT_IDS)] = draft_ids
    return tensors, reduce(QuantizedLayers.plus, formats)


def _stored_name(head: HeadFiles, depth: int | None, ours: str) -> str:
    """The name of a parameter in the original checkpoint, or the name that it would have there."""
    for name, target in head.tensors.targets.items():
        if target in ((depth, ours), (None, ours)):
            return name
    return head.tensors.original(depth or 0, ours)


def _write(
    target: Path, tensors: dict[str, mx.array], metadata: Mapping[str, str], progress: Listener
) -> None:
    try:
        for number, array in enumerate(tensors.values(), 1):  # one by one: they need less memory
            mx.eval(array)
            progress(Progress("Quantising the head", number, len(tensors), "tensors"))
        target.parent.mkdir(exist_ok=True)
        with atomic_file(target) as file:
            mx.save_safetensors(file, tensors, metadata=dict(metadata))
    except (OSError, RuntimeError) as error:  # a RuntimeError is MLX's
        reason = getattr(error, "strerror", None) or error
        raise HeadError(f"{target} cannot be written: {reason}.") from error


def _copy(
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
