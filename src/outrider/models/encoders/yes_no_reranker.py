"""A causal model that judges documents with yes or no (Qwen3-Reranker), as a pooling model.

The score of an input is the difference of two logits after its last token. Its sigmoid, which the route
takes, is the softmax over the two: the probability of yes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from outrider.models import loader
from outrider.models.encoders.causal_model import CausalModel, causal_facts
from outrider.models.encoders.pooling_files import PoolingSpec
from outrider.models.errors import ModelUnavailable
from outrider.models.trunk import Trunk
from outrider.pooling import PoolingFacts, TokenInput, Vector

YES, NO = "yes", "no"
LAST_STATE = PoolingSpec("lasttoken", is_normalised=False)


@dataclass(frozen=True)
class YesNoReranker:
    states: CausalModel  # computes the state of each input's last token
    trunk: Trunk
    yes_id: int
    no_id: int

    @property
    def facts(self) -> PoolingFacts:
        return self.states.facts

    def run(self, inputs: Sequence[TokenInput]) -> Generator[None, None, list[Vector]]:
        states = yield from self.states.run(inputs)
        hidden = mx.array(np.stack(states)).astype(self.trunk.dtype)  # [inputs, hidden]
        logits = self.trunk.logits(hidden[:, None])[:, 0]  # [inputs, vocabulary]
        scores = np.array(logits[:, self.yes_id] - logits[:, self.no_id])
        return [scores[i : i + 1] for i in range(len(inputs))]


def load_yes_no_reranker(
    folder: Path,
    name: str,
    dtype: str,
    max_tokens: int | None,
    check_wanted: Callable[[], None],
    cache_bytes: int | None,
) -> YesNoReranker:
    """Raises ModelUnavailable if the model cannot be loaded, or its tokenizer has no token for an answer."""
    loaded = loader.load(folder, dtype, check_wanted=check_wanted)
    yes_id, no_id = (_token_id(folder, loaded.tokenizer, word) for word in (YES, NO))
    trunk, spec = loaded.trunk, LAST_STATE.limited(max_tokens)
    trunk.prepare_for_serving()
    states = CausalModel(trunk, spec, causal_facts(loaded, spec, name, "reranker", cache_bytes))
    return YesNoReranker(states, trunk, yes_id, no_id)


def _token_id(folder: Path, tokenizer: Any, word: str) -> int:
    found = tokenizer.convert_tokens_to_ids(word)
    if found is None or found == tokenizer.unk_token_id:
        raise ModelUnavailable(
            f"{folder}: its tokenizer has no token {word!r}, with which a reranker answers. Download the "
            "model again."
        )
    return int(found)
