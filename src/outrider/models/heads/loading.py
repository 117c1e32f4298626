"""Loads a head from a file or a checkpoint. Refuses a head that does not fit, with the name of the tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from outrider.cpu.quantized import whole_tiles
from outrider.models.dtypes import settle_dtype
from outrider.models.heads import weights
from outrider.models.heads.blocks import Block, BlockHints, families, new_block, norm_eps
from outrider.models.heads.division import divide
from outrider.models.heads.errors import HeadError, UnknownHead
from outrider.models.heads.head_files import HeadFiles, locate_file
from outrider.models.heads.layouts import BLOCK, HeadSpec
from outrider.models.heads.module import MTPHead, head_layout
from outrider.models.heads.norm_format import QUANTISED, is_as_published
from outrider.models.heads.quantization import WrongTensor, dtype_name, quantize_as_stored
from outrider.models.layer_swaps import swap_layers
from outrider.models.trunk import Trunk

DRAFT_IDS = "draft_ids"
Tensors = dict[str, mx.array]


@dataclass(frozen=True)
class LoadedHead:
    layers: tuple[MTPHead, ...]  # one for each depth; deeper drafts use the last layer again
    source: str
    draft_ids: mx.array | None = None  # the reduced draft vocabulary, if the head has one
    is_divided: bool = False  # this is one rank's part of it

    @property
    def spec(self) -> HeadSpec:
        return self.layers[0].spec

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return self.layers

    @property
    def cell_facts(self) -> object:
        """What its cells depend on, beside its weights."""
        return (self.spec, "divided") if self.is_divided else self.spec

    @property
    def weight_files(self) -> list[Path]:
        return [Path(self.source)]

    def prepare_for_serving(self, trunk: Trunk) -> None:
        """Swap layers for speed. Weights must not be changed afterwards."""
        for layer in self.layers:
            swap_layers(layer, dry_run=partial(head_layout, layer, trunk))


def new_head(trunk: Trunk, spec: HeadSpec | None = None) -> MTPHead:
    """A head of one depth with random weights, with a decoder layer of the trunk's own kind."""
    return _new_depth(trunk, spec or HeadSpec(), BlockHints())[0]


def load_head(
    source: Path | HeadFiles,
    trunk: Trunk,
    draft_vocabulary: int | None = None,
    config: Mapping[str, Any] | None = None,
    dtype: str = "auto",
    group: mx.distributed.Group | None = None,
) -> LoadedHead:
    """Read a head of any known layout, published or converted. Quantised layers stay quantised on a GPU.

    `source` is a head file, a folder, or a result of `locate`. `config` is the trunk's config.json, `dtype`
    the trunk's. `draft_vocabulary` limits drafts to that many of the most frequent ids. `group`: keep this
    rank's part of the head only; raises HeadNotDivisible.
    """
    files = _located(source, trunk, config or {})
    layers, draft_ids = read_layers(files, trunk, config)
    if group is not None:
        divide(layers, trunk, group)
    for layer in layers:
        settle_dtype(layer, dtype, trunk.dtype)
    if draft_ids is None and not files.is_inside:
        draft_ids = _draft_ids_beside(files.source)
    # Another rank may have a part of the output projection only: rank 0 checks the ids.
    vocab_size = trunk.vocab_size if group is None or group.rank() == 0 else None
    reduced = _reduced(draft_ids, draft_vocabulary, vocab_size)
    return LoadedHead(layers, str(files.source), reduced, is_divided=group is not None)


def read_layers(
    files: HeadFiles, trunk: Trunk, config: Mapping[str, Any] | None
) -> tuple[tuple[MTPHead, ...], mx.array | None]:
    """The modules of all depths and the draft ids, in the dtypes of the files. No weight is read yet."""
    stored = _read(files)
    draft_ids = stored.pop(DRAFT_IDS, None)
    _check_is_for(trunk, files)
    num_depths = files.tensors.num_depths
    return tuple(_load_depth(files, stored, trunk, config, depth) for depth in range(num_depths)), draft_ids


def _located(source: Path | HeadFiles, trunk: Trunk, config: Mapping[str, Any]) -> HeadFiles:
    if isinstance(source, HeadFiles):
        return source
    return locate_file(source, config or {"num_hidden_layers": len(trunk.model.layers)})


def _read(files: HeadFiles) -> Tensors:
    """The head's tensors by the checkpoint's names, memory-mapped; the draft ids under DRAFT_IDS."""
    found: Tensors = {}
    for file, names in files.files.items():
        try:
            arrays: Tensors = mx.load(str(file))  # type: ignore[assignment]
        except RuntimeError as error:
            raise HeadError(f"{file} cannot be read as safetensors: {error}") from error
        found |= {name: arrays[name] for name in names}
    for name, (_, ours) in files.tensors.targets.items():
        if ours == DRAFT_IDS:
            found[DRAFT_IDS] = found.pop(name)
    return found


def _load_depth(
    files: HeadFiles, stored: Tensors, trunk: Trunk, config: Mapping[str, Any] | None, depth: int
) -> MTPHead:
    targets = files.tensors.targets
    own = {targets[name][1]: array for name, array in stored.items() if targets[name][0] in (None, depth)}
    try:
        tensors = weights.stacked(weights.dequantised_fp8(own))
    except KeyError as error:
        raise _incomplete_head(files, files.tensors.original(depth, error.args[0])) from error
    in_block = {name.removeprefix(BLOCK) for name in tensors if name.startswith(BLOCK)}
    module, block = _new_depth(trunk, files.tensors.layout.spec, BlockHints(in_block, config, depth))
    tensors = _sanitized(files, tensors, module, block, trunk, depth)
    tensors = _with_norms(files, tensors, trunk)
    try:
        quantize_as_stored(module, tensors)
    except WrongTensor as error:
        name = files.tensors.original(depth, error.name)
        raise HeadError(f"{files.source} cannot be used: {name} {error.problem}.") from error
    _check_parameters(files, module, tensors, depth)
    _check_formats(files, module, depth)
    module.load_weights(list(tensors.items()))
    return module


def _new_depth(trunk: Trunk, spec: HeadSpec, hints: BlockHints) -> tuple[MTPHead, Block]:
    block = new_block(trunk, hints)
    eps = norm_eps(trunk.model)
    head = MTPHead(spec, trunk.hidden_size, eps, block.module, block.new_cache)
    swap_layers(head, trunk.mrope)
    head.eval()
    return head, block


def _sanitized(
    files: HeadFiles, tensors: Tensors, module: MTPHead, block: Block, trunk: Trunk, depth: int
) -> Tensors:
    """The tensors with the block's names and shapes as the module has them.

    Zero-centred norms are left out of the family's `sanitize`: `_with_norms` alone decides whether to add 1.
    """
    if _plain_names(tensors) == _plain_names(_parameters(module)):
        return tensors
    raw = {
        name: array
        for name, array in tensors.items()
        if name.startswith(BLOCK) and not weights.is_zero_centred(trunk.model, name)
    }
    rest = {name: array for name, array in tensors.items() if name not in raw}
    try:
        found = weights.sanitized(
            trunk.model, block, {name.removeprefix(BLOCK): array for name, array in raw.items()}
        )
    except KeyError as error:
        missing = str(error.args[0])
        for ours, theirs in block.aliases:
            missing = missing.replace(theirs, BLOCK + ours)
        raise _incomplete_head(files, files.tensors.original(depth, missing)) from error
    return rest | {BLOCK + name: array for name, array in found.items()}


def _plain_names(tensors: Mapping[str, mx.array]) -> set[str]:
    return {name for name in tensors if not name.endswith(QUANTISED)}


def _with_norms(files: HeadFiles, tensors: Tensors, trunk: Trunk) -> Tensors:
    """Add 1 to published zero-centred norms. A head without a final norm gets the trunk's."""
    centred = [name for name in tensors if weights.is_zero_centred(trunk.model, name)]
    if centred and is_as_published(files):
        tensors = tensors | {name: tensors[name].astype(mx.float32) + 1 for name in centred}
    if not files.tensors.layout.spec.has_norm:
        tensors = tensors | {"norm.weight": trunk.inner.norm.weight}
    return tensors


def _parameters(module: nn.Module) -> Tensors:
    return dict(tree_flatten(module.parameters()))


# -- checks ----------------------------------------------------------------------------------------------


def _check_is_for(trunk: Trunk, files: HeadFiles) -> None:
    """Refuse a head of another model by its layout, numbers and norms."""
    layout, family = files.tensors.layout, families(trunk.model)
    if layout.families and family.isdisjoint(layout.families):
        raise UnknownHead(
            f"{files.source} is a head for another model, or of an unknown kind: its layout belongs to "
            f"{', '.join(sorted(layout.families))}, and this model is a {trunk.model.model_type}."
        )
    first = min((depth for depth, _ in files.tensors.targets.values() if depth is not None), default=0)
    if first > 0 and layout.follows_trunk:
        raise HeadError(
            f"{files.source} is a head for another model: it is stored as layer "
            f"{files.tensors.first + first}, after the last of a trunk, and this model has "
            f"{len(trunk.model.layers)} layers."
        )
    for name, (_, ours) in files.tensors.targets.items():
        if weights.NORM.search(ours) and ours.count(".") == 1:
            (size,) = files.stored[name].shape[-1:] or (0,)
            if size != trunk.hidden_size:
                raise HeadError(
                    f"{files.source} is a head for another model: {name} is "
                    f"{list(files.stored[name].shape)}, this model's hidden size is {trunk.hidden_size}."
                )


def _incomplete_head(files: HeadFiles, name: str, count: str = "") -> HeadError:
    return HeadError(
        f"{files.source} is only part of a head: {name} is missing{count}. Copy the whole head from the "
        "original checkpoint (outrider mtp extract ORIGINAL --into MODEL_DIR), or serve without it: "
        '--drafter none, drafter="none".'
    )


def _check_parameters(files: HeadFiles, module: MTPHead, tensors: Tensors, depth: int) -> None:
    parameters = _parameters(module)
    missing = sorted(parameters.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - parameters.keys())
    if missing:
        count = f" ({len(missing)} of {len(parameters)} are)"
        raise _incomplete_head(files, files.tensors.original(depth, missing[0]), count)
    if unknown:
        name = files.tensors.original(depth, unknown[0])
        raise HeadError(f"{files.source} contains {name}, which this family's head does not have.")
    for name, array in parameters.items():
        if tensors[name].shape != array.shape:
            raise HeadError(
                f"{files.source} is a head for another model: {files.tensors.original(depth, name)} is "
                f"{list(tensors[name].shape)}, this model needs {list(array.shape)}."
            )
        if mx.issubdtype(array.dtype, mx.floating) and not mx.issubdtype(tensors[name].dtype, mx.floating):
            raise HeadError(
                f"{files.source} cannot be used: {files.tensors.original(depth, name)} is "
                f"{dtype_name(tensors[name])}, and there are no scales for it."
            )


def _check_formats(files: HeadFiles, module: MTPHead, depth: int) -> None:
    """Compare the formats of quantised layers with those that the metadata of a head file declares."""
    declared = files.quantization
    if declared is None:
        return
    for path, layer in module.named_modules():
        if not hasattr(layer, "bits"):
            continue
        name = files.tensors.original(depth, f"{path}.weight")
        entry = declared | declared.get(name.removesuffix(".weight"), {})
        if (entry["bits"], entry["group_size"]) != (layer.bits, layer.group_size):
            raise HeadError(
                f"{files.source} is a head for another model, or damaged: its metadata declares {name} with "
                f"{entry['bits']} bits in groups of {entry['group_size']}, and in this model it would have "
                f"{layer.bits} bits in groups of {layer.group_size}."
            )


# -- the draft vocabulary --------------------------------------------------------------------------------


def _draft_ids_beside(file: Path) -> mx.array | None:
    """The ids in a `freq.json` of {"ids": […]} beside the head, most frequent first."""
    beside = file.with_name("freq.json")
    if not beside.is_file():
        return None
    try:
        return mx.array(json.loads(beside.read_text())["ids"], mx.int32)
    except (KeyError, TypeError, ValueError) as error:
        raise HeadError(f"{beside} contains no list of token ids named 'ids': {error!r}") from error


def _reduced(draft_ids: mx.array | None, size: int | None, vocab_size: int | None) -> mx.array | None:
    """The `size` most frequent ids, or a few less: as many as the native matmuls take at once.

    `vocab_size`: of the model, to check the ids; None: they are not checked.
    """
    if draft_ids is None:
        return None
    ids = draft_ids if size is None else draft_ids[:size]
    ids = ids[: whole_tiles(ids.size)]
    if ids.ndim != 1 or ids.size == 0:
        raise HeadError("the head's draft vocabulary (draft_ids) is empty, or not one list of ids.")
    if vocab_size is not None and mx.any((ids < 0) | (ids >= vocab_size)).item():
        raise HeadError("the head's draft vocabulary (draft_ids) names ids that this model does not have.")
    return mx.sort(ids.astype(mx.int32))
