"""An MTP head of one layer as one native operation (native/extension/draft_head.h).

With MLX each draft of a head is some thirty small operations, and to build and launch them takes about as
long as to read the head's weights. The native operation embeds, feeds, attends, projects and chooses, draft
after draft. It takes heads whose layer is fused (cpu/fused_layers.py) and whose other parts are quantised.
Its drafts are compared with those of the small operations before it is used (step/native_head.py).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from outrider.cpu import extension
from outrider.cpu.fused_layers import fused_parts
from outrider.cpu.native_parts import NotFused, native_linear, native_norm


def native_draft_head(
    head: Any, embedding: nn.Module, projection: nn.Module, token_ids: mx.array | None
) -> Any:
    """`head`: an MTPHead. `projection`: onto the draft vocabulary, `token_ids` [draft vocabulary].

    Raises NotFused, with the reason, for a head that the operation cannot compute.
    """
    parts = fused_parts(head.layers[0])
    if parts.mlp is None or not parts.is_whole or parts.rope.native is None:
        raise NotFused("its layer is native in part only")
    fc, rows, outputs = (native_linear(linear) for linear in (head.fc, embedding, projection))
    try:
        return extension.loaded().DraftHead(
            rows,
            native_norm(head.pre_fc_norm_embedding),
            native_norm(head.pre_fc_norm_hidden),
            fc,
            parts.attention,
            parts.mlp,
            parts.rope.native,
            native_norm(head.norm),
            outputs,
            token_ids,
            head.spec.embedding_first,
            head.spec.recurse_after_norm,
        )
    except ValueError as error:
        raise NotFused(str(error)) from None
