"""One vision family for a test: a checkpoint with a head, mlx-vlm's own model, prompts with pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from image_files import noise
from outrider import LLM, SamplingParams
from outrider.engine.loop import Outbox
from outrider.engine.sequence import Delta
from outrider.media.images import image_from_pixels
from outrider.models.heads import new_head
from outrider.models.loader import load
from outrider.prompt_media import PromptMedia
from tiny_vision import SHOWN, SPANNED, reference_inputs, reference_logits, write_vision_checkpoint

NUM_TOKENS = 14
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, logprobs=3)
HOT = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9, top_p=0.95, seed=7, ignore_eos=True)
TEXTS = (
    "hello",
    "a much longer prompt of text that goes on for a while " * 2,
    "and one of a middling length",
)


@dataclass
class Prompt:
    ids: tuple[int, ...]
    media: PromptMedia


@dataclass
class World:
    """One family: a checkpoint with a head beside it, mlx-vlm's own model, and prompts with pictures."""

    family: str
    folder: Path
    model: nn.Module

    def text(self, *words: str) -> str:
        """Words with a picture between each two of them."""
        return f"<|user|>{SHOWN[self.family].join(words)}<|end|><|assistant|>"

    def inputs(self, words: Sequence[str], pictures: Sequence[np.ndarray]) -> dict[str, mx.array]:
        return reference_inputs(self.folder, self.family, self.text(*words), pictures)

    def prompt(self, llm: LLM, words: Sequence[str], pictures: Sequence[np.ndarray]) -> Prompt:
        reader = llm.engine.reader
        assert reader is not None
        ids = tuple(self.inputs(words, pictures)["input_ids"][0].tolist())
        return Prompt(ids, reader.place(ids, [reader.read(image_from_pixels(pixels)) for pixels in pictures]))


CASES: tuple[tuple[tuple[str, ...], tuple[np.ndarray, ...]], ...] = (
    (("look: ", "what is it?"), (noise(40, 24),)),
    (("", "and ", "are they alike?"), (noise(16, 16, 1), noise(20, 36, 2))),
    (("the other way round, and with more words before it: ", ""), (noise(16, 16, 3),)),
)


def new_world(folder: Path, name: str) -> World:
    """`name` is a family, or that of a model whose language part is quantised: "smolvlm-4bit"."""
    model = write_vision_checkpoint(folder, name)
    family = name.rpartition("-")[0] or name
    if family in SPANNED:  # Gemma's layers cannot be those of a head
        return World(family, folder, model)
    head = new_head(load(folder).trunk)
    (folder / "mtp").mkdir()
    weights = {f"mtp.{name}": array for name, array in tree_flatten(head.parameters())}
    mx.save_safetensors(str(folder / "mtp" / "weights.safetensors"), weights, {"format": "mlx"})
    return World(family, folder, model)


def whole(outbox: Outbox) -> Delta:
    found = outbox.take()
    assert found is not None
    while found.finish_reason is None:
        more = outbox.take()
        assert more is not None
        found = found.merged(more)
    return found


def answers(llm: LLM, *asked: tuple[Prompt | Sequence[int], SamplingParams]) -> list[Delta]:
    """All at once, in one batch."""
    boxes = []
    for prompt, params in asked:
        ids, media = (prompt.ids, prompt.media) if isinstance(prompt, Prompt) else (prompt, None)
        boxes.append(llm.engine.submit(llm.engine.validate(ids, params, media=media)))
    found = [whole(box) for box in boxes]
    assert [one.error for one in found] == [None] * len(found)
    return found


def tokens(llm: LLM, prompt: Prompt | Sequence[int], params: SamplingParams = GREEDY) -> tuple[int, ...]:
    return answers(llm, (prompt, params))[0].token_ids


def error_of_logprobs(world: World, inputs: dict[str, mx.array], found: Delta) -> float:
    """Of the first answered token, against mlx-vlm's."""
    logits = np.array(reference_logits(world.model, inputs)[0, -1])
    logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    assert found.logprobs[0].top
    return max(abs(float(logprobs[token_id]) - logprob) for token_id, logprob in found.logprobs[0].top)
