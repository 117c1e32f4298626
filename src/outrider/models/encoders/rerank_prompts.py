"""Causal models that judge a document by answering yes or no: which folders hold one, and its prompt.

Such a model has the files of a chat model, so its name decides. Must not know weights or tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.pooling import PairPrompt

# As the publisher of Qwen3-Reranker writes it, with the instruction that is meant for searches.
QWEN3_PROMPT = PairPrompt(
    before="<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
    before_query="<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    "<Query>: ",
    before_document="\n<Document>: ",
    after="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)
QWEN3_NAME = "qwen3-reranker"  # in the name of the folder, or of the hub's repository, in any case
QWEN3_KEY = "is_original_qwen3_reranker"  # in config.json, for folders with another name; vLLM has this key


def pair_prompt(folder: Path, config: dict[str, Any]) -> PairPrompt | None:
    """The prompt of a causal reranker; None: the folder holds another model."""
    architectures = config.get("architectures") or ("Qwen3ForCausalLM",)
    if config.get("model_type") != "qwen3" or "Qwen3ForCausalLM" not in architectures:
        return None
    is_reranker = QWEN3_NAME in _name(folder).lower() or config.get(QWEN3_KEY) is True
    return QWEN3_PROMPT if is_reranker else None


def _name(folder: Path) -> str:
    """Of the folder; in the hub's cache (models--OWNER--NAME/snapshots/COMMIT), of the repository."""
    is_snapshot = folder.parent.name == "snapshots"
    return folder.parent.parent.name if is_snapshot else folder.name
