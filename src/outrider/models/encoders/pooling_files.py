"""What a model folder says about pooling: is it an embedding model or a reranker, and how are states pooled?

Owns the files of sentence-transformers: modules.json, N_Pooling/config.json, sentence_bert_config.json. Must
not know weights or tensors.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.models.encoders.families import is_encoder
from outrider.models.encoders.rerank_prompts import pair_prompt
from outrider.models.errors import ModelUnavailable
from outrider.pooling import PoolingKind

MODULES = "modules.json"
LENGTH_FILES = tuple(f"sentence_{kind}_config.json" for kind in ("bert", "roberta", "distilbert"))
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
# The names of sentence-transformers' boolean keys, where they differ from the mode's name.
MODE_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
CLASSIFIER = "ForSequenceClassification"  # the end of the architecture's name


@dataclass(frozen=True)
class PoolingSpec:
    """How the states of a model's tokens become one vector."""

    mode: str  # one of MODES
    is_normalised: bool
    max_tokens: int | None = None  # of one input; None: as many as the model has positions

    def limited(self, max_tokens: int | None) -> PoolingSpec:
        """The same with at most so many tokens; None: no further limit."""
        given = [limit for limit in (self.max_tokens, max_tokens) if limit is not None]
        return replace(self, max_tokens=min(given, default=None))


def pooling_kind(folder: Path, config: dict[str, Any]) -> PoolingKind | None:
    """What the folder's model is made for; None: for generating text.

    An encoder without modules.json counts as an embedding model: `pooling_spec` says what is missing.
    """
    if any(str(name).endswith(CLASSIFIER) for name in config.get("architectures") or ()):
        return "reranker"
    if pair_prompt(folder, config) is not None:
        return "reranker"
    if (folder / MODULES).is_file() or is_encoder(config):
        return "embedding"
    return None


def pooling_spec(folder: Path) -> PoolingSpec:
    """Read the files. Raises ModelUnavailable if one is missing or damaged, or asks for something else."""
    file = folder / MODULES
    if not file.is_file():
        raise ModelUnavailable(
            f"{folder} is an encoder without {MODULES}, the file of sentence-transformers that says how the "
            "states of tokens become one embedding. Take the publisher's whole folder: converted models "
            "often lack this file and 1_Pooling/config.json."
        )
    modules = read_json(file)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelUnavailable(f"{file} is not a list of modules. Download the model again.")
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    unsupported = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if unsupported:
        raise ModelUnavailable(
            f"{file} has a module {unsupported[0]!r}, which is not supported: Transformer, Pooling and "
            "Normalize are."
        )
    if kinds.count("Pooling") != 1:
        raise ModelUnavailable(f"{file} must have one Pooling module, and has {kinds.count('Pooling')}.")
    pooling = modules[kinds.index("Pooling")]
    mode = _pooling_mode(folder / str(pooling.get("path") or "1_Pooling") / "config.json")
    return PoolingSpec(mode, "Normalize" in kinds, _max_tokens(folder))


def _pooling_mode(file: Path) -> str:
    if not file.is_file():
        raise ModelUnavailable(
            f"{file} is missing: it says how the states of tokens become one embedding. Take the publisher's "
            "whole folder: converted models often lack this file."
        )
    config = read_json(file)
    if not isinstance(config, dict):
        raise ModelUnavailable(f"{file} is not a JSON object. Download the model again.")
    given = config.get("pooling_mode")  # of later versions: a name, or several
    names = [given] if isinstance(given, str) else list(given or ())
    names = names or [mode for key, mode in MODE_KEYS.items() if config.get(key) is True]
    if len(names) != 1 or names[0] not in MODES:
        found = ", ".join(map(str, names)) or "none"
        raise ModelUnavailable(
            f"{file}: the pooling must be one of {', '.join(MODES)}, and the file has {found}."
        )
    if config.get("include_prompt") is False:
        raise ModelUnavailable(f"{file}: include_prompt false is not supported, since prompts are not split.")
    return str(names[0])


def _max_tokens(folder: Path) -> int | None:
    for name in LENGTH_FILES:
        file = folder / name
        if not file.is_file():
            continue
        config = read_json(file)
        given = config.get("max_seq_length") if isinstance(config, dict) else None
        if given is None:
            continue
        if not isinstance(given, int) or isinstance(given, bool) or given < 1:
            raise ModelUnavailable(f"{file}: max_seq_length must be a number of tokens, not {given!r}.")
        return given
    return None


def read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelUnavailable(f"{file} cannot be read: {error}. Download the model again.") from None
