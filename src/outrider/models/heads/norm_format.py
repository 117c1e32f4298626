"""Whether the norm weights of a head are as published. The Qwen hybrids publish them minus 1 (zero-centred).

Decided by what tools declare, and by names and formats that only publishers or only converters use. The
values of the weights are never used: a wrong guess would not fail, it would only lower acceptance.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.models.heads.errors import HeadError
from outrider.models.heads.head_files import TAKEN_FROM, HeadFiles, named_by_config, read_config

FP8_SCALE = "_scale_inv"
QUANTISED = (".scales", ".biases")
PUBLISHED, CONVERTED = "pt", "mlx"  # the metadata "format" of files that transformers and MLX write

# MTPLX declares the norms of a head in config.json: at the top, or in the entry about the head's bits.
ENCODING_KEYS = ("mtplx_mtp_norm_encoding", "mtp_norm_encoding", "norm_encoding", "norm_weight_encoding")
ZERO_CENTRED_ENCODINGS = ("delta", "delta_plus_one", "mlx_delta")
BITS_ENTRY = "mtplx_mtp_quantization"
# vllm-mlx writes manifest.json beside the head's file.
MANIFEST, MANIFEST_KEY, MANIFEST_CONVERTED = "manifest.json", "rmsnorm_weight_format", "mlx_gamma"


def is_as_published(files: HeadFiles) -> bool:
    """True if the norms of a head are those of the publisher (minus 1), False if a converter added the 1."""
    declared = _declared(files)
    if declared is not None:
        return declared
    names = list(files.stored)
    if any(name.endswith(FP8_SCALE) for name in names):
        return True
    if any(name.endswith(QUANTISED) or ".switch_mlp." in name for name in names):
        return False
    if any(".experts." in name for name in names):
        return True
    if files.is_inside and files.conv_is_raw is not None and not files.is_apart:
        return files.conv_is_raw
    written_by = files.metadata.get("format")
    if written_by in (PUBLISHED, CONVERTED):
        return written_by == PUBLISHED
    raise HeadError(
        f"{files.source} does not say whether its norms are as published (zero-centred) or converted: it has "
        f'no metadata "format" of "{PUBLISHED}" or "{CONVERTED}". Copy the head from the original '
        "checkpoint: outrider mtp extract ORIGINAL --into MODEL_DIR."
    )


def _declared(files: HeadFiles) -> bool | None:
    """What the tool that made the head declares beside it; None: nothing."""
    if TAKEN_FROM in files.metadata:
        return None
    if files.is_inside:
        return _encoding(read_config(files.source if files.source.is_dir() else files.source.parent))
    manifest = _object(files.source.with_name(MANIFEST))
    if "format" not in files.metadata and manifest.get(MANIFEST_KEY) == MANIFEST_CONVERTED:
        return False
    for folder in (files.source.parent, files.source.parent.parent):
        if named_by_config(folder) == files.source:
            return _encoding(read_config(folder))
    return None


def _encoding(config: Mapping[str, Any]) -> bool | None:
    entry = config.get(BITS_ENTRY)
    parts = [config, *([entry] if isinstance(entry, Mapping) else [])]
    found = [str(part[key]).lower() for part in parts for key in ENCODING_KEYS if part.get(key) is not None]
    return found[0] in ZERO_CENTRED_ENCODINGS if found else None


def _object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
