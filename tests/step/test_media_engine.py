"""Media rows and the engine: chunks, heads, preemption, encoding beside decoding, failures."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from image_files import noise
from media_world import CASES, GREEDY, HOT, TEXTS, World, answers, new_world, tokens, whole
from outrider import LLM
from outrider.build import ModelChoice, build_engine
from outrider.config import EngineConfig
from outrider.engine.row_caches import SLACK
from outrider.models.heads import HeadSpec, LoadedHead, new_head
from outrider.plan import NUM_SPARE_BLOCKS
from patience import case_only_in_soak, held_steps, measures_time


@pytest.fixture(scope="module", params=["smolvlm", case_only_in_soak("qwen2_5_vl"), "qwen3_5"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return new_world(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llm(world: World) -> Iterator[LLM]:
    with LLM(world.folder, drafter="mtp", max_rows=8, prefill_step_size=24) as llm:
        yield llm


@pytest.mark.parametrize(("step_size", "drafter"), [(3, "mtp"), (7, "none"), (512, "ngram")])
def test_the_chunks_of_a_prompt_change_nothing(world: World, llm: LLM, step_size: int, drafter: Any) -> None:
    prompts = [world.prompt(llm, *case) for case in CASES[:2]]
    expected = [tokens(llm, prompt, params) for prompt in prompts for params in (GREEDY, HOT)]
    with LLM(world.folder, drafter=drafter, max_rows=4, prefill_step_size=step_size) as other:
        asked = [(prompt, params) for prompt in prompts for params in (GREEDY, HOT)]
        assert [one.token_ids for one in answers(other, *asked)] == expected


def test_the_head_is_fed_the_pictures_too(world: World) -> None:
    """Every image token's embedding reaches it, however the prompt is cut, and its drafts are the same."""
    drafts = []
    for step_size in (5, 512):
        with LLM(world.folder, drafter="mtp", max_rows=1, prefill_step_size=step_size) as llm:
            prompt = world.prompt(llm, ("is ", " it?"), [noise(40, 24)])
            drafter: Any = llm.engine._loop.parts.runner._forward._drafter._drafter  # type: ignore[attr-defined]
            made, num_seen, draft = [], [0], drafter.draft

            def watched(
                hidden: Any, ids: Any, rows: Any, capacity: int, draft=draft, made=made, n=num_seen
            ) -> Any:
                n[0] += 0 if rows.images is None else rows.images.embeddings.shape[0]
                made.append(draft(hidden, ids, rows, capacity))
                return made[-1]

            drafter.draft = watched
            tokens(llm, prompt, replace(GREEDY, draft_depth=6))
            assert num_seen[0] == sum(piece.num_tokens for piece in prompt.media.pieces)
            drafts.append(next(one.token_ids.tolist() for one in made if one is not None))
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("is_chained", [True, False])
def test_a_head_with_a_layer_for_each_depth_changes_nothing_either(
    world: World, llm: LLM, is_chained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [world.prompt(llm, *case) for case in CASES[:2]]
    expected = [tokens(llm, prompt, replace(GREEDY, draft_depth=0)) for prompt in prompts]

    def deep_head(loaded: Any, *_: Any) -> LoadedHead:
        layers = tuple(new_head(loaded.trunk, HeadSpec(is_chained=is_chained)) for _ in range(3))
        return LoadedHead(layers, "random")

    monkeypatch.setattr("outrider.build_head.load_head", deep_head)
    for step_size in (5, 512):
        with LLM(world.folder, drafter="mtp", max_rows=4, prefill_step_size=step_size) as other:
            asked = [(prompt, replace(GREEDY, draft_depth=5)) for prompt in prompts]
            assert [one.token_ids for one in answers(other, *asked)] == expected


def test_a_preempted_media_row_goes_on_as_if_nothing_had_happened(world: World, llm: LLM) -> None:
    """Three rows that fit while they are short; the picture is encoded again for who has to start again."""
    prompt = world.prompt(llm, *CASES[0])
    each = [replace(HOT, max_tokens=120, seed=seed) for seed in (1, 2, 3)]
    expected = [tokens(llm, prompt, params) for params in each]
    runner: Any = llm.engine._loop.parts.runner
    geometry = runner.geometry(16)
    num_cells = len(prompt.ids) + 2 * SLACK + 16
    budget = geometry.num_bytes(3, geometry.capacity_for(num_cells))
    if geometry.has_blocks:  # other tests of the process may have loaded the extension
        num_blocks = NUM_SPARE_BLOCKS + 3 * geometry.blocks_for(num_cells)
        budget = geometry.num_bytes_in_blocks(3, num_blocks)
    config = EngineConfig(
        max_rows=3, memory_budget_bytes=budget, capacity_step=16, prefill_step_size=16, image_cache_bytes=1
    )
    engine, _ = build_engine(ModelChoice(world.folder), config)
    try:
        with held_steps(engine):  # until all three are there
            boxes = [engine.submit(engine.validate(prompt.ids, p, media=prompt.media)) for p in each]
        found = [whole(box) for box in boxes]
    finally:
        engine.close()
    assert [one.token_ids for one in found] == expected
    assert sum(one.stats.preemptions for one in found if one.stats is not None) > 0


# -- encoding beside decoding ----------------------------------------------------------------------------


def watch(llm: LLM, monkeypatch: pytest.MonkeyPatch, encode_s: float = 0.0) -> list[Any]:
    """What the runner does, in order: "encode", or the plan of a step."""
    runner: Any = llm.engine._loop.parts.runner
    done: list[Any] = []
    launch, encode = runner.launch, runner.encode

    def slow_encode(piece: Any) -> None:
        done.append("encode")
        time.sleep(encode_s)
        encode(piece)

    monkeypatch.setattr(runner, "launch", lambda plan, after: done.append(plan) or launch(plan, after))
    monkeypatch.setattr(runner, "encode", slow_encode)
    return done


def test_decoding_goes_on_between_the_pieces_and_the_media_row_gets_its_turn(
    world: World, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = watch(llm, monkeypatch, encode_s=0.02)
    params = replace(GREEDY, max_tokens=2000, logprobs=None)
    steady = llm.engine.validate(llm.tokenizer.encode("steady"), params)
    prompt = world.prompt(llm, ("a ", "b ", "c"), [noise(40, 40, 50), noise(40, 24, 51)])
    asked = llm.engine.validate(prompt.ids, GREEDY, media=prompt.media)
    with held_steps(llm.engine, num_free=3):  # the text row must not end before the media row is there
        text = llm.engine.submit(steady)
        text.take()
        media = llm.engine.submit(asked)
    assert whole(media).finish_reason == "length"
    llm.engine.cancel(steady.id)
    whole(text)
    rows = [{row.sequence_id for batch in plan.batches for row in batch} for plan in done if plan != "encode"]
    text_row = next(number for numbers in rows for number in numbers)
    last = max(i for i, numbers in enumerate(rows) if numbers - {text_row})
    assert any(text_row in numbers for numbers in rows[last:]), "the media row waited for the text row to end"
    places = [i for i, what in enumerate(done) if what == "encode"]
    assert len(places) == len(prompt.media.pieces) >= 2
    for before, after in itertools.pairwise(places):
        steps = done[before + 1 : after]
        assert steps, "two pieces were encoded without a step between them"
        assert any(row.media is None for plan in steps for batch in plan.batches for row in batch)


@measures_time
def test_under_steady_text_a_media_row_starts_within_its_turn(
    world: World, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoding gets every other slice of time: steps between two pieces take about as long as a piece did."""
    runner: Any = llm.engine._loop.parts.runner
    done: list[tuple[str, float, float]] = []  # what, when it began and ended

    def timed(name: str, work: Any, least_s: float) -> Any:
        def wrapped(what: Any) -> Any:
            began = time.perf_counter()
            result = work(what)
            time.sleep(max(0.0, least_s - (time.perf_counter() - began)))
            done.append((name, began, time.perf_counter()))
            return result

        return wrapped

    monkeypatch.setattr(runner, "finish", timed("step", runner.finish, 0.005))
    monkeypatch.setattr(runner, "encode", timed("encode", runner.encode, 0.08))
    params = replace(GREEDY, max_tokens=2000, logprobs=None)
    requests = [llm.engine.validate(llm.tokenizer.encode(text), params) for text in TEXTS]
    texts = [(request.id, llm.engine.submit(request)) for request in requests]
    for _, box in texts:
        box.take()
    prompt = world.prompt(llm, ("a ", "b ", "c"), [noise(40, 40, 52), noise(40, 24, 53)])
    box = llm.engine.submit(llm.engine.validate(prompt.ids, GREEDY, media=prompt.media))
    box.take()
    until_first_token = list(done)
    for request_id, text in texts:
        llm.engine.cancel(request_id)
        assert whole(text).finish_reason == "cancelled"
    whole(box)
    places = [i for i, (name, *_) in enumerate(until_first_token) if name == "encode"]
    assert len(places) == len(prompt.media.pieces) >= 2
    for before, after in itertools.pairwise(places):
        ends = [end for *_, end in until_first_token[before:after]]
        assert len(ends) > 1, "two pieces were encoded without a step between them"
        _, began, ended = until_first_token[before]
        longest_step_s = max(b - a for a, b in itertools.pairwise(ends))
        waited_s = until_first_token[after][1] - ended
        assert waited_s <= ended - began + 2 * longest_step_s, "the row waited beyond its turn"


def test_text_requests_never_touch_the_vision_code(
    world: World, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = watch(llm, monkeypatch)
    trunk: Any = llm.engine._loop.parts.runner._forward._trunk
    given = []
    hidden = trunk.hidden

    def watched(ids: Any, cache: Any, place: Any, embeddings: Any = None) -> Any:
        given.append((embeddings, place.positions.tolist() == place.starts.tolist()))
        return hidden(ids, cache, place, embeddings)

    monkeypatch.setattr(trunk, "hidden", watched)
    answers(llm, *((llm.tokenizer.encode(text), replace(GREEDY, draft_depth=3)) for text in TEXTS))
    assert "encode" not in done
    assert given
    assert all(embeddings is None and is_plain for embeddings, is_plain in given)


def test_a_picture_that_cannot_be_encoded_ends_its_own_request_only(
    world: World, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner: Any = llm.engine._loop.parts.runner
    good, bad = (world.prompt(llm, ("x", "y"), [noise(24, 24, seed)]) for seed in (60, 61))
    encode = runner.encode

    def failing(piece: Any) -> None:
        if piece.key == bad.media.pieces[0].key:
            raise RuntimeError("no memory")
        encode(piece)

    monkeypatch.setattr(runner, "encode", failing)
    boxes = [llm.engine.submit(llm.engine.validate(p.ids, GREEDY, media=p.media)) for p in (bad, good, bad)]
    found = [whole(box) for box in boxes]
    assert [one.finish_reason for one in found] == ["error", "length", "error"]
    assert "no memory" in str(found[0].error)
    assert found[1].token_ids == tokens(llm, good)
    assert runner.image_embeddings.num_held == 0


def test_a_cancelled_media_request_leaves_nothing_held(world: World, llm: LLM) -> None:
    prompt = world.prompt(llm, ("x", "y"), [noise(40, 40, 70)])
    for _ in range(3):
        params = replace(GREEDY, max_tokens=200)
        request = llm.engine.validate(prompt.ids, params, media=prompt.media)
        with held_steps(llm.engine):  # it must not end before
            outbox = llm.engine.submit(request)
            llm.engine.cancel(request.id)
        assert whole(outbox).finish_reason == "cancelled"
    tokens(llm, prompt)
    runner: Any = llm.engine._loop.parts.runner
    assert runner.image_embeddings.num_held == 0


def test_a_picture_of_another_salt_is_encoded_again(
    world: World, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the time of an answer would tell a client which pictures other clients have sent."""
    prompt = world.prompt(llm, ("x", "y"), [noise(40, 40, 71)])
    done = watch(llm, monkeypatch)
    each = [replace(GREEDY, cache_salt=salt) for salt in ("", "one", "two", "two")]
    found = [tokens(llm, prompt, params) for params in each]
    assert found == [found[0]] * 4
    assert done.count("encode") == 3 * len(prompt.media.pieces)


# -- cached prefixes -------------------------------------------------------------------------------------


def test_a_second_turn_loads_the_picture_and_computes_what_is_new(world: World) -> None:
    """Neither encoder nor trunk works on a picture's cells again; another picture shares none of them."""
    words = ("is this one ", " a thing that we have talked about before, and at some length? ")
    again = (words[0], words[1] + "And what is it then?")
    with LLM(world.folder, drafter="mtp", max_rows=2, prefix_cache_bytes=0) as plain:
        expected = [
            tokens(plain, world.prompt(plain, asked, [noise(40, 40, seed)]))
            for asked, seed in ((words, 81), (again, 81), (again, 82))
        ]
    with LLM(world.folder, drafter="mtp", max_rows=2) as llm:
        first, second, other = (
            world.prompt(llm, asked, [noise(40, 40, seed)])
            for asked, seed in ((words, 81), (again, 81), (again, 82))
        )
        assert second.ids == other.ids
        found = [answers(llm, (first, GREEDY))[0]]
        runner: Any = llm.engine._loop.parts.runner
        encoder = runner._vision_encoder
        encoder.encode, encode = None, encoder.encode  # calling it would be an error
        runner.image_embeddings._max_bytes = 1
        runner.image_embeddings.forget_holds()
        assert len(runner.image_embeddings) == 0
        found.append(answers(llm, (second, GREEDY))[0])
        encoder.encode = encode
        found.append(answers(llm, (other, GREEDY))[0])
    assert [one.token_ids for one in found] == expected
    loaded = [one.stats.num_cached for one in found if one.stats is not None]
    assert loaded[0] == 0
    end_of = int(second.media.pieces[-1].cells[-1])
    assert loaded[1] > end_of
    assert loaded[2] < second.media.pieces[0].first
