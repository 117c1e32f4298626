"""The vision encoder and the trunk together: answers' logits from a batch, and the encoder's file."""

from __future__ import annotations

from pathlib import Path

import torch
from batches import Batch
from conversations import MOST_BRANCHES
from frozen import FrozenTrunk
from safetensors.torch import load_file, save_file
from torch import Tensor
from vit import VisionEncoder


def answer_logits(encoder: VisionEncoder, trunk: FrozenTrunk, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits where an answer's token comes next, float32 [n, V], and the encoder's patches."""
    with torch.autocast(batch.pixels.device.type, torch.bfloat16, enabled=batch.pixels.is_cuda):
        patches, pictures = encoder(batch.pixels)
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


def save_encoder(
    encoder: VisionEncoder, file: Path, dtype: torch.dtype, notes: dict[str, str] | None = None
) -> None:
    weights = {
        f"model.{name}": weight.detach().to("cpu", dtype) for name, weight in encoder.state_dict().items()
    }
    save_file(weights, file, {"format": "pt", **(notes or {})})


def load_encoder(file: Path, device: str) -> VisionEncoder:
    encoder = VisionEncoder()
    weights = load_file(file)
    encoder.load_state_dict({name.removeprefix("model."): weight.float() for name, weight in weights.items()})
    return encoder.to(device)
