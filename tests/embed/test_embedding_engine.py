"""The embedding engine: every job gets its result, parts take turns, failures stay with their requests."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from outrider.embed.engine import EmbeddingEngine, NotANumber
from outrider.engine.engine import EngineStopped
from outrider.pooling import PoolingFacts, TokenInput, Vector
from patience import PATIENCE_S, wait_until

FACTS = PoolingFacts("fake", "embedding", 2, 64, 100, "mean", True, pass_tokens=16)
BAD, BROKEN = 13, 66  # ids whose inputs give NaN and an exception


class FakeModel:
    """The vector of an input is (its length, the sum of its ids). Three parts a pass."""

    def __init__(self) -> None:
        self.facts = FACTS
        self.gate = threading.Event()
        self.gate.set()
        self.passes: list[int] = []

    def run(self, inputs: Sequence[TokenInput]) -> Generator[None, None, list[Vector]]:
        self.passes.append(sum(map(len, inputs)))
        for _ in range(3):
            assert self.gate.wait(PATIENCE_S)
            if any(BROKEN in each.ids for each in inputs):
                raise ValueError("boom")
            yield
        return [np.array([len(i), np.nan if BAD in i.ids else sum(i.ids)], np.float32) for i in inputs]


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


@pytest.fixture
def engine(model: FakeModel) -> Iterator[EmbeddingEngine]:
    made = EmbeddingEngine(lambda: model)
    yield made
    model.gate.set()
    made.close()


def inputs_of(*ids: int) -> list[TokenInput]:
    return [TokenInput((i,) * (1 + i % 5)) for i in ids]


def result(job: Any) -> list[list[float]]:
    return [list(vector) for vector in job.result.result(PATIENCE_S)]


def test_many_threads_get_their_own_vectors(engine: EmbeddingEngine) -> None:
    found: dict[int, list[list[float]]] = {}

    def ask(n: int) -> None:
        found[n] = result(engine.submit(inputs_of(*range(20 + n, 35 + n))))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    for n in range(8):
        wanted = [[float(len(i)), float(sum(i.ids))] for i in inputs_of(*range(20 + n, 35 + n))]
        assert found[n] == wanted


def test_every_part_runs_in_a_turn_of_its_own(model: FakeModel) -> None:
    entered = []

    @contextmanager
    def turn() -> Iterator[None]:
        entered.append("in")
        yield
        entered.append("out")

    engine = EmbeddingEngine(lambda: model, turn)
    result(engine.submit(inputs_of(1)))
    engine.close()
    assert entered == ["in", "out"] * 4  # three parts, and the result


def test_another_model_gets_the_device_after_one_part(model: FakeModel) -> None:
    """A decode step that asks for its turn waits for the part that runs, not for the rest of the pass."""
    lock, wanted, order = threading.Lock(), threading.Event(), []

    @contextmanager
    def turn() -> Iterator[None]:
        if order:
            wanted.wait(PATIENCE_S)  # the other model asks while this one computes
        with lock:
            order.append("part")
            yield

    engine = EmbeddingEngine(lambda: model, turn)
    job = engine.submit(inputs_of(1))
    while not order:
        pass
    with lock:
        order.append("step")
        wanted.set()
    result(job)
    engine.close()
    assert order == ["part", "step", "part", "part", "part"]


def test_a_pass_that_fails_costs_only_its_own_requests(engine: EmbeddingEngine) -> None:
    with pytest.raises(ValueError, match="boom"):
        result(engine.submit([TokenInput((BROKEN,))]))
    assert result(engine.submit([TokenInput((5,))])) == [[1.0, 5.0]]
    assert engine.failure is None


def test_nan_costs_only_its_own_request(engine: EmbeddingEngine, model: FakeModel) -> None:
    model.gate.clear()
    engine.submit([TokenInput((1,))])  # the next two share a pass
    bad, good = engine.submit([TokenInput((BAD,))]), engine.submit([TokenInput((7,))])
    model.gate.set()
    with pytest.raises(NotANumber):
        result(bad)
    assert result(good) == [[1.0, 7.0]]


def test_an_abandoned_job_is_not_computed(engine: EmbeddingEngine, model: FakeModel) -> None:
    model.gate.clear()
    first = engine.submit([TokenInput((1,))])
    wait_until(lambda: model.passes)  # else both would share a pass
    left = engine.submit(inputs_of(*range(40)))
    left.abandon()
    model.gate.set()
    result(first)
    result(engine.submit([TokenInput((2, 2))]))
    assert model.passes == [1, 2]


def test_closing_ends_what_runs_and_what_waits(engine: EmbeddingEngine, model: FakeModel) -> None:
    model.gate.clear()
    jobs = [engine.submit(inputs_of(*range(20))) for _ in range(3)]
    closing = threading.Thread(target=engine.close)
    closing.start()
    wait_until(lambda: engine._is_stopping)
    model.gate.set()
    closing.join(PATIENCE_S)
    for job in jobs:
        with pytest.raises(EngineStopped):
            result(job)
    with pytest.raises(EngineStopped):
        engine.submit([TokenInput((1,))])


def test_a_model_that_cannot_be_loaded_raises_here() -> None:
    def build() -> FakeModel:
        raise ValueError("no such file")

    with pytest.raises(ValueError, match="no such file"):
        EmbeddingEngine(build)


def test_a_load_that_fails_in_a_server_that_goes_on_leaves_no_thread() -> None:
    def build() -> FakeModel:
        raise ValueError("no weights")

    before = {*threading.enumerate()}
    with pytest.raises(ValueError, match="no weights"):
        EmbeddingEngine(build, is_outlived=True)
    assert {*threading.enumerate()} <= before


def test_a_panic_ends_the_engine_with_a_reason(model: FakeModel) -> None:
    class Panic(BaseException):
        pass

    def run(inputs: Sequence[TokenInput]) -> Generator[None, None, list[Vector]]:
        raise Panic("native code")
        yield

    model.run = run  # type: ignore[method-assign]
    engine = EmbeddingEngine(lambda: model)
    job = engine.submit([TokenInput((1,))])
    with pytest.raises(EngineStopped, match="native code"):
        result(job)
    assert "native code" in str(engine.failure)
