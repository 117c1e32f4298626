"""An MTP head whole on rank 0 against a divided one: figures on paper, with the links of benchmarks/ranks.py.

    python -m benchmarks.rank_heads
    python -m benchmarks.rank_heads --measure [--ranks 2] [--bits 4] [--threads 1]     # on this machine

A draft reads the head's layer and the output projection once. Rank 0 alone sends nothing:

    whole         (layer + projection) / bandwidth
    projection    layer / bandwidth + projection / (N x bandwidth) + the hidden state to all + gathered logits
    divided       (layer + projection) / (N x bandwidth) + five messages

"projection" (not built): rank 0 computes the layer, all ranks their tokens of the vocabulary. "divided" is
`--rank-head divided`: its messages are the gathered outputs of `fc`, the sums of attention and MLP, the
gathered logits, and the token that rank 0 has sampled. A step with drafts to verify has one message more, the
number of accepted drafts. A ring sends N - 1 messages for each, one after the other. The model has no time of
the host.

`--measure` times drafts of a random head on ranks of this machine, whole and divided, and compares with the
model: a part without its messages, and as many messages as are counted.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.rank_steps import median_s, run_ranks
from benchmarks.ranks import BANDWIDTH, LINKS, MODELS, Link, Model, step_s

BYTES_16_BITS, BYTES_4_BITS = 2.0, 0.5625  # of a weight, with scales and biases
HEAD_DIM = 256
REDUCED_VOCABULARY = 32_768  # --draft-vocabulary
NUM_SUMS = 2  # attention, MLP
TOKEN_BYTES = 4
MAX_LATENCY_US = 1000
NUM_TIMED = 500
HEAD_FILE = "mtp.safetensors"
MEASURED_SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "vocab_size": 32_768,
    "intermediate_size": 4096,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}


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


def messages(hidden_size: int, vocab_size: int, num_ranks: int, bytes_per_value: float = 2) -> list[float]:
    """Bytes that each rank sends to the next one for a draft of a divided head: fc, sums, logits, token."""
    vector = bytes_per_value * hidden_size
    logits = bytes_per_value * -(-vocab_size // num_ranks)
    return [vector / num_ranks, *[vector] * NUM_SUMS, logits, TOKEN_BYTES]


def draft_s(model: Model, head: Head, link: Link, num_ranks: int) -> dict[str, float]:
    """Seconds of one draft of one row."""
    layer_s, projection_s = head.layer_bytes / BANDWIDTH, head.projection_bytes / BANDWIDTH
    vector_s = send_s(link, num_ranks, 2.0 * model.hidden_size)
    logits_s = send_s(link, num_ranks, 2.0 * head.vocab_size / num_ranks)
    sent = messages(model.hidden_size, head.vocab_size, num_ranks)
    return {
        "whole": layer_s + projection_s,
        "projection": layer_s + projection_s / num_ranks + vector_s + logits_s,
        "divided": (layer_s + projection_s) / num_ranks
        + sum(send_s(link, num_ranks, num_bytes) for num_bytes in sent),
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


def predict() -> None:
    for model, shape in zip(MODELS, SHAPES, strict=True):
        for head in (head_of(model, shape, is_small) for is_small in (False, True)):
            print(
                f"{model.name}, head of {head.name}: layer {head.layer_bytes / 1e9:.2f} GB, "
                f"projection {head.projection_bytes / 1e9:.2f} GB"
            )
            for num_ranks in (2, 4):
                sent = messages(model.hidden_size, head.vocab_size, num_ranks)
                print(
                    f"  {num_ranks} machines: {len(sent)} messages a draft, KB of each rank: "
                    f"{', '.join(f'{num_bytes / 1e3:.1f}' for num_bytes in sent)}"
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


# On ranks of this machine -----------------------------------------------------------------------------------


class Messages:
    """Counts the bytes that this rank sends in each operation of all ranks, or leaves the messages out."""

    NAMES = ("all_gather",)  # drafts have no other operations

    def __init__(self, num_ranks: int, leaves_out: bool) -> None:
        self._num_ranks, self._leaves_out = num_ranks, leaves_out
        self.num_bytes: list[int] = []

    def __enter__(self) -> Messages:
        import mlx.core as mx

        self._operations = {name: getattr(mx.distributed, name) for name in self.NAMES}
        for name, operation in self._operations.items():
            setattr(mx.distributed, name, partial(self._send, operation))
        return self

    def __exit__(self, *_: object) -> None:
        import mlx.core as mx

        for name, operation in self._operations.items():
            setattr(mx.distributed, name, operation)

    def _send(self, operation: Callable[..., Any], array: Any, **options: Any) -> Any:
        import mlx.core as mx

        self.num_bytes.append(array.nbytes)
        if not self._leaves_out:
            return operation(array, **options)
        return mx.concatenate([array] * self._num_ranks)  # as if all ranks had sent the same


def rank_main(folder: str) -> None:
    """One rank. Rank 0 prints what it has measured."""
    import mlx.core as mx

    from outrider.models import loader
    from outrider.models.heads import load_head
    from outrider.rank_sums import sum_over_ranks
    from outrider.step import head_timing
    from outrider.step.ranks import Ranks

    ranks = Ranks(mx.distributed.init(strict=True))
    loaded = loader.load(folder, group=ranks.group)
    trunk, file = loaded.trunk, Path(folder, HEAD_FILE)
    whole = load_head(file, trunk, config=loaded.config) if ranks.rank == 0 else None
    divided = load_head(file, trunk, config=loaded.config, group=ranks.group)
    trunk.prepare_for_serving()
    for head in (whole, divided):
        if head is not None:
            head.prepare_for_serving(trunk)
    vector = mx.zeros((1, trunk.hidden_size))
    sum_s = median_s(lambda: mx.eval(sum_over_ranks(vector, ranks.group)), NUM_TIMED)
    with Messages(ranks.size, leaves_out=True):
        _, part_s = head_timing.shortest_s(None, divided, trunk, ranks)
    mx.eval(sum_over_ranks(vector, ranks.group))  # all ranks are here
    with Messages(ranks.size, leaves_out=False) as messages:
        whole_s, divided_s = head_timing.shortest_s(whole, divided, trunk, ranks)
    num_sent = len(messages.num_bytes) // head_timing.NUM_RUNS  # the rest: a pass that is not computed
    found = {"whole": whole_s, "divided": divided_s, "part": part_s, "sum": sum_s}
    if ranks.rank == 0:
        drafts = {"sent": messages.num_bytes[-num_sent:], "drafts": head_timing.NUM_DRAFTS}
        print(json.dumps(found | drafts))


def measure(num_ranks: list[int], bits: int | None, threads: int | None) -> None:
    from tests.tiny_models import write_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        name = "llama" if bits is None else f"llama-{bits}bit"
        write_checkpoint(Path(folder), name, **MEASURED_SHAPE)
        _write_head(Path(folder), bits)
        for number in num_ranks:
            first, *_ = run_ranks("benchmarks.rank_heads", ["--of-rank", folder], number, folder, threads)
            report(number, json.loads(first[0]))


def report(num_ranks: int, found: dict[str, Any]) -> None:
    ms = {name: 1e3 * found[name] for name in ("whole", "divided", "part", "sum")}
    num_messages = len(found["sent"]) / found["drafts"]
    predicted = ms["part"] + num_messages * ms["sum"]
    between = (ms["divided"] - ms["part"]) / num_messages
    print(
        f"{num_ranks} ranks: ms a draft: whole {ms['whole']:.2f}, divided {ms['divided']:.2f}, "
        f"{predicted:.2f} predicted ({ms['divided'] / predicted:.2f})\n"
        f"  a part without messages {ms['part']:.2f}, {num_messages:.1f} messages of {between:.3f} "
        f"(back to back {ms['sum']:.3f}), {sum(found['sent']) / found['drafts'] / 1e3:.1f} KB\n"
        f"  bytes of the {len(found['sent'])} messages of {found['drafts']} drafts: {found['sent']}"
    )


def _write_head(folder: Path, bits: int | None) -> None:
    """A random head, in the format of the model."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten

    from outrider.models import loader
    from outrider.models.heads import new_head

    head = new_head(loader.trunk_on_disk(folder))
    if bits is not None:
        nn.quantize(head, group_size=32, bits=bits)
    tensors = {f"mtp.{name}": array for name, array in tree_flatten(head.parameters())}
    mx.save_safetensors(str(folder / HEAD_FILE), tensors, {"format": "mlx"})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", action="store_true", help="on ranks of this machine")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--bits", type=int, choices=(4, 8), help="of quantised weights (default: float32)")
    parser.add_argument("--threads", type=int, help="of each rank (default: all cores)")
    parser.add_argument("--of-rank", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.of_rank:
        rank_main(args.of_rank)
    elif args.measure:
        measure(args.ranks, args.bits, args.threads)
    else:
        predict()


if __name__ == "__main__":
    main()
