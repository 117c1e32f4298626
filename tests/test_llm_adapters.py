"""Adapters in the Python API: for all calls, for each call, and what becomes of them while answers run."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adapter_files import write_adapter
from outrider import LLM, InvalidConfig, SamplingParams
from outrider.engine.adapters import AdapterConflict, AdapterRefused, UnknownAdapter
from patience import PATIENCE_S, held_steps, wait_until
from tiny_models import is_quantized_name, quantized_tiny_model, tiny_model, write_checkpoint

GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
PROMPTS = ["hello world", "one two three four", "hello world", "abc"]
NAMES = ["sql", None, "poem", "sql"]
ADAPTERS: dict[str, dict[str, Any]] = {"sql": {"rank": 4, "scale": 4.0}, "poem": {"rank": 2, "kind": "dora"}}


def write_all(folder: Path, name: str) -> Path:
    """A model and two adapters."""
    write_checkpoint(folder / "model", name)
    for adapter, how in ADAPTERS.items():
        model = quantized_tiny_model(name)[0] if is_quantized_name(name) else tiny_model(name)
        write_adapter(folder / adapter, model, seed=adapter, **how)
    return folder


@pytest.fixture(scope="module", params=["llama", "llama-4bit"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("adapters"), request.param)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    adapters = {name: folder / name for name in ("sql", "poem")}
    with LLM(folder / "model", adapters=adapters, max_adapters=3, max_rows=4) as llm:
        yield llm


def with_adapter(name: str | None) -> SamplingParams:
    return replace(GREEDY, adapter=name)


def test_answers_of_one_batch_are_those_of_models_with_one_adapter_each(folder: Path, llm: LLM) -> None:
    together = llm.generate(PROMPTS, [with_adapter(name) for name in NAMES])
    found = {name: llm.generate(PROMPTS, with_adapter(name)) for name in {*NAMES}}
    for name in ("sql", "poem", None):
        with LLM(folder / "model", adapter=None if name is None else folder / name) as alone:
            expected = [one.token_ids for one in alone.generate(PROMPTS, GREEDY)]
            assert [one.token_ids for one in found[name]] == expected
            assert all(together[i].token_ids == expected[i] for i in range(4) if NAMES[i] == name)
    answers = {name: tuple(found[name][0].token_ids) for name in found}
    assert len(set(answers.values())) == 3, "the adapters must make a difference"


def test_a_prefix_is_cached_for_its_adapter(llm: LLM) -> None:
    long = "a prompt that is longer than a block of the prefix cache " * 3
    llm.generate(long, with_adapter("sql"))
    assert llm.generate(long, with_adapter("poem"))[0].stats.num_cached == 0
    assert llm.generate(long, with_adapter("sql"))[0].stats.num_cached > 0


def test_unknown_and_bad_adapters_are_refused_and_the_others_serve_on(folder: Path, llm: LLM) -> None:
    before = llm.generate(PROMPTS[0], with_adapter("sql"))[0].token_ids
    with pytest.raises(UnknownAdapter, match="sql, poem"):
        llm.generate("hello", with_adapter("nobody"))
    with pytest.raises(AdapterRefused, match="no such folder"):
        llm.load_adapter("gone", folder / "nowhere")
    with pytest.raises(AdapterConflict, match="already"):
        llm.load_adapter("sql", folder / "poem")
    with pytest.raises(UnknownAdapter):
        llm.unload_adapter("nobody")
    assert llm.generate(PROMPTS[0], with_adapter("sql"))[0].token_ids == before


def test_adapters_come_and_go_but_not_under_a_running_answer(folder: Path, llm: LLM) -> None:
    info = llm.load_adapter("later", folder / "sql")
    assert info.num_bytes > 0
    use = llm.engine.memory_use()
    assert use is not None
    assert use.used["adapters"] > 2 * info.num_bytes
    assert use.budgets["adapters"] == 1 << 30
    expected = llm.generate(PROMPTS[0], with_adapter("sql"))[0].token_ids
    with held_steps(llm.engine, num_free=2) as hurdle:
        stream = llm.stream(PROMPTS[0], with_adapter("later"))
        assert hurdle.reached.wait(PATIENCE_S)
        with ThreadPoolExecutor(1) as pool:
            refused = pool.submit(llm.unload_adapter, "later")
            wait_until(lambda: not llm.engine._inbox.empty())
            hurdle.open()
            with pytest.raises(AdapterConflict, match="1 requests use"):
                refused.result(PATIENCE_S)
    assert stream.completion().token_ids == expected
    llm.unload_adapter("later")
    assert list(llm.engine.adapters) == ["sql", "poem"]
    with pytest.raises(UnknownAdapter):
        llm.generate("hello", with_adapter("later"))


def test_a_request_whose_adapter_was_unloaded_before_its_turn_gets_an_error(folder: Path, llm: LLM) -> None:
    llm.load_adapter("brief", folder / "sql")
    validated = llm.engine.validate([1, 2, 3], with_adapter("brief"))
    llm.unload_adapter("brief")
    end = llm.engine.submit(validated).take()
    assert end is not None
    assert end.finish_reason == "error"
    assert end.is_client_error
    assert "brief" in str(end.error)


def test_settings_that_contradict_each_other_are_refused(folder: Path) -> None:
    with pytest.raises(InvalidConfig, match="cannot be combined"):
        LLM(folder / "model", adapter=folder / "sql", adapters={"poem": folder / "poem"})
    with pytest.raises(InvalidConfig, match="max_adapters"):
        LLM(folder / "model", adapters={"poem": folder / "poem"}, max_adapters=0)
    with pytest.raises(InvalidConfig, match="nowhere"):
        LLM(folder / "model", adapter=folder / "nowhere")
    with pytest.raises(InvalidConfig, match="poem"):
        LLM(folder / "model", adapters={"poem": folder / "nowhere"})


def test_an_engine_without_adapters_refuses_them(folder: Path) -> None:
    with LLM(folder / "model") as llm:
        with pytest.raises(UnknownAdapter):
            llm.generate("hello", with_adapter("sql"))
        with pytest.raises(AdapterRefused, match="takes no adapters"):
            llm.load_adapter("sql", folder / "sql")
