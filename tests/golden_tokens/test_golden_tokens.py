"""The same requests give the same tokens: a safety net for refactorings.

The requests (golden_requests.py, golden_http.py) run through the Python API and through `outrider serve`, on
models that are always the same (golden_models.py), in float32 on the CPU. The answers must be equal to the
recorded ones (recorded/*.json): token ids, text and finish reasons exactly, log-probabilities almost.

A refactoring must not change the records. After a change that is meant to change answers, record the answers
anew, read the difference, and commit the new records with the change:

    python -m pytest tests/golden_tokens --record            # all records
    python -m pytest tests/golden_tokens --record -k hybrid  # some of them

The tests use only the public surface: `LLM`, `SamplingParams`, `Grammar`, the `outrider` command, its routes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import golden_http as http
import pytest
from golden_models import (
    DEFAULT_MODEL,
    THINK_END_ID,
    TINY_HYBRID,
    VISION_MODEL,
    own_model,
    tiny_llama,
    tiny_thinker,
    tiny_vision,
)
from golden_requests import (
    DEFAULT_CHATS,
    DEFAULT_PROMPTS,
    DEFAULT_VARIANTS,
    DEFAULT_VOCABULARY,
    HYBRID_VOCABULARY,
    TINY_PROMPTS,
    TINY_VOCABULARY,
    chat,
    chat_about,
    disc,
    sampling_variants,
    with_prompts,
)

from image_files import noise
from outrider import LLM, SamplingParams
from patience import IN_SOAK
from server_process import ON_CPU, serving

RECORDED = Path(__file__).parent / "recorded"
LOGPROB_TOLERANCE = 1e-3
DRAFTERS = ("mtp", "ngram", "none")

Json = dict[str, Any]
Requests = dict[str, tuple[Any, SamplingParams]]


# -- records -----------------------------------------------------------------------------------------------


class Record:
    """One file of recorded answers."""

    def __init__(self, name: str, is_recording: bool) -> None:
        self._file = RECORDED / f"{name}.json"
        self._is_recording = is_recording

    def check(self, found: dict[str, Json]) -> None:
        """Fails for answers that differ from the recorded ones. With --record, stores them instead."""
        if self._is_recording:
            self._write(found)
            self._is_recording = False  # the other drafters, and streams, must give the same answers
        recorded = json.loads(self._file.read_text())
        assert list(found) == list(recorded), "the names of the requests changed: record the answers anew"
        different = [
            f"{name}\n  recorded: {json.dumps(recorded[name])}\n  found:    {json.dumps(found[name])}"
            for name in found
            if not is_equal(recorded[name], found[name])
        ]
        assert not different, "\n".join(
            [f"{len(different)} answers differ from {self._file.name}:", *different]
        )

    def _write(self, found: dict[str, Json]) -> None:
        """One line for each answer, so that a difference of two versions shows which answers changed."""
        lines = [f"{json.dumps(name)}: {json.dumps(answer)}" for name, answer in found.items()]
        self._file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def is_equal(recorded: Any, found: Any) -> bool:
    """True if both are the same JSON. Floats are log-probabilities and may differ a little."""
    if isinstance(recorded, float) and isinstance(found, float):
        return abs(recorded - found) <= LOGPROB_TOLERANCE
    if isinstance(recorded, dict) and isinstance(found, dict):
        return recorded.keys() == found.keys() and all(is_equal(recorded[k], found[k]) for k in recorded)
    if isinstance(recorded, list) and isinstance(found, list | tuple):
        return len(recorded) == len(found) and all(map(is_equal, recorded, found))
    return type(recorded) is type(found) and bool(recorded == found)


@pytest.fixture
def is_recording(pytestconfig: pytest.Config) -> bool:
    return bool(pytestconfig.getoption("--record", default=False))


# -- the Python API ----------------------------------------------------------------------------------------


def as_json(completion: Any) -> Json:
    found = {
        "num_prompt_tokens": len(completion.prompt_token_ids),
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
    }
    if completion.reasoning is not None:
        found["reasoning"] = completion.reasoning
    if completion.logprobs is not None:
        found["logprobs"] = [
            [one.token_id, round(one.logprob, 5), [[token, round(value, 5)] for token, value in one.top]]
            for one in completion.logprobs
        ]
    return found


@dataclass
class Drafts:
    """Counts of the drafter's tokens, over requests without drafts of their own and with a fixed depth."""

    num_drafted: int = 0
    num_accepted: int = 0


def answer_all(ask: Any, requests: Requests, drafter: str, drafts: Drafts) -> dict[str, Json]:
    """The answers by name. All requests run together."""
    if not requests:
        return {}
    prompts, params = zip(*requests.values(), strict=True)
    if drafter == "none":  # an engine without a drafter refuses a draft depth
        params = tuple(replace(one, draft_depth="auto") for one in params)
    completions = ask(list(prompts), list(params))
    for (_, one), completion in zip(requests.values(), completions, strict=True):
        if one.grammar is None and not one.prediction_ids and one.draft_depth != "auto":
            drafts.num_drafted += sum(completion.stats.drafted)
            drafts.num_accepted += sum(completion.stats.accepted)
    return {name: as_json(completion) for name, completion in zip(requests, completions, strict=True)}


def check_llm(
    model: Path | str, record: Record, generated: Requests, chats: Requests, drafter: str, **settings: Any
) -> Drafts:
    """Compares the answers of `LLM.generate` and `LLM.chat` with the record."""
    drafts = Drafts()
    with LLM(model, drafter=drafter, **settings) as llm:  # type: ignore[arg-type]
        found = answer_all(llm.generate, generated, drafter, drafts)
        chat_answers = answer_all(llm.chat, chats, drafter, drafts)
    record.check(found | {f"chat: {name}": answer for name, answer in chat_answers.items()})
    return drafts


SMALL_STEPS = {"max_rows": 6, "prefill_step_size": 48}


@pytest.mark.parametrize("drafter", ["ngram", "none"])
def test_tiny_llama(tmp_path: Path, is_recording: bool, drafter: str) -> None:
    record = Record("tiny_llama", is_recording and drafter == "ngram")
    generated = with_prompts(sampling_variants(16, TINY_VOCABULARY), TINY_PROMPTS)
    chats = {"greedy": (chat("hello"), SamplingParams(temperature=0, max_tokens=12))}
    drafts = check_llm(tiny_llama(tmp_path), record, generated, chats, drafter, **SMALL_STEPS)
    if drafter == "none":
        assert drafts.num_drafted == 0


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tiny_qwen3_5(tmp_path: Path, is_recording: bool, drafter: str) -> None:
    record = Record("tiny_qwen3_5", is_recording and drafter == "mtp")
    generated = with_prompts(sampling_variants(16, TINY_VOCABULARY), TINY_PROMPTS)
    chats = {"greedy": (chat("hello"), SamplingParams(temperature=0, max_tokens=12))}
    drafts = check_llm(tiny_thinker(tmp_path), record, generated, chats, drafter, **SMALL_STEPS)
    if drafter != "ngram":  # random text seldom repeats itself
        assert (drafts.num_drafted > 0) == (drafter == "mtp")


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tiny_hybrid(is_recording: bool, drafter: str) -> None:
    """The head of this model was trained: its drafts are accepted."""
    record = Record("tiny_hybrid", is_recording and drafter == "mtp")
    questions = json.loads((TINY_HYBRID / "held_out_prompts.json").read_text())
    variants = sampling_variants(24, HYBRID_VOCABULARY)
    chats = with_prompts(variants, [chat(question) for question in questions])
    generated = with_prompts({name: variants[name] for name in ("greedy", "top_p", "regex")}, ["An owl "])
    drafts = check_llm(TINY_HYBRID, record, generated, chats, drafter, max_rows=6)
    assert (drafts.num_accepted > 0) == (drafter != "none")


def test_default_model(is_recording: bool) -> None:
    variants = sampling_variants(8, DEFAULT_VOCABULARY)
    generated = with_prompts({name: variants[name] for name in DEFAULT_VARIANTS}, DEFAULT_PROMPTS)
    chats = {
        question: (chat(question), replace(variants["greedy"], draft_depth=depth))
        for question, depth in zip(DEFAULT_CHATS, (2, 0, 3), strict=True)
    }
    record = Record("default_model", is_recording)
    drafts = check_llm(own_model(DEFAULT_MODEL), record, generated, chats, "mtp", dtype="float32", max_rows=8)
    assert drafts.num_accepted > 0


# -- pictures ----------------------------------------------------------------------------------------------


def picture_chats(num_tokens: int, first: Any, second: Any) -> Requests:
    greedy = SamplingParams(temperature=0, max_tokens=num_tokens)
    sampled = replace(greedy, temperature=0.9, seed=8, top_p=0.9)
    form = replace(greedy, max_tokens=40, grammar=sampling_variants(8, TINY_VOCABULARY)["regex"].grammar)
    return {
        "greedy": (chat_about("What is in the picture?", first), replace(greedy, draft_depth=2)),
        "another picture": (chat_about("What is in the picture?", second), greedy),
        "no picture": (chat_about("What is in the picture?"), replace(greedy, draft_depth=1)),
        "sampled": (chat_about("What colour is it?", second), replace(sampled, draft_depth=3)),
        "two pictures": (chat_about("Compare.", first, second), replace(sampled, draft_depth=0)),
        "regex": (chat_about("Name it.", first), form),
    }


@pytest.mark.parametrize("family", ["smolvlm", "qwen2_5_vl", "qwen3_5"])
def test_tiny_vision(tmp_path: Path, is_recording: bool, family: str) -> None:
    chats = picture_chats(12, noise(30, 20, 1), noise(24, 36, 2))
    record = Record(f"tiny_vision_{family}", is_recording)
    check_llm(tiny_vision(tmp_path, family), record, {}, chats, "ngram", **SMALL_STEPS)


def test_default_vision_model(is_recording: bool) -> None:
    chats = picture_chats(12, disc((220, 20, 20)), disc((20, 40, 220)))
    record = Record("default_vision_model", is_recording)
    drafts = check_llm(own_model(VISION_MODEL), record, {}, chats, "mtp", dtype="float32", max_rows=4)
    assert drafts.num_accepted > 0


# -- the HTTP API ------------------------------------------------------------------------------------------


def check_http(
    model: Path | str,
    record: Record,
    requests: dict[str, http.HttpRequest],
    forms: tuple[bool, ...] = (False, True),
) -> None:
    """`forms`: whether answers are streams. Both forms have the same record."""
    flags = ("--max-rows", "6", "--dtype", "float32", "--generation-config", "none")
    with serving(Path(model), *flags, program=ON_CPU) as server:
        for is_stream in forms:
            record.check(http.answers(server.url, requests, is_stream))


def test_http_with_tools_and_reasoning(tmp_path: Path, is_recording: bool) -> None:
    plain = http.text_requests(16, TINY_VOCABULARY, enable_thinking=False)
    requests = plain | http.reasoning_requests(40, THINK_END_ID)
    check_http(tiny_thinker(tmp_path), Record("http_tiny_qwen3_5", is_recording), requests)


def test_http_with_pictures(tmp_path: Path, is_recording: bool) -> None:
    record = Record("http_tiny_smolvlm", is_recording)
    check_http(tiny_vision(tmp_path, "smolvlm"), record, http.picture_requests(10, 24))


@pytest.mark.soak
def test_http_with_the_default_model(is_recording: bool) -> None:
    record = Record("http_default_model", is_recording)
    requests = http.few_requests(8, DEFAULT_VOCABULARY)
    forms = (False, True) if IN_SOAK else (True,)  # the tiny models have both: this one takes its time
    check_http(own_model(DEFAULT_MODEL), record, requests, forms)
