"""How often the model answers questions about pictures exactly as expected.

    python recipes/vision/evaluate.py MODEL_FOLDER vision.safetensors

Two sets, both drawn from seeds that training does not use: `new` has the pairs of shape and colour, and the
words and numbers, that training has; `held out` has only those that it never has. An answer counts if greedy
decoding gives it to the letter, so every token must be the model's first choice given those before it.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from batches import collate
from conversations import DEFAULT_SYSTEM, Turn, Writer
from encoder_and_trunk import answer_logits, load_encoder
from frozen import FrozenTrunk
from pictures import Scene
from questions import Question, questions
from scenes import SceneMaker, any_scene
from vit import VisionEncoder

Results = dict[str, dict[str, tuple[int, int]]]  # by set and kind of question: right answers of how many
ROWS = 64
WIDTH = 160  # at most


def examples(name: str, pictures: int) -> Iterator[tuple[Scene, Question]]:
    maker = SceneMaker(f"evaluation: {name}", held_out=name == "held out")
    for _ in range(pictures):
        scene = any_scene(maker)
        for question in questions(scene, maker.random):
            yield scene, question


def kind_of(scene: Scene, question: Question) -> str:
    shapes = sum(not thing.text for thing in scene.things)
    if question.kind in ("shape", "colour", "count"):
        return f"{question.kind}, {'one shape' if shapes == 1 else 'several shapes'}"
    return question.kind


@torch.no_grad()
def evaluate(
    encoder: VisionEncoder,
    trunk: FrozenTrunk,
    writer: Writer,
    device: str,
    pictures: int,
    kinds: Sequence[str] = (),
) -> Results:
    """`kinds`: ask only questions of these kinds."""
    results: Results = {}
    for name in ("new", "held out"):
        asked = [example for example in examples(name, pictures) if not kinds or example[1].kind in kinds]
        rows = [writer.conversation([Turn(question)], DEFAULT_SYSTEM, WIDTH) for _, question in asked]
        order = sorted(range(len(asked)), key=lambda row: len(rows[row].token_ids))  # long ones together
        counts: dict[str, list[bool]] = defaultdict(list)
        for start in range(0, len(order), ROWS):
            part = order[start : start + ROWS]
            scenes = [asked[row][0] for row in part]
            width = len(rows[part[-1]].token_ids)
            batch = collate(scenes, [[rows[row]] for row in part], width).to(device)
            logits, _ = answer_logits(encoder, trunk, batch)
            wrong = torch.zeros(len(part), device=device)
            wrong.index_add_(0, batch.answer_of, (logits.argmax(-1) != batch.answers).float())
            for row, errors in zip(part, wrong.tolist(), strict=True):
                counts[kind_of(*asked[row])].append(errors == 0)
        results[name] = {kind: (sum(right), len(right)) for kind, right in sorted(counts.items())}
    return results


def table(results: Results) -> str:
    lines = ["| questions about | " + " | ".join(results) + " |", "|---" * (1 + len(results)) + "|"]
    for kind in sorted({kind for counts in results.values() for kind in counts}):
        cells = []
        for counts in results.values():
            right, total = counts.get(kind, (0, 0))
            cells.append(f"{100 * right / total:.1f} % of {total}" if total else "-")
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="the default model's folder")
    parser.add_argument("encoder", type=Path)
    parser.add_argument("--pictures", type=int, default=1500, help="in each set")
    parser.add_argument("--kinds", nargs="*", default=(), help="such as: shape colour")
    parser.add_argument("--json", type=Path, help="write the counts here, too")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trunk = FrozenTrunk.load(options.model, device, compiled=False)
    writer = Writer(options.model / "tokenizer.json")
    results = evaluate(
        load_encoder(options.encoder, device), trunk, writer, device, options.pictures, options.kinds
    )
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
