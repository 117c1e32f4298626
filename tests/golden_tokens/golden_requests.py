"""The golden requests for the Python API: names, prompts and sampling parameters. Nothing runs here."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import numpy as np

from outrider.request import Grammar, SamplingParams

DEPTHS = (0, 3, "auto", 1, 8, 2)  # neighbouring requests share steps and have different draft depths

CITY_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "sunny": {"type": "boolean"},
    },
    "required": ["city", "days", "sunny"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Vocabulary:
    """Token ids and text that mean something to a model."""

    frequent_ids: tuple[int, ...]  # tokens that the model picks often
    stop: tuple[str, ...]  # text that the model writes often


def sampling_variants(num_tokens: int, vocabulary: Vocabulary) -> dict[str, SamplingParams]:
    """Every sampling parameter at least once. Each request has its own draft depth."""
    ids = vocabulary.frequent_ids
    greedy = SamplingParams(temperature=0, max_tokens=num_tokens)
    sampled = SamplingParams(temperature=0.9, seed=11, max_tokens=num_tokens)
    form = replace(sampled, max_tokens=8 * num_tokens, seed=23)
    variants = {
        "greedy": greedy,
        "greedy again": greedy,
        "greedy, end token ignored": replace(greedy, ignore_eos=True),
        "sampled": sampled,
        "sampled, seed 12": replace(sampled, seed=12),
        "sampled, negative seed": replace(sampled, seed=-(2**63)),
        "sampled, largest seed": replace(sampled, seed=2**64 - 1),
        "sampled, temperature 2": replace(sampled, temperature=2.0),
        "top_k": replace(sampled, top_k=5),
        "top_k larger than the candidates": replace(sampled, top_k=2000, temperature=1.3),
        "top_p": replace(sampled, top_p=0.8),
        "min_p": replace(sampled, min_p=0.2),
        "top_k, top_p and min_p": replace(sampled, top_k=20, top_p=0.9, min_p=0.05),
        "repetition penalty": replace(sampled, repetition_penalty=1.4),
        "greedy with repetition penalty": replace(greedy, repetition_penalty=1.3, ignore_eos=True),
        "presence and frequency penalty": replace(sampled, presence_penalty=1.5, frequency_penalty=0.7),
        "negative penalties": replace(sampled, presence_penalty=-1.0, frequency_penalty=-0.5),
        "logit bias": replace(sampled, logit_bias={ids[0]: 3.5, ids[1]: -4.0}),
        "greedy with a banned token": replace(greedy, logit_bias={ids[0]: -math.inf}, ignore_eos=True),
        "min_tokens": replace(sampled, min_tokens=num_tokens - 2),
        "stop string": replace(greedy, stop=vocabulary.stop[0], ignore_eos=True),
        "several stop strings": replace(sampled, stop=list(vocabulary.stop), ignore_eos=True),
        "stop token": replace(sampled, stop_token_ids=ids, ignore_eos=True),
        "special tokens kept": replace(sampled, temperature=1.5, skip_special_tokens=False),
        "logprobs": replace(greedy, logprobs=3, max_tokens=8),
        "sampled logprobs": replace(sampled, logprobs=2, max_tokens=8, temperature=1.2),
        "logprobs of the picked token": replace(sampled, logprobs=0, max_tokens=8),
        "JSON schema": replace(form, grammar=Grammar("json_schema", json.dumps(CITY_SCHEMA))),
        "greedy JSON schema": replace(
            form, temperature=0, grammar=Grammar("json_schema", json.dumps(CITY_SCHEMA))
        ),
        "regex": replace(form, grammar=Grammar("regex", "(ab|cd){2,5}-[0-9]{3}")),
        "regex, stop string inside": replace(form, stop="-", grammar=Grammar("regex", "[a-f]{4}-[0-9]{3}")),
        "Lark grammar": replace(form, grammar=Grammar("lark", 'start: ("x" | "yz") " " /[0-9]+/ "."')),
        "prediction": replace(greedy, prediction_ids=ids * 3),
    }
    depths = cycle(DEPTHS)
    return {name: replace(params, draft_depth=next(depths)) for name, params in variants.items()}


def with_prompts(
    variants: dict[str, SamplingParams], prompts: Sequence[Any]
) -> dict[str, tuple[Any, SamplingParams]]:
    """Each variant with the next prompt. "greedy again" has the prompt of "greedy"."""
    following = cycle(prompts)
    found = {name: (next(following), params) for name, params in variants.items()}
    if "greedy again" in found:
        found["greedy again"] = (found["greedy"][0], found["greedy again"][1])
    return found


def chat(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def chat_about(text: str, *pictures: np.ndarray) -> list[dict[str, Any]]:
    shown = [{"type": "image", "image": picture} for picture in pictures]
    return [{"role": "user", "content": [*shown, {"type": "text", "text": text}]}]


def disc(colour: tuple[int, int, int], size: int = 96) -> np.ndarray:
    """A disc of one colour on white.  uint8 [size, size, 3]"""
    y, x = np.mgrid[:size, :size] - size / 2
    pixels = np.full((size, size, 3), 255, np.uint8)
    pixels[x**2 + y**2 < (size / 3) ** 2] = colour
    return pixels


TINY_VOCABULARY = Vocabulary(frequent_ids=(40, 41, 42, 43, 35), stop=("%", "A", "&", "q"))
TINY_PROMPTS = (
    "hello world",
    "the quick brown fox jumps over the lazy dog, " * 4,  # more than one chunk of prefill
    [10, 11, 12, 10, 11, 12, 10, 11],
    "abcabcabcabcabc",
    "x",
)
HYBRID_VOCABULARY = Vocabulary(frequent_ids=(16, 268, 266, 276, 300), stop=("3", ".", ","))
DEFAULT_VOCABULARY = Vocabulary(frequent_ids=(260, 30, 28, 284, 253), stop=(" degrees", ".", ","))
DEFAULT_PROMPTS = (
    "Once upon a time",
    "def add(a, b):\n    return a + b\n\ndef add(a, b, c):\n",
    "Water boils at 100 degrees. Water freezes at",
)
DEFAULT_VARIANTS = (  # some of the variants, since this model takes its time
    *("greedy", "greedy again", "greedy with a banned token", "sampled", "top_k, top_p and min_p"),
    *("top_k larger than the candidates", "top_p", "repetition penalty", "presence and frequency penalty"),
    *("logit bias", "stop string", "several stop strings", "logprobs", "sampled logprobs"),
    *("JSON schema", "regex", "prediction"),
)
DEFAULT_CHATS = (
    "What is the capital of France?",
    "Write one sentence about rivers.",
    "Name three colours.",
)
