"""What quantised arithmetic on the CPU changes: KL divergence, agreement and perplexity against float32.

    python -m benchmarks.kl [--model M] [--text FILE] [--tokens 2048]

Both models have the same quantised weights. One keeps them and rounds what layers read to 15 bits; the other
is dequantised to float32. Compared are their predictions for every token of a text.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import mlx.core as mx

from outrider.llm import default_model
from outrider.models.loader import LoadedModel, load

WINDOW = 512  # tokens that are predicted from each other
TEXT = Path(__file__).parents[1] / "docs" / "SERVING.md"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder, GGUF file or name (the default model)")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=2048)
    args = parser.parse_args()
    model = args.model or default_model()
    exact, kept = load(model, "float32"), load(model)
    if kept.trunk.num_bytes == exact.trunk.num_bytes:
        raise SystemExit(f"{model}: no layer stays quantised, so there is nothing to compare.")
    ids = exact.tokenizer.encode(args.text.read_text())[: args.tokens]
    divergences, agreements, losses = [], [], {"float32": [], "kept": []}
    for begin in range(0, len(ids) - 1, WINDOW):
        window = mx.array(ids[begin : begin + WINDOW])
        expected, found = _log_probabilities(exact, window), _log_probabilities(kept, window)
        divergences.append((mx.exp(expected) * (expected - found)).sum(-1))
        agreements.append(expected.argmax(-1) == found.argmax(-1))
        for name, predicted in (("float32", expected), ("kept", found)):
            losses[name].append(-mx.take_along_axis(predicted[:-1], window[1:, None], axis=-1))
        mx.eval(divergences, agreements, losses)
    divergence = mx.sort(mx.concatenate(divergences))
    print(f"{exact.path.name}, {len(ids)} tokens of {args.text.name}")
    print(f"weights      {exact.trunk.num_bytes / 1e6:.0f} -> {kept.trunk.num_bytes / 1e6:.0f} MB")
    print(f"KL           mean {divergence.mean().item():.4f}, median {divergence[len(ids) // 2].item():.4f}")
    print(f"same token   {mx.concatenate(agreements).mean().item():.1%}")
    means = {name: mx.exp(mx.concatenate(parts).mean()).item() for name, parts in losses.items()}
    print(f"perplexity   {means['float32']:.3f} -> {means['kept']:.3f}")


def _log_probabilities(loaded: LoadedModel, token_ids: mx.array) -> mx.array:
    """[tokens] -> [tokens, vocabulary]"""
    logits = loaded.trunk.model(token_ids[None])[0]
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


if __name__ == "__main__":
    main()
