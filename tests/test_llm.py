"""The Python API on a tiny real model: what a script sees."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from outrider import LLM, InvalidConfig, InvalidRequest, SamplingParams
from outrider.build import ModelChoice, build_engine
from outrider.config import EngineConfig
from outrider.engine.engine import EngineStopped
from outrider.llm import GenerationFailed
from outrider.models.errors import ModelUnavailable
from outrider.models.heads import HeadError, new_head
from outrider.models.trunk import Trunk
from outrider.plan import MANY_TOKENS
from outrider.request import DraftDepth
from outrider.speculate.prompt_costs import PromptShape
from patience import PATIENCE_S, held_steps, wait_until
from tiny_models import write_checkpoint

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llama")
    model = write_checkpoint(folder, "llama")
    head = new_head(Trunk(model, 512))
    weights = {f"mtp.{name}": array for name, array in tree_flatten(head.parameters())}
    (folder / "mtp").mkdir()
    mx.save_safetensors(str(folder / "mtp" / "weights.safetensors"), weights)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, max_rows=4) as llm:
        yield llm


def test_strings_and_token_ids_give_the_same_answer(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello world")
    (from_text,) = llm.generate("hello world", GREEDY)
    (from_ids,) = llm.generate(ids, GREEDY)
    assert from_text.token_ids == from_ids.token_ids
    assert from_text.prompt_token_ids == list(ids)
    assert len(from_text.token_ids) == 12
    assert from_text.finish_reason == "length"


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"prompt number {i} " * (i % 3 + 1) for i in range(9)]
    together = llm.generate(prompts, GREEDY)
    assert [one.token_ids for one in together] == [llm.generate(p, GREEDY)[0].token_ids for p in prompts]


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (3, 7)]
    assert [len(out.token_ids) for out in llm.generate(["a", "b"], params)] == [3, 7]
    with pytest.raises(InvalidRequest, match="one for each"):
        llm.generate(["a", "b", "c"], params)


def test_text_is_the_decoded_answer(llm: LLM) -> None:
    (out,) = llm.generate("some prompt", GREEDY)
    prompt = list(out.prompt_token_ids)
    decoded = llm.tokenizer.decode(prompt + list(out.token_ids), skip_special_tokens=True)
    assert decoded == llm.tokenizer.decode(prompt, skip_special_tokens=True) + out.text


def test_calls_without_parameters_use_the_models_generation_config(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "repetition_penalty": 1.3}')
    with LLM(tmp_path, max_rows=2, max_context=40) as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.repetition_penalty) == (0, 1.3)
        (expected,) = llm.generate("hello", params)
        (out,) = llm.generate("hello")
        assert out.token_ids == expected.token_ids
        assert llm.stream("hello").completion().token_ids == expected.token_ids
        chat = [{"role": "user", "content": "hello"}]
        assert llm.chat(chat).token_ids == llm.chat(chat, params).token_ids


@pytest.mark.parametrize("text", ['{"temperature": "hot"}', '{"top_p": 7}'])
def test_generation_config_none_ignores_sampling_values(tmp_path: Path, text: str) -> None:
    write_checkpoint(tmp_path, "llama")
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelUnavailable, match="generation-config none"):
        LLM(tmp_path)
    with LLM(tmp_path, generation_config="none") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


def test_a_generation_config_that_is_no_object_is_refused_in_any_case(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ModelUnavailable, match="Correct or remove the file"):
        LLM(tmp_path, generation_config="none")
    with pytest.raises(InvalidConfig, match="generation_config must be one of auto, none"):
        LLM(tmp_path, generation_config="vllm")  # type: ignore[arg-type]


def test_stream_adds_up_to_the_whole_answer(llm: LLM) -> None:
    (whole,) = llm.generate("stream me", GREEDY)
    deltas = list(llm.stream("stream me", GREEDY))
    assert [i for delta in deltas for i in delta.token_ids] == whole.token_ids
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == "length"


@pytest.mark.parametrize("how", ["closed", "let go", "never read"])
def test_leaving_a_stream_early_frees_its_row(llm: LLM, how: str) -> None:
    stream = llm.stream("endless", SamplingParams(max_tokens=400, temperature=0, ignore_eos=True))
    if how != "never read":
        next(stream)
    if how == "closed":
        stream.close()
        assert list(stream) == []
    with held_steps(llm.engine):
        steps = llm.engine.num_steps
        del stream
    llm.generate("x", SamplingParams(max_tokens=1, temperature=0))
    wait_until(lambda: not llm.engine._loop.live)  # the cancel is on its way
    assert llm.engine.num_steps < steps + 20


@pytest.mark.parametrize("depth", [0, 1, 3, 8, "auto"])
@pytest.mark.parametrize("temperature", [0, 0.9])
def test_depth_does_not_change_the_answer(llm: LLM, depth: int, temperature: float) -> None:
    def params(depth: object) -> SamplingParams:
        return SamplingParams(
            max_tokens=20, temperature=temperature, seed=5, ignore_eos=True, draft_depth=depth
        )  # type: ignore[arg-type]

    plain, drafted = llm.generate(["the same prompt"] * 2, [params(0), params(depth)])
    assert drafted.token_ids == plain.token_ids
    assert plain.stats.drafted == []
    assert len(drafted.stats.drafted) <= 8
    if depth != "auto":  # which drafts where that pays on this machine
        assert (sum(drafted.stats.drafted) > 0) == (depth != 0)


def test_unseeded_equal_prompts_differ(llm: LLM) -> None:
    hot = SamplingParams(max_tokens=20, temperature=1.5, ignore_eos=True)
    first, second = llm.generate(["same", "same"], hot)
    assert first.token_ids != second.token_ids


def test_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    (free,) = llm.generate("stop here", GREEDY)
    stop = free.text[len(free.text) // 2 :][:2]
    expected = free.text[: free.text.index(stop)]
    for depth in (0, 4):
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, stop=stop, draft_depth=depth)
        deltas = list(llm.stream("stop here", params))
        assert "".join(delta.text for delta in deltas) == expected
        assert (deltas[-1].finish_reason, deltas[-1].stop_string) == ("stop", stop)


def test_stop_token_ends_the_answer(llm: LLM) -> None:
    (free,) = llm.generate("stop token", GREEDY)
    stop_id = free.token_ids[4]
    end = free.token_ids.index(stop_id) + 1
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, stop_token_ids=[stop_id])
    (cut,) = llm.generate("stop token", params)
    assert cut.token_ids == free.token_ids[:end]
    assert cut.finish_reason == "stop"


def test_logprobs_come_with_every_token(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=3)
    (out,) = llm.generate("logprobs", params)
    assert out.logprobs is not None
    assert [one.token_id for one in out.logprobs] == list(out.token_ids)
    assert all(len(one.top) == 3 and one.top[0][0] == one.token_id for one in out.logprobs)
    assert all(one.logprob == pytest.approx(one.top[0][1]) and one.logprob <= 0 for one in out.logprobs)
    assert llm.generate("logprobs", GREEDY)[0].logprobs is None


def test_chat_uses_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    out = llm.chat(messages, GREEDY)
    rendered = llm.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert out.prompt_token_ids == list(rendered)
    both = llm.chat([messages, [{"role": "user", "content": "other"}]], GREEDY)
    assert both[0].token_ids == out.token_ids
    assert "".join(d.text for d in llm.stream_chat(messages, GREEDY)) == out.text


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "empty"),
        ([1] * 5000, GREEDY, "context holds"),
        ([10**6], GREEDY, "outside the vocabulary"),
        ([-1], GREEDY, "outside the vocabulary"),
        ("x", SamplingParams(logit_bias={10**6: 1.0}), "outside the vocabulary"),
    ],
)
def test_bad_requests_are_refused_and_the_engine_serves_on(
    llm: LLM, prompt: object, params: SamplingParams, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm.generate([prompt], params)  # type: ignore[list-item]
    assert llm.generate("fine", GREEDY)[0].finish_reason == "length"


def test_one_bad_prompt_among_many_starts_none(llm: LLM) -> None:
    steps = llm.engine.num_steps
    with pytest.raises(InvalidRequest):
        llm.generate([[1, 2], []], GREEDY)
    assert llm.engine.num_steps == steps


def test_max_tokens_none_runs_to_the_end_of_the_context(folder: Path) -> None:
    with LLM(folder, max_context=40) as llm:
        (out,) = llm.generate([[5] * 10], SamplingParams(max_tokens=None, temperature=0, ignore_eos=True))
        assert len(out.token_ids) == 30
        assert out.finish_reason == "length"


@pytest.mark.parametrize("auto_depth", ["auto", 0])
def test_the_planner_of_prompts_knows_the_dequantised_weights_of_the_model(
    auto_depth: DraftDepth, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.build.copied_bytes", lambda *_: 10**15)
    for _ in range(2):  # with "auto" the second engine has stored costs
        engine, _ = build_engine(ModelChoice(folder), EngineConfig(max_rows=2, auto_depth=auto_depth))
        costs = engine._loop.parts.controller.prompt_costs
        engine.close()
        assert costs.pass_bytes(PromptShape().plus(MANY_TOKENS - 1, 0)) < 10**15
        assert costs.pass_bytes(PromptShape().plus(MANY_TOKENS, 0)) >= 10**15


def test_prompt_beyond_the_memory_budget_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidConfig, match="even one row"):
        LLM(folder, memory_budget_bytes=1000)
    with LLM(folder, memory_budget_bytes=400_000) as llm:
        longest = llm.engine._loop.scheduler.longest_context()
        assert 0 < longest < 500
        with pytest.raises(InvalidRequest, match="memory budget"):
            llm.generate([[5] * longest], GREEDY)
        assert llm.generate([[5] * (longest - 1)], GREEDY)[0].finish_reason == "length"


def test_step_that_fails_is_done_again_and_nothing_is_lost(folder: Path) -> None:
    with LLM(folder) as llm:
        expected = [out.token_ids for out in llm.generate(["one", "two", "three"], GREEDY)]
        runner = llm.engine._loop.parts.runner
        finish, calls = runner.finish, 0

        def fails_once_half_way(launched: object) -> object:
            nonlocal calls
            calls += 1
            result = finish(launched)
            if calls == 6:
                raise RuntimeError("out of memory, say")
            return result

        runner.finish = fails_once_half_way  # type: ignore[method-assign, assignment]
        assert [out.token_ids for out in llm.generate(["one", "two", "three"], GREEDY)] == expected


def test_model_that_always_fails_ends_requests_with_its_error_and_serves_on(folder: Path) -> None:
    with LLM(folder) as llm:
        runner = llm.engine._loop.parts.runner
        launch = runner.launch
        runner.launch = lambda *step: (_ for _ in ()).throw(RuntimeError("no device"))  # type: ignore[method-assign]
        with pytest.raises(GenerationFailed, match="no device"):
            llm.generate("x", GREEDY)
        runner.launch = launch  # type: ignore[method-assign]
        assert llm.generate("x", GREEDY)[0].finish_reason == "length"


def test_closing_ends_what_is_running(folder: Path) -> None:
    llm = LLM(folder)
    ends = []
    with held_steps(llm.engine, num_free=3):
        stream = llm.stream("x", SamplingParams(max_tokens=450, temperature=0, ignore_eos=True))
        reader = threading.Thread(target=lambda: ends.append(list(stream)[-1].finish_reason))
        closing = threading.Thread(target=llm.close)
        reader.start()
        closing.start()
        wait_until(llm.engine._stopping.is_set)
    for thread in (reader, closing):
        thread.join(PATIENCE_S)
    assert ends == ["cancelled"]
    with pytest.raises(EngineStopped):
        llm.generate("x", GREEDY)
    llm.close()  # twice is harmless


def test_requests_from_many_threads_at_once(llm: LLM) -> None:
    expected = {
        p: llm.generate(p, GREEDY)[0].token_ids for p in ("a", "bb", "ccc", "dddd", "eeeee", "ffffff")
    }
    found: dict[str, list[int]] = {}
    threads = [
        threading.Thread(target=lambda p=p: found.update({p: llm.generate(p, GREEDY)[0].token_ids}))
        for p in expected
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert found == expected


def test_mtp_without_a_head_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    with pytest.raises(InvalidConfig, match="needs an MTP head"):
        LLM(tmp_path, drafter="mtp")
    with LLM(tmp_path) as llm:
        assert llm.engine.facts.drafter == "none"
        with pytest.raises(InvalidRequest, match="without a drafter"):
            llm.generate("x", SamplingParams(draft_depth=2))


def _cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def _half(file: Path) -> None:
    tensors = dict(mx.load(str(file)))
    del tensors["mtp.fc.weight"]
    mx.save_safetensors(str(file), tensors)


@pytest.mark.parametrize("damage", [_cut_short, _half])
def test_damaged_head_is_a_warning_that_says_what_to_do(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Under "auto". Who insists on the head gets the error."""
    model = write_checkpoint(tmp_path, "llama")
    head = new_head(Trunk(model, 512))
    file = tmp_path / "mtp.safetensors"
    mx.save_safetensors(str(file), {f"mtp.{name}": a for name, a in tree_flatten(head.parameters())})
    with LLM(tmp_path) as llm:
        assert llm.engine.facts.drafter == "mtp"
    damage(file)
    with LLM(tmp_path) as llm:
        assert llm.engine.facts.drafter == "none"
        assert llm.generate("x", GREEDY)[0].token_ids
    (said,) = [record.getMessage() for record in caplog.records if "without drafts" in record.getMessage()]
    assert str(file) in said
    assert "outrider mtp extract ORIGINAL" in said
    assert f"outrider mtp train {tmp_path}" in said
    for insisting in ({"drafter": "mtp"}, {"head": file}):
        with pytest.raises(HeadError, match=r"mtp\.safetensors"):
            LLM(tmp_path, **insisting)  # type: ignore[arg-type]


def test_ngram_drafter_needs_no_head(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    with LLM(tmp_path, drafter="none") as plain:
        expected = plain.generate([[7, 8, 9] * 6], params)[0]
    with LLM(tmp_path, drafter="ngram") as llm:
        out = llm.generate([[7, 8, 9] * 6], replace(params, draft_depth=3))[0]
    assert out.token_ids == expected.token_ids
    assert sum(out.stats.drafted) > 0


def test_model_that_cannot_be_loaded_raises_in_the_caller(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"config\.json"):
        LLM(tmp_path)
    with pytest.raises(InvalidConfig):
        LLM(tmp_path, max_rows=0)


class PoisonedEmbedding:
    """Gives NaN for one token; everything else is the model's own."""

    def __init__(self, sound: Any, poison: int) -> None:
        self._sound, self._poison = sound, poison

    def __call__(self, token_ids: mx.array) -> mx.array:
        return mx.where((token_ids == self._poison)[..., None], mx.nan, self._sound(token_ids))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sound, name)


def test_row_with_unsound_logits_ends_in_error_and_leaves_nothing_behind(folder: Path) -> None:
    poison = 9
    plain = replace(GREEDY, draft_depth=0)  # a random head would draft the poisoned token for others
    with LLM(folder) as llm:
        prompts = [[5, 6], [7, 8], [10, 11]]
        expected = [out.token_ids for out in llm.generate(prompts, plain)]
        assert all(poison not in answer for answer in expected)
        inner = llm.engine._loop.parts.runner._forward._trunk.inner  # type: ignore[attr-defined]
        inner.embed_tokens = PoisonedEmbedding(inner.embed_tokens, poison)
        streams = [llm.stream(ids, plain) for ids in ([5, 6], [poison, 5], [7, 8])]
        with pytest.raises(GenerationFailed, match="NaN"):
            list(streams[1])
        answers = [[i for delta in streams[k] for i in delta.token_ids] for k in (0, 2)]
        answers += [llm.generate([prompts[2]], plain)[0].token_ids]
        assert answers == expected
