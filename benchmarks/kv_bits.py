"""What bits of keys and values change: quality against float32, and the pace of uneven rows.

    python -m benchmarks.kv_bits [--model M] [--text FILE] [--tokens 4096] [--window 2048]
    python -m benchmarks.kv_bits --speed [--context 6000] [--short 7] [--rounds 5]

Quality: all precisions read the same text in chunks, and each predicts every token from the tokens before it.
KL and "same token" compare their predictions with those of float32.

Speed: several short rows decode alone, then beside one row with a long context, which is in the prefix cache.
Compared are the tokens per second of the short rows, after their first token. Engines take turns.
"""

from __future__ import annotations

import argparse
import random
import statistics
from contextlib import ExitStack
from pathlib import Path

import mlx.core as mx

from outrider import LLM, SamplingParams
from outrider.cache.placement import Placement
from outrider.llm import default_model
from outrider.models.loader import load
from outrider.models.trunk import Trunk, TrunkCache

PRECISIONS = (32, 16, 8, 4)
CHUNK = 256  # tokens of a pass
TEXT = Path(__file__).parents[1] / "docs" / "SERVING.md"
SHORT_TOKENS = 48  # of the answers of short rows, and of their prompts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder, GGUF file or name (the default model)")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=2048, help="tokens that are read with one context")
    parser.add_argument("--speed", action="store_true", help="measure the speed instead")
    parser.add_argument("--context", type=int, default=6000, help="tokens of the long row")
    parser.add_argument("--short", type=int, default=7, help="number of short rows")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    model = args.model or default_model()
    if args.speed:
        _print_speed(model, args.context, args.short, args.rounds)
    else:
        _print_quality(model, args.text, args.tokens, args.window)


# -- quality -------------------------------------------------------------------------------------------------


class _Reader:
    """Reads a text with one precision, chunk by chunk."""

    def __init__(self, trunk: Trunk, kv_bits: int, window: int) -> None:
        trunk.use_kv_bits(kv_bits)
        self._trunk, self._window = trunk, window
        self._cache = TrunkCache(trunk.layout)
        for buffers in self._cache.buffers():
            buffers.resize(1, window)
        self.bytes_per_token = sum(buffers.spec.bytes_per_cell for buffers in self._cache.buffers())
        self.divergences: list[mx.array] = []
        self.agreements: list[mx.array] = []
        self.losses: list[mx.array] = []

    def read(self, token_ids: mx.array, start: int) -> mx.array:
        """The log-probabilities after each token.  [tokens] -> [tokens, vocabulary]"""
        num = token_ids.size
        place = Placement([0], mx.array([start]), mx.array([num]), num, start + num, self._window)
        logits = self._trunk.logits(self._trunk.hidden(token_ids[None], self._cache, place))[0]
        self._cache.commit(mx.array([num]))
        return logits - mx.logsumexp(logits, axis=-1, keepdims=True)

    def compare(self, found: mx.array, expected: mx.array, next_ids: mx.array) -> None:
        self.divergences.append((mx.exp(expected) * (expected - found)).sum(axis=-1))
        self.agreements.append(found.argmax(axis=-1) == expected.argmax(axis=-1))
        self.losses.append(-mx.take_along_axis(found[: next_ids.size], next_ids[:, None], axis=-1))
        mx.eval(self.divergences, self.agreements, self.losses)


def _print_quality(model: str | Path, text: Path, num_tokens: int, window: int) -> None:
    loaded = load(model)
    loaded.trunk.prepare_for_serving()
    ids = loaded.tokenizer.encode(text.read_text())[:num_tokens]
    readers: dict[int, _Reader] = {}
    for begin in range(0, len(ids) - 1, window):
        own = ids[begin : begin + window]
        for bits in PRECISIONS:
            fresh = _Reader(loaded.trunk, bits, window)
            if bits in readers:
                _take_over(fresh, readers[bits])
            readers[bits] = fresh
        for start in range(0, len(own), CHUNK):
            chunk = mx.array(own[start : start + CHUNK], mx.int32)
            next_ids = mx.array(own[start + 1 : start + CHUNK + 1], mx.int32)
            expected = readers[32].read(chunk, start)
            for bits, reader in readers.items():
                found = expected if bits == 32 else reader.read(chunk, start)
                reader.compare(found, expected, next_ids)
    print(f"{loaded.path.name}, {len(ids)} tokens of {text.name}, {window} with one context")
    print("keys and values   bytes a token   KL: mean   median   99 %    same token   perplexity")
    for bits, reader in readers.items():
        divergence = mx.sort(mx.concatenate(reader.divergences))
        mean, median, high = divergence.mean(), divergence[len(ids) // 2], divergence[len(ids) * 99 // 100]
        same, loss = mx.concatenate(reader.agreements).mean(), mx.concatenate(reader.losses).mean()
        print(
            f"{f'{bits} bits':<17} "
            f"{reader.bytes_per_token:14,}   {mean.item():8.5f} {median.item():8.5f} {high.item():6.4f}   "
            f"{same.item():10.2%}   {mx.exp(loss).item():10.3f}"
        )


def _take_over(fresh: _Reader, before: _Reader) -> None:
    fresh.divergences, fresh.agreements = before.divergences, before.agreements
    fresh.losses = before.losses


# -- speed ---------------------------------------------------------------------------------------------------


def _print_speed(model: str | Path, context: int, num_short: int, rounds: int) -> None:
    with ExitStack() as stack:
        engines = {bits: stack.enter_context(_engine(model, bits, num_short)) for bits in PRECISIONS}
        paces: dict[int, list[tuple[float, float]]] = {bits: [] for bits in PRECISIONS}
        for number in range(rounds + 1):  # the first round warms up, and caches the long prompt
            for bits, llm in engines.items():
                found = _paces(llm, context, num_short)
                if number:
                    paces[bits].append(found)
    print(
        f"{num_short} short rows, one row with {context} tokens; tokens per second of the short rows together"
    )
    print("keys and values    alone   beside the long row   ratio")
    for bits, found in paces.items():
        alone, beside = (statistics.median(column) for column in zip(*found, strict=True))
        ratio = statistics.median(one[1] / one[0] for one in found)
        print(f"{f'{bits} bits':<15} {alone:8.1f} {beside:21.1f} {ratio:7.2f}")


def _engine(model: str | Path, bits: int, num_short: int) -> LLM:
    return LLM(model, drafter="none", kv_bits=bits, max_rows=num_short + 1, generation_config="none")


def _paces(llm: LLM, context: int, num_short: int) -> tuple[float, float]:
    """Tokens per second of the short rows: alone, and beside the long row."""
    vocab_size = llm.engine.facts.vocab_size
    params = SamplingParams(max_tokens=SHORT_TOKENS, temperature=0, ignore_eos=True)
    shorts = [_some_ids(SHORT_TOKENS, seed, vocab_size) for seed in range(num_short)]
    long = _some_ids(context, 99, vocab_size)
    llm.generate([long], SamplingParams(max_tokens=1, temperature=0))
    alone = _pace(llm, shorts, [params] * num_short)
    longer = SamplingParams(max_tokens=4 * SHORT_TOKENS, temperature=0, ignore_eos=True)
    return alone, _pace(llm, [*shorts, long], [params] * num_short + [longer])


def _pace(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> float:
    """Of the short rows: tokens per second after the last one's first token."""
    stats = [one.stats for one in llm.generate(prompts, params)]
    short = [own for own, one in zip(stats, params, strict=True) if one.max_tokens == SHORT_TOKENS]
    seconds = [(own.total_s or 0.0) - (own.ttft_s or 0.0) for own in short]
    return sum(own.num_generated - 1 for own in short) / statistics.mean(seconds)


def _some_ids(num: int, seed: int, vocab_size: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, min(20_000, vocab_size)) for _ in range(num)]


if __name__ == "__main__":
    main()
