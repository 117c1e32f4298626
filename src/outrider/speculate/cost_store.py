"""What was measured and learnt about a model on this machine, kept in the user's cache folder between runs.

    depth/FINGERPRINT.json    costs as measured, corrections that many steps confirmed, the model's record

The fingerprint names everything on which the figures depend. A file that cannot be read is as good as none.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from outrider.files.atomic import write_text
from outrider.files.cache_folder import cache_folder
from outrider.speculate.acceptance import ModelAcceptance
from outrider.speculate.costs import MOST_CORRECTION, CostTable, Measured

log = logging.getLogger(__name__)

FORMAT = 5


@dataclass(frozen=True)
class Kept:
    measured: Measured
    seen: dict[tuple[int, int], float]
    acceptance: ModelAcceptance


def folder() -> Path:
    return cache_folder() / "depth"


def fingerprint(parts: Mapping[str, object]) -> str:
    text = json.dumps({"format": FORMAT, **parts}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def load(name: str) -> Kept | None:
    """What was kept under a fingerprint, if it is there and whole."""
    try:
        data = json.loads((folder() / f"{name}.json").read_text())
        seen = {(int(rows), int(width)): float(by) for rows, width, by in data["seen"]}
        if any(not abs(by) <= MOST_CORRECTION for by in seen.values()):
            raise ValueError("a correction is too large")
        return Kept(Measured.from_json(data["measured"]), seen, ModelAcceptance.from_json(data["acceptance"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("what was measured of this model cannot be read and is measured again: %r", error)
        return None


def save(name: str, costs: CostTable, acceptance: ModelAcceptance) -> None:
    """Whole or not at all; without a folder to write to, the next start measures again, no more."""
    data = {
        "measured": costs.measured.as_json(),
        "seen": [[*key, by] for key, by in sorted(costs.seen().items())],
        "acceptance": acceptance.as_json(),
    }
    try:
        folder().mkdir(parents=True, exist_ok=True)
        write_text(folder() / f"{name}.json", json.dumps(data))
    except OSError as error:
        log.warning("what was measured of this model cannot be kept: %s", error)
