"""Asks an assembled model about the held-out pictures, with mlx-vlm's own model code and greedy decoding.

    python recipes/vision/answer.py ASSEMBLED_FOLDER held_out_images.json [--every 4]

Needs mlx-vlm and a folder made with `assemble.py --untied`. Slow on a CPU; a trial, not a test.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.utils import dequantize_model
from mlx_vlm.models.cache import KVCache
from mlx_vlm.models.smolvlm.processing_smolvlm import SmolVLMProcessor
from mlx_vlm.utils import load_model
from pictures import Scene, draw
from PIL import Image

LONGEST = 48


class Answerer:
    def __init__(self, folder: Path) -> None:
        self._model = load_model(folder)
        self._processor = SmolVLMProcessor.from_pretrained(folder)
        if mx.default_device() == mx.Device(mx.cpu):  # where float32 is fastest
            dequantize_model(self._model)
            self._model.update(tree_map(lambda array: array.astype(mx.float32), self._model.parameters()))

    def answer(self, scene: Scene, question: str) -> str:
        content = [{"type": "image"}, {"type": "text", "text": question}]
        tokenizer = self._processor.tokenizer
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        inputs = dict(self._processor(text=[text], images=[[Image.fromarray(draw(scene))]]))
        inputs.pop("attention_mask")
        return tokenizer.decode(self._generate(**inputs), skip_special_tokens=True)

    def _generate(self, input_ids: mx.array, pixel_values: mx.array, **rest: Any) -> list[int]:
        cache = [KVCache() for _ in self._model.layers]
        logits = self._model(input_ids, pixel_values, cache=cache, **rest).logits
        found: list[int] = []
        while len(found) < LONGEST:
            token = int(mx.argmax(logits[0, -1]))
            if token == self._processor.tokenizer.eos_token_id:
                break
            found.append(token)
            logits = self._model.language_model(mx.array([[token]]), cache=cache).logits
        return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("pictures", type=Path)
    parser.add_argument("--every", type=int, default=1, help="ask about every n-th picture only")
    options = parser.parse_args()
    answerer = Answerer(options.folder)
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for picture in json.loads(options.pictures.read_text())[:: options.every]:
        scene = Scene.from_json(picture["scene"])
        for asked in picture["questions"]:
            answer = answerer.answer(scene, asked["text"])
            verdict = "right" if answer == asked["answer"] else f"expected {asked['answer']!r}"
            print(f"{asked['text']} {answer!r}: {verdict}", flush=True)
            total[asked["kind"]] += 1
            right[asked["kind"]] += verdict == "right"
    for kind, count in sorted(total.items()):
        print(f"{kind}: {right[kind]} of {count}")


if __name__ == "__main__":
    main()
