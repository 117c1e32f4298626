"""Draft models: a smaller model that drafts for the served one. Loads it, and refuses one that cannot.

How it drafts is in step/draft_model.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn

from outrider.config import InvalidConfig
from outrider.models import loader
from outrider.models.drafter_kinds import drafter_kind
from outrider.models.trunk import Trunk

# Of the larger vocabulary. A model of the same family may lack a few tokens, or have some more.
MIN_SHARED_TOKENS = 0.9


@dataclass(frozen=True)
class DraftModel:
    trunk: Trunk
    source: str  # its folder

    @property
    def can_be_paused(self) -> bool:
        """Whether it may read tokens of a row later. Recurrent states are cached as they are."""
        return not self.trunk.has_states

    @property
    def max_context(self) -> int | None:
        """Tokens that it can read; None: without an end, in recurrent layers and ropes."""
        return None if self.trunk.has_states else self.trunk.max_context

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (self.trunk.model,)

    @property
    def cell_facts(self) -> object:
        """What its cells depend on, beside its weights."""
        return self.trunk.layout

    @property
    def weight_files(self) -> list[Path]:
        return sorted(Path(self.source).glob("*.safetensors"))

    def prepare_for_serving(self, trunk: Trunk) -> None:
        """Swap layers for speed. Weights must not be changed afterwards."""
        self.trunk.prepare_for_serving()


def load_draft_model(
    model: str | Path, target: loader.LoadedModel, dtype: str, kv_bits: int | None
) -> DraftModel:
    """Raises ModelUnavailable if it cannot be loaded, InvalidConfig if it cannot draft for `target`."""
    folder = loader.find_folder(model)
    kind = drafter_kind(loader.read_config(folder))
    if kind is not None:
        raise InvalidConfig(
            f"{model} cannot be a draft model: it is {kind}, which Outrider does not serve yet. Use a small "
            "model of the same family, which reads text by itself."
        )
    loaded = loader.load(folder, dtype, reads_images=False)
    _check_same_tokens(target.tokenizer, loaded.tokenizer, str(model))
    loaded.trunk.use_kv_bits(kv_bits)
    return DraftModel(loaded.trunk, str(loaded.path))


def _check_same_tokens(tokenizer: Any, draft_tokenizer: Any, draft_model: str) -> None:
    """Raise InvalidConfig unless token ids mean the same to both models.

    Special tokens may differ: models of one family end their turns with different ones.
    """
    own, other = _ordinary_tokens(tokenizer), _ordinary_tokens(draft_tokenizer)
    different = sorted(i for i in own.keys() & other.keys() if own[i] != other[i])
    if different:
        first = different[0]
        raise InvalidConfig(
            f"{draft_model} cannot be a draft model: its tokenizer differs from the model's in "
            f"{len(different)} tokens. Token {first}, for example, is {other[first]!r} there and "
            f"{own[first]!r} here. Use a model with the same tokenizer."
        )
    num_shared, num_tokens = len(own.keys() & other.keys()), max(len(own), len(other))
    if num_shared < MIN_SHARED_TOKENS * num_tokens:
        raise InvalidConfig(
            f"{draft_model} cannot be a draft model: its tokenizer has {len(other)} tokens and the model's "
            f"has {len(own)}. Use a model with the same tokenizer."
        )


def _ordinary_tokens(tokenizer: Any) -> dict[int, str]:
    """The tokens of a tokenizer by id, without the added ones."""
    added = set(tokenizer.get_added_vocab().values())
    return {i: token for token, i in tokenizer.get_vocab().items() if i not in added}
