"""How an engine keeps its cells: by blocks or by slots, and which cached prefixes go to the disk."""

from __future__ import annotations

import hashlib
from pathlib import Path

from outrider.cache.block_folder import BlockFolder
from outrider.cache.disk_tier import DiskTier
from outrider.config import CacheLayout, EngineConfig, InvalidConfig
from outrider.models import cuda_attention, dtypes, loader, machine
from outrider.models.files.fingerprint import fingerprint
from outrider.models.trunk import Trunk
from outrider.plan import BLOCK_SIZE
from outrider.step.device_drafter import LoadedDrafter
from outrider.step.rank_disk import FirstRankDisk
from outrider.step.ranks import Ranks


def block_size_of(trunk: Trunk, layout: CacheLayout) -> int | None:
    """Cells of a block; None: rows keep their cells by slots.

    Where attention reads blocks in place, each row costs what it holds. Elsewhere it would have to copy them,
    and slots are cheaper.
    """
    if layout == "slots" or (layout == "auto" and not _blocks_are_as_fast(trunk)):
        return None
    if trunk.reads_blocks:
        return BLOCK_SIZE
    if layout == "blocks":
        raise InvalidConfig(
            'cache_layout="blocks" needs attention that reads blocks in place, which not all layers of this '
            'model have on this device: use "auto" or "slots"'
        )
    return None


def _blocks_are_as_fast(trunk: Trunk) -> bool:
    """Whether rows of equal length lose nothing by blocks, if attention reads these in place.

    So it was measured on CPUs, and on CUDA for cells that tensor cores read (docs/BENCHMARKS.md, "Attention
    over blocks"). Nothing was measured on Metal. Quantised cells in slots would be dequantised as a whole.
    """
    if machine.is_cpu() or trunk.kv_bits is not None:
        return True
    specs = trunk.kv_specs
    return bool(specs) and all(cuda_attention.supports(spec.key_dim, spec.dtype) for spec in specs)


def name_of_cells(loaded: loader.LoadedModel, drafter: LoadedDrafter | None, config: EngineConfig) -> str:
    """What stored cells are named after; empty: none are stored. Call it before layers are swapped."""
    return "" if config.prefix_cache_dir is None else _fingerprint(loaded, drafter)


def prefix_disk(name: str, config: EngineConfig, ranks: Ranks | None) -> DiskTier | None:
    """`name`: of the cells. On several ranks each has a folder of its own, and all of them call this at the
    same time."""
    if ranks is not None:
        name = _name_of_all_ranks(name, ranks)
    if config.prefix_cache_dir is None:
        return None
    path = Path(config.prefix_cache_dir).expanduser()
    if ranks is not None:
        path = path / f"rank-{ranks.rank}-of-{ranks.size}"
    try:
        folder = BlockFolder(path, name, config.prefix_cache_disk_bytes)
    except OSError as error:
        raise InvalidConfig(
            f"the prefix cache cannot use the folder {config.prefix_cache_dir}: {error.strerror}. "
            "Mend that, or name another folder."
        ) from error
    return DiskTier(folder) if ranks is None or ranks.rank > 0 else FirstRankDisk(folder, ranks)


def _fingerprint(loaded: loader.LoadedModel, drafter: LoadedDrafter | None) -> str:
    layers = drafter.modules if drafter is not None else ()
    of_drafter = drafter.cell_facts if drafter is not None else None
    trunk = loaded.trunk
    facts = trunk.layout, trunk.kv_bits, of_drafter, loaded.config, BLOCK_SIZE, dtypes.arithmetic(trunk.model)
    return fingerprint([trunk.model, *layers], *facts)


def _name_of_all_ranks(name: str, ranks: Ranks) -> str:
    """The cells of a rank depend on the weights of all ranks. Raises InvalidConfig if some have no name."""
    found = ranks.digests(name)
    nameless = hashlib.sha256(b"").hexdigest()
    if nameless in found and {*found} != {nameless}:
        raise InvalidConfig("some ranks have --prefix-cache-dir and others have not: give it to all, or none")
    return hashlib.sha256("".join(found).encode()).hexdigest()[: len(name)]
