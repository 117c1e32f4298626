"""Stores a model's measured costs and acceptance record in the user's cache folder between runs.

    depth/FINGERPRINT.json    measured costs of steps and prompts, confirmed corrections, acceptance record

The fingerprint names everything that the figures depend on. A file that cannot be read counts as missing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from outrider.files.atomic import write_text
from outrider.files.cache_folder import cache_folder
from outrider.speculate.acceptance import ModelAcceptance
from outrider.speculate.costs import MAX_CORRECTION, CostTable, MeasuredCosts
from outrider.speculate.prompt_costs import MeasuredPromptCosts

log = logging.getLogger(__name__)

FORMAT = 13  # of the file; part of the fingerprint, so files of another format are not found


@dataclass(frozen=True)
class StoredCosts:
    measured: MeasuredCosts
    corrections: dict[tuple[int, int], float]  # by (rows, width), as in CostTable
    acceptance: ModelAcceptance
    prompts: MeasuredPromptCosts | None = None


def folder() -> Path:
    """`$OUTRIDER_COSTS`, else a folder in Outrider's cache."""
    chosen = os.environ.get("OUTRIDER_COSTS")
    return Path(chosen).expanduser() if chosen else cache_folder() / "depth"


def fingerprint(parts: Mapping[str, object]) -> str:
    text = json.dumps({"format": FORMAT, **parts}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def load(name: str) -> StoredCosts | None:
    """The figures stored under a fingerprint. None if there are none or the file is damaged."""
    try:
        data = json.loads((folder() / f"{name}.json").read_text())
        corrections = {(int(rows), int(width)): float(by) for rows, width, by in data["corrections"]}
        if any(not abs(by) <= MAX_CORRECTION for by in corrections.values()):
            raise ValueError(f"a correction is larger than {MAX_CORRECTION}")
        prompts = data["prompts"]
        return StoredCosts(
            MeasuredCosts.from_json(data["measured"]),
            corrections,
            ModelAcceptance.from_json(data["acceptance"]),
            None if prompts is None else MeasuredPromptCosts.from_json(prompts),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("the stored costs of this model cannot be read and are measured again: %r", error)
        return None


def save(
    name: str, costs: CostTable, acceptance: ModelAcceptance, prompts: MeasuredPromptCosts | None = None
) -> None:
    """Write the file completely or not at all. If it cannot be written, the next start measures again."""
    data = {
        "measured": costs.measured.as_json(),
        "corrections": [[*key, by] for key, by in sorted(costs.confirmed_corrections().items())],
        "acceptance": acceptance.as_json(),
        "prompts": None if prompts is None else prompts.as_json(),
    }
    try:
        folder().mkdir(parents=True, exist_ok=True)
        write_text(folder() / f"{name}.json", json.dumps(data))
    except OSError as error:
        log.warning("the measured costs of this model cannot be stored: %s", error)
