"""The eye and the trunk together: answers' logits from a batch, and the eye's file."""

from __future__ import annotations

from pathlib import Path

import torch
from batches import Batch
from conversations import MOST_BRANCHES
from frozen import FrozenTrunk
from safetensors.torch import load_file, save_file
from torch import Tensor
from vit import Eye


def answer_logits(eye: Eye, trunk: FrozenTrunk, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits where an answer's token comes next, float32 [n, V], and the eye's patches."""
    with torch.autocast(batch.pixels.device.type, torch.bfloat16, enabled=batch.pixels.is_cuda):
        patches, pictures = eye(batch.pixels)
    rows, width = batch.token_ids.shape
    x = trunk.embed(batch.token_ids).flatten(0, 1)
    x = x.index_copy(0, batch.picture_at, pictures.float().flatten(0, 1))
    hidden = trunk.hidden(x.view(rows, width, -1), batch.positions, sees(batch.parts)).flatten(0, 1)
    return trunk.logits(hidden.index_select(0, batch.answer_at)), patches


def sees(parts: Tensor) -> Tensor:
    """Which token sees which: those before it, in its branch and in the beginning.

    int64 [rows, T] -> bool [rows, T, T]
    """
    conversations, branches = parts // MOST_BRANCHES, parts % MOST_BRANCHES
    same = conversations[:, :, None] == conversations[:, None, :]
    shared = (branches[:, None, :] == 0) | (branches[:, :, None] == branches[:, None, :])
    return torch.tril(same & shared)


def save_eye(eye: Eye, file: Path, dtype: torch.dtype, notes: dict[str, str] | None = None) -> None:
    weights = {f"model.{name}": weight.detach().to("cpu", dtype) for name, weight in eye.state_dict().items()}
    save_file(weights, file, {"format": "pt", **(notes or {})})


def load_eye(file: Path, device: str) -> Eye:
    eye = Eye()
    weights = load_file(file)
    eye.load_state_dict({name.removeprefix("model."): weight.float() for name, weight in weights.items()})
    return eye.to(device)
