"""Where published files name the tokens that end an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerFast

from outrider import LLM, SamplingParams
from outrider.models.files.eos_tokens import eos_ids
from outrider.models.loader import load
from tiny_models import END_ID, write_checkpoint, write_tokenizer
from tiny_vision import write_vision_checkpoint

TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot|>")
TEXT_END, TURN_END, EOT = 0, 2, 3
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PARTS = "{% for p in m.content %}{{ p.text }}{% endfor %}"
LISTS_ONLY = "{% for m in messages %}<|im_start|>" + PARTS + "<|im_end|>{% endfor %}"


def tokenizer_of(folder: Path, template: str | None, tokens: tuple[str, ...] = TOKENS) -> Any:
    write_tokenizer(folder, tokens, template)  # type: ignore[arg-type]
    return TokenizerWrapper(PreTrainedTokenizerFast.from_pretrained(folder))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, {TEXT_END, TURN_END}),
        (LISTS_ONLY, {TEXT_END, TURN_END}),
        (
            CHATML.replace("<|im_end|>\n", "<|im_end|><|eot|>  "),
            {TEXT_END, EOT},
        ),  # the last token ends the turn
        (CHATML.replace("<|im_end|>", ""), {TEXT_END}),  # turns have no end
        (CHATML.replace("<|im_end|>", "</turn>"), {TEXT_END}),  # a text is no token
        ("{{ raise_exception('no') }}", {TEXT_END}),
        (None, {TEXT_END}),
        (CHATML + "<|im_start|>assistant\n", {TEXT_END, TURN_END}),  # the start of an answer, always
        (CHATML + "<|eot|>", {TEXT_END, TURN_END}),
        (CHATML + "{% if messages | length > 2 %}{{ raise_exception('no') }}{% endif %}", {TEXT_END}),
    ],
)
def test_the_template_shows_what_the_tokenizer_does_not_name(
    tmp_path: Path, template: str | None, expected: set[int]
) -> None:
    assert eos_ids(tokenizer_of(tmp_path, template), {}) == expected


def test_the_end_of_a_message_in_a_channel_is_not_the_end_of_the_answer(tmp_path: Path) -> None:
    tokens = ("<|return|>", "<|start|>", "<|end|>", "<|channel|>")
    template = "{% for m in messages %}<|start|>{{ m.role }}<|channel|>{{ m.content }}<|end|>{% endfor %}"
    assert eos_ids(tokenizer_of(tmp_path, template, tokens), {}) == {0}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"text_config": {"eos_token_id": EOT}}, {TEXT_END, EOT}),
        ({"text_config": {"eos_token_id": [EOT, TURN_END]}}, {TEXT_END, EOT, TURN_END}),
        ({"text_config": {"eos_token_id": 40}}, {TEXT_END}),  # an ordinary token would cut off answers
        ({"text_config": {"eos_token_id": None}}, {TEXT_END}),
        ({"text_config": {"eos_token_id": "x"}}, {TEXT_END}),
        ({"text_config": None}, {TEXT_END}),
    ],
)
def test_the_config_of_the_language_part_counts(tmp_path: Path, config: Any, expected: set[int]) -> None:
    assert eos_ids(tokenizer_of(tmp_path, None), config) == expected


def test_all_places_count_together(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", text_config={"eos_token_id": 1})
    write_tokenizer(tmp_path, TOKENS, CHATML)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOT, 0]}))
    assert load(tmp_path).eos_ids == {TEXT_END, 1, TURN_END, EOT}


def test_a_vision_checkpoint_names_its_end_in_the_language_part(tmp_path: Path) -> None:
    pytest.importorskip("mlx_vlm")
    write_vision_checkpoint(tmp_path, "qwen2_vl")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["eos_token_id"]
    file.write_text(json.dumps(config | {"text_config": {**config["text_config"], "eos_token_id": [1, 2]}}))
    assert load(tmp_path).eos_ids == {END_ID, 1, 2}


def test_an_answer_ends_where_the_model_ends_its_turn(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    write_tokenizer(tmp_path, TOKENS, CHATML + "{% if add_generation_prompt %}<|im_start|>{% endif %}")
    params = SamplingParams(max_tokens=20, temperature=0, logit_bias={TURN_END: 1000.0})
    with LLM(tmp_path, drafter="none") as llm:
        answer = llm.chat([{"role": "user", "content": "hi"}], params)
    assert (answer.finish_reason, answer.text, len(answer.token_ids)) == ("stop", "", 1)
