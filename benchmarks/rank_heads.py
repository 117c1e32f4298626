"""An MTP head whole on rank 0 against a divided one: figures on paper, with the links of benchmarks/ranks.py.

    python -m benchmarks.rank_heads

A draft reads the head's layer and the output projection once. Rank 0 alone sends nothing:

    whole         (layer + projection) / bandwidth
    projection    layer / bandwidth + projection / (N x bandwidth) + the hidden state to all + gathered logits
    divided       (layer + projection) / (N x bandwidth) + three sums + gathered logits + a token to all

"projection": rank 0 computes the layer, all ranks their tokens of the vocabulary. "divided": the sums are
those of `fc`, attention and MLP; before each draft all ranks have to learn the token that rank 0 has sampled.
A ring sends N - 1 messages for each, one after the other. The model has no time of the host.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.ranks import BANDWIDTH, LINKS, MODELS, Link, Model, step_s

BYTES_16_BITS, BYTES_4_BITS = 2.0, 0.5625  # of a weight, with scales and biases
HEAD_DIM = 256
REDUCED_VOCABULARY = 32_768  # --draft-vocabulary
NUM_SUMS = 3  # fc, attention, MLP
MAX_LATENCY_US = 1000


@dataclass(frozen=True)
class HeadShape:
    num_heads: int
    num_kv_heads: int
    mlp_width: int  # all columns that a token reads: of the MLP, or of its experts and the shared one


SHAPES = (HeadShape(24, 4, 17_408), HeadShape(32, 2, 9 * 1024))  # of MODELS


@dataclass(frozen=True)
class Head:
    name: str
    layer_bytes: float  # that a draft reads, `fc` included
    projection_bytes: float
    vocab_size: int


def head_of(model: Model, shape: HeadShape, is_small: bool) -> Head:
    """`is_small`: a head of 4 bits with a reduced vocabulary; otherwise as published, in 16 bits."""
    size = model.hidden_size
    attention = size * HEAD_DIM * (3 * shape.num_heads + 2 * shape.num_kv_heads)  # queries have gates
    weights = 2 * size * size + attention + 3 * size * shape.mlp_width
    vocab_size = REDUCED_VOCABULARY if is_small else model.vocab_size
    name = "4 bits, 32,768 tokens" if is_small else "16 bits, all tokens"
    layer_bytes = weights * (BYTES_4_BITS if is_small else BYTES_16_BITS)
    return Head(name, layer_bytes, vocab_size * size * BYTES_4_BITS, vocab_size)


def send_s(link: Link, num_ranks: int, num_bytes: float) -> float:
    """Seconds until all ranks have a message of each rank."""
    return (num_ranks - 1) * (link.latency_s + num_bytes / link.bytes_per_s)


def draft_s(model: Model, head: Head, link: Link, num_ranks: int) -> dict[str, float]:
    """Seconds of one draft of one row."""
    layer_s, projection_s = head.layer_bytes / BANDWIDTH, head.projection_bytes / BANDWIDTH
    vector_s = send_s(link, num_ranks, 2.0 * model.hidden_size)
    logits_s = send_s(link, num_ranks, 2.0 * head.vocab_size / num_ranks)
    return {
        "whole": layer_s + projection_s,
        "projection": layer_s + projection_s / num_ranks + vector_s + logits_s,
        "divided": (layer_s + projection_s) / num_ranks
        + NUM_SUMS * vector_s
        + logits_s
        + send_s(link, num_ranks, 8),
    }


def share_lost(model: Model, head: Head, link: Link, num_ranks: int, depth: int) -> float:
    """The part of a step with drafts that the best way of dividing the head would save."""
    found = draft_s(model, head, link, num_ranks)
    saved_s = depth * (found["whole"] - min(found.values()))
    return saved_s / (step_s(model, link, num_ranks, 1 + depth) + depth * found["whole"])


def break_even_us(model: Model, head: Head, num_ranks: int) -> int:
    """The latency of a link of 8 GB/s above which a whole head is the cheapest."""
    for latency_us in range(MAX_LATENCY_US):
        found = draft_s(model, head, Link("", latency_us * 1e-6, 8e9), num_ranks)
        if found["whole"] <= min(found.values()):
            return latency_us
    raise ValueError(f"no break-even below {MAX_LATENCY_US} us")


def main() -> None:
    for model, shape in zip(MODELS, SHAPES, strict=True):
        for head in (head_of(model, shape, is_small) for is_small in (False, True)):
            print(
                f"{model.name}, head of {head.name}: layer {head.layer_bytes / 1e9:.2f} GB, "
                f"projection {head.projection_bytes / 1e9:.2f} GB"
            )
            for link in LINKS:
                for num_ranks in (2, 4):
                    found = draft_s(model, head, link, num_ranks)
                    times = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in found.items())
                    lost = [100 * share_lost(model, head, link, num_ranks, depth) for depth in (1, 3)]
                    print(
                        f"  {num_ranks} machines, {link.name}: ms a draft: {times}; a whole head costs "
                        f"{lost[0]:.1f} % of a step with 1 draft, {lost[1]:.1f} % with 3"
                    )
            limits = [break_even_us(model, head, num_ranks) for num_ranks in (2, 4)]
            print(f"  a whole head is the cheapest above {limits[0]}, {limits[1]} us a message")


if __name__ == "__main__":
    main()
