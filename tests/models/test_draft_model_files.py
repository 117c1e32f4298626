"""Draft models that cannot draft are refused with the reason; other drafters are recognised by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.main import main
from outrider.config import InvalidConfig
from outrider.models import loader
from outrider.models.draft_model import load_draft_model
from outrider.models.drafter_kinds import DFLASH, EAGLE, EAGLE_3, GEMMA_ASSISTANT, SPECULATOR, drafter_kind
from outrider.models.heads import HeadError, locate_file
from tiny_models import SPECIAL_TOKENS, write_checkpoint, write_tokenizer


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> loader.LoadedModel:
    folder = tmp_path_factory.mktemp("target")
    write_checkpoint(folder, "llama")
    return loader.load(folder)


def load(folder: Path, target: loader.LoadedModel, kv_bits: int | None = None) -> Any:
    return load_draft_model(folder, target, "auto", kv_bits)


def test_a_model_of_another_family_with_the_same_tokenizer_is_loaded(
    target: loader.LoadedModel, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, "qwen3-4bit", num_hidden_layers=1)
    loaded = load(tmp_path, target)
    assert loaded.source == str(tmp_path)
    assert loaded.weight_files == [tmp_path / "model.safetensors"]


def test_other_special_tokens_are_no_reason_to_refuse(target: loader.LoadedModel, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    write_tokenizer(tmp_path, [f"<other{i}>" for i in range(len(SPECIAL_TOKENS))])
    load(tmp_path, target)


def test_other_tokens_are_refused_with_an_example(target: loader.LoadedModel, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    write_tokenizer(tmp_path, [*SPECIAL_TOKENS, "<one more>"])
    first = len(SPECIAL_TOKENS) + 1
    with pytest.raises(InvalidConfig, match=rf"differs .* tokens\. Token {first}, for example, is '.' there"):
        load(tmp_path, target)


def test_a_much_smaller_vocabulary_is_refused(target: loader.LoadedModel, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    file = tmp_path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {token: i for token, i in vocab.items() if i < 60}
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(InvalidConfig, match=r"its tokenizer has \d+ tokens and the model's has \d+"):
        load(tmp_path, target)


def test_a_draft_model_with_recurrent_layers_is_never_paused(
    target: loader.LoadedModel, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "attention", "llama", num_hidden_layers=1)
    write_checkpoint(tmp_path / "hybrid", "qwen3_5")
    attention, hybrid = (load(tmp_path / name, target) for name in ("attention", "hybrid"))
    assert (attention.can_be_paused, attention.max_context) == (True, 256)
    assert (hybrid.can_be_paused, hybrid.max_context) == (False, None)


def test_cells_that_cannot_be_quantised_are_refused(target: loader.LoadedModel, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    with pytest.raises(InvalidConfig, match="kv_bits=8: llama has keys of 16 elements"):
        load(tmp_path, target, kv_bits=8)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, EAGLE_3),
        ({"architectures": ["Eagle3LlamaForCausalLM"], "model_type": "llama"}, EAGLE_3),
        ({"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}, EAGLE_3),
        ({"architectures": ["EagleLlamaForCausalLM"], "model_type": "eagle"}, EAGLE),
        ({"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}, DFLASH),
        ({"architectures": ["Qwen3ForCausalLM"], "dflash_config": {}}, DFLASH),
        ({"architectures": ["Gemma4AssistantForCausalLM"]}, GEMMA_ASSISTANT),
        ({"model_type": "gemma4_assistant"}, GEMMA_ASSISTANT),
        ({"model_type": "gemma4_unified_assistant"}, GEMMA_ASSISTANT),
        ({"speculators_model_type": "mlp", "architectures": None}, SPECULATOR),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, None),
        ({"architectures": ["Eagle2_5_VLForConditionalGeneration"], "model_type": "eagle_2_5_vl"}, None),
        ({"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4"}, None),
        ({"architectures": [3]}, None),
        ({}, None),
    ],
)
def test_published_drafters_are_recognised(config: Mapping[str, Any], kind: str | None) -> None:
    assert drafter_kind(config) == kind


def test_a_published_drafter_is_named_and_refused(
    target: loader.LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path, "llama", architectures=["LlamaForCausalLMEagle3"])
    with pytest.raises(InvalidConfig, match=r"it is an EAGLE-3 drafter .* does not serve yet"):
        load(tmp_path, target)
    with pytest.raises(HeadError, match="It is an EAGLE-3 drafter"):
        locate_file(tmp_path)
    assert main(["mtp", "inspect", str(tmp_path)]) == 1
    assert f"{tmp_path} is an EAGLE-3 drafter" in capsys.readouterr().out
    assert main(["mtp", "inspect", "--json", str(tmp_path)]) == 1
    assert json.loads(capsys.readouterr().out)["drafter"] == EAGLE_3
