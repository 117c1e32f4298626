"""`LLM(draft_model=...)`: a smaller model drafts, and no answer depends on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from models.gguf_writer import TinyModel
from outrider import LLM, EngineConfig, InvalidConfig, SamplingParams
from outrider.api.settings import ServerSettings
from outrider.build import ModelChoice, _memory_plan
from outrider.cli.banner import banner
from outrider.engine.memory_plan import MemoryShare
from outrider.engine_place import EnginePlace
from outrider.models import loader
from outrider.models.draft_model import load_draft_model
from outrider.models.files.weight_size import loaded_bytes
from outrider.models.gguf import convert
from outrider.request import DraftDepth
from tiny_models import VOCAB_SIZE, write_checkpoint

TEXT = [(5 * i * i + i + 7) % VOCAB_SIZE for i in range(150)]
PROMPTS = [TEXT[:90], TEXT[30:37], TEXT, [*TEXT[:70], 3, 4, 5]]
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.9, top_k=30, seed=5, ignore_eos=True)


def at_depth(depth: DraftDepth) -> list[SamplingParams]:
    return [replace(params, draft_depth=depth) for params in (GREEDY, SAMPLED, GREEDY, SAMPLED)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, "llama")
    return folder


@pytest.fixture(scope="module")
def answers(model: Path) -> list[list[int]]:
    with LLM(model, drafter="none") as llm:
        return [one.token_ids for one in llm.generate(PROMPTS, at_depth(0))]


@pytest.mark.parametrize("family", ["llama", "qwen3-4bit"])
def test_no_answer_depends_on_the_draft_model(
    family: str, model: Path, answers: list[list[int]], tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, family, num_hidden_layers=1)
    with LLM(model, draft_model=tmp_path) as llm:
        assert llm.engine.facts.drafter == "model"
        for depth in (3, "auto", 0, 8):  # the later ones begin with cached prefixes
            found = llm.generate(PROMPTS, at_depth(depth))  # type: ignore[arg-type]
            assert [one.token_ids for one in found] == answers
            if depth:
                assert sum(one.stats.num_cached for one in found) > 0 or depth == 3
            if depth in (3, 8):
                assert all(sum(one.stats.drafted) > 0 for one in found)


def test_a_model_that_drafts_for_itself_is_always_right(model: Path, answers: list[list[int]]) -> None:
    """Also behind cached prefixes, those of rows that did not draft too."""
    with LLM(model, draft_model=model) as llm:
        for depth in (0, 4, 4):
            found = llm.generate(PROMPTS, at_depth(depth))
            assert [one.token_ids for one in found] == answers
            for one in found:
                assert one.stats.accepted == one.stats.drafted
                assert sum(one.stats.accepted) > 12 or depth == 0


def test_a_gguf_file_may_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "models_folder", lambda: tmp_path)
    file = TinyModel().file("Q8_0").write(tmp_path / "tiny.gguf")
    with LLM(file, draft_model=file) as llm:
        prompt = [i % 250 for i in TEXT[:40]]
        (drafted,) = llm.generate([prompt], replace(GREEDY, draft_depth=3))
        (plain,) = llm.generate([prompt], replace(GREEDY, draft_depth=0))
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.accepted == drafted.stats.drafted
    assert drafted.stats.drafted[2] > 0


def test_the_weights_of_the_draft_model_count(model: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    loaded = loader.load(model)
    draft_model = load_draft_model(tmp_path, loaded, "auto", None)
    place = EnginePlace(memory=MemoryShare(1 << 30, 1 << 28))
    alone, both = (
        _memory_plan(loaded, drafter, EngineConfig(), place, None).weights for drafter in (None, draft_model)
    )
    assert both == alone + loaded_bytes(draft_model.modules)


def test_a_draft_model_and_another_drafter_contradict_each_other(model: Path) -> None:
    for drafter in ("mtp", "ngram", "none"):
        with pytest.raises(InvalidConfig, match="contradict each other"):
            LLM(model, draft_model=model, drafter=drafter)
    with pytest.raises(InvalidConfig, match=r"an MTP head \(--head\) and a draft model"):
        ModelChoice(model, head="x", draft_model=model)
    with pytest.raises(InvalidConfig, match="a draft vocabulary"):
        ModelChoice(model, draft_vocabulary=50, draft_model=model)


def test_the_banner_names_the_draft_model(model: Path) -> None:
    with LLM(model, draft_model=model, max_rows=1) as llm:
        text = banner(llm.engine.facts, ServerSettings(), 1 << 30, "auto", "http://x", "not cached")
    assert f"draft model {model}, as many per step as make it faster" in text
