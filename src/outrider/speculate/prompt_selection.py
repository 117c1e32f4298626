"""Which tokens of a prompt are read, by their scores (spec_prefill). Pure functions, no MLX.

    prompt     | 32 tokens | 32 tokens | 32 tokens | ... | 32 tokens | 32 tokens |
    read       | always    | the chunks with the highest mean score  | always    |

Whole chunks are kept, since a single token says little without its neighbours. The first one has the start of
the chat template, to which models attend as such; the last ones have the question.
"""

from __future__ import annotations

import math

import numpy as np

CHUNK = 32  # tokens that are kept or skipped together; SpecPrefill's
LAST_CHUNKS = 2  # at the end of a prompt that are always read; chosen by hand


def kept_positions(scores: np.ndarray, keep: float) -> list[int]:
    """The positions of the tokens to read, in order: about a share of `keep`.  scores [tokens]"""
    num_tokens = len(scores)
    num_chunks = -(-num_tokens // CHUNK)
    num_kept = math.ceil(keep * num_chunks)
    starts = np.arange(0, num_tokens, CHUNK)
    sizes = np.minimum(num_tokens - starts, CHUNK)
    means = np.add.reduceat(np.asarray(scores, np.float64), starts) / sizes
    means[0] = means[-LAST_CHUNKS:] = np.inf
    best = np.argsort(-means, kind="stable")[: max(num_kept, min(num_chunks, 1 + LAST_CHUNKS))]
    return [int(position) for chunk in sorted(best) for position in starts[chunk] + np.arange(sizes[chunk])]
