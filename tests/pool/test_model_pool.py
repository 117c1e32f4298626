"""The pool of models: leases, one load for all who wait, room by unloading, times, failures."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from outrider.pool.durations import duration_s
from outrider.pool.errors import LoadFailed, ModelPinned, ModelTooLarge, PoolClosed, UnknownModel
from outrider.pool.model_entry import FOREVER, MemoryNeed, ModelEntry, ModelLoad
from outrider.pool.model_pool import ModelPool
from patience import PATIENCE_S, Hurdle, in_test_or_soak, until


@dataclass
class Memory:
    """What all fake models hold together, and the most that they ever held."""

    held: int = 0
    most: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, num_bytes: int) -> None:
        with self.lock:
            self.held += num_bytes
            self.most = max(self.most, self.held)


@dataclass
class FakeModel:
    name: str
    num_bytes: int
    memory: Memory
    num_uses: int = 0
    is_closed: bool = False

    def close(self) -> None:
        assert self.num_uses == 0, f"{self.name} was unloaded under a request"
        assert not self.is_closed
        self.is_closed = True
        self.memory.add(-self.num_bytes)


@dataclass
class FakeSource:
    name: str
    need: MemoryNeed
    memory: Memory
    failure: Exception | None = None
    hurdle: Hurdle | None = None  # held at the start of a load
    hurdle_of_measure: Hurdle | None = None
    loads: list[FakeModel] = field(default_factory=list)
    fails: Callable[[], bool] = lambda: False

    def measure(self, load: ModelLoad) -> MemoryNeed:
        if self.hurdle_of_measure is not None:
            self.hurdle_of_measure.stop()
        return self.need

    def load(self, num_bytes: int | None, load: ModelLoad) -> FakeModel:
        load.note("loading the weights", 0.5)
        if self.hurdle is not None:
            self.hurdle.stop()
        load.check_wanted()
        if self.failure is not None or self.fails():
            raise self.failure or OSError("the disk is on fire")
        model = FakeModel(self.name, num_bytes or 0, self.memory)
        self.memory.add(model.num_bytes)
        self.loads.append(model)
        return model


class World:
    def __init__(self, limit: int | None = 100, **needs: int) -> None:
        """`needs`: bytes by the name of a model."""
        self.memory = Memory()
        self.sources = {
            name: FakeSource(name, MemoryNeed(size, size), self.memory) for name, size in needs.items()
        }
        entries = [ModelEntry(name, source) for name, source in self.sources.items()]
        self.pool: ModelPool[FakeModel] = ModelPool(entries, limit)

    def entry(self, name: str) -> ModelEntry[FakeModel]:
        return self.pool.find(name)

    def states(self) -> dict[str, str]:
        return {entry.name: entry.state for entry in self.pool.entries}

    async def use(self, name: str, keep_alive_s: float | None = None) -> FakeModel:
        with await self.pool.lease(self.entry(name), keep_alive_s) as model:
            assert model.name == name
            return model


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_first_use_loads_and_later_ones_do_not() -> None:
    async def play() -> None:
        world = World(a=10)
        assert world.states() == {"a": "not_loaded"}
        first = await world.use("a")
        assert await world.use("a") is first
        assert (len(world.sources["a"].loads), world.pool.reserved_bytes) == (1, 10)
        await world.pool.close()
        assert (first.is_closed, world.memory.held, world.states()) == (True, 0, {"a": "not_loaded"})

    run(play())


def test_names_aliases_and_hidden_names_find_a_model_and_others_do_not() -> None:
    memory = Memory()
    source = FakeSource("coder", MemoryNeed(1, 1), memory)
    pool: ModelPool[FakeModel] = ModelPool([ModelEntry("coder", source, "/m/x", ("c",), ("/m/x",))])
    assert {pool.find(name) for name in (None, "coder", "c", "/m/x")} == {pool.default}
    for name in ("../coder", "/etc/passwd", "Coder", "coder/", "%63oder", "", "coder\n"):
        with pytest.raises(UnknownModel, match="It serves 'coder'"):
            pool.find(name)
    with pytest.raises(ValueError, match="two models"):
        ModelPool([pool.default, ModelEntry("c", source)])


def test_all_who_wait_share_one_load() -> None:
    async def play() -> None:
        world = World(a=10)
        world.sources["a"].hurdle = hurdle = Hurdle()
        waiting = [asyncio.create_task(world.use("a")) for _ in range(5)]
        await until(hurdle.reached.is_set)
        entry = world.entry("a")
        assert (entry.state, entry.stage, entry.progress) == ("loading", "loading the weights", 0.5)
        waiting[0].cancel()  # a client that leaves does not end the load of the others
        hurdle.open()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert len({id(result) for result in results[1:]}) == 1
        assert (len(world.sources["a"].loads), entry.num_leases) == (1, 0)

    run(play())


def test_least_recently_used_idle_model_makes_room() -> None:
    async def play() -> None:
        world = World(a=40, b=40, c=40)
        await world.use("a")
        await world.use("b")
        await world.use("a")
        await world.use("c")
        assert world.states() == {"a": "loaded", "b": "not_loaded", "c": "loaded"}
        assert world.memory.most <= 100

    run(play())


def test_pinned_model_never_makes_room() -> None:
    async def play() -> None:
        world = World(a=40, b=40, c=40)
        world.entry("a").is_pinned = True
        await world.use("a", keep_alive_s=0.0)
        await world.use("b")
        await world.use("c")
        assert world.states() == {"a": "loaded", "b": "not_loaded", "c": "loaded"}
        with pytest.raises(ModelPinned):
            await world.pool.unload(world.entry("a"))

    run(play())


def test_model_in_use_is_waited_for_and_takes_no_new_requests_meanwhile() -> None:
    async def play() -> None:
        world = World(a=60, b=60)
        lease = await world.pool.lease(world.entry("a"))
        other = asyncio.create_task(world.use("b"))
        await until(lambda: world.entry("a").leaving is not None)
        late = asyncio.create_task(world.use("a"))  # may not keep b out for ever
        for _ in range(20):
            await asyncio.sleep(0)
        assert (world.states(), other.done(), late.done()) == ({"a": "loaded", "b": "loading"}, False, False)
        assert world.entry("b").stage == "waiting for memory"
        lease.model.num_uses = 0
        lease.release()
        await asyncio.gather(other, late)
        assert [len(source.loads) for source in world.sources.values()] == [2, 1]
        assert world.memory.most <= 100

    run(play())


def test_load_that_nobody_waits_for_any_more_gives_up_its_wait_for_room() -> None:
    async def play() -> None:
        world = World(a=60, b=60)
        with await world.pool.lease(world.entry("a")):
            other = asyncio.create_task(world.use("b"))
            await until(lambda: world.entry("b").is_waiting_for_room)
            other.cancel()
            await until(lambda: world.entry("b").task is None)
            assert world.states() == {"a": "loaded", "b": "not_loaded"}
            await world.use("a")  # which is let in again
        await world.use("b")

    run(play())


def test_load_that_nobody_waits_for_any_more_is_stopped_and_the_next_one_begins() -> None:
    async def play() -> None:
        world = World(a=60, b=60)
        world.sources["a"].hurdle = hurdle = Hurdle()
        first, second = (asyncio.create_task(world.use("a")) for _ in range(2))
        await until(hurdle.reached.is_set)
        other = asyncio.create_task(world.use("b"))
        await until(lambda: world.entry("b").stage == "waiting for memory")
        first.cancel()
        second.cancel()
        await asyncio.wait({first, second})
        hurdle.open()
        assert (await other).name == "b"
        assert world.states() == {"a": "not_loaded", "b": "loaded"}
        assert (world.sources["a"].loads, world.entry("a").failure) == ([], None)
        world.sources["a"].hurdle = None
        await world.use("a")  # loaded anew

    run(play())


def test_load_whose_last_client_leaves_while_its_files_are_found_unloads_nothing() -> None:
    async def play() -> None:
        world = World(a=60, b=60)
        await world.use("a")
        world.sources["b"].hurdle_of_measure = hurdle = Hurdle()
        leaving = asyncio.create_task(world.use("b"))
        await until(hurdle.reached.is_set)
        leaving.cancel()
        await asyncio.wait({leaving})
        hurdle.open()
        await until(lambda: world.entry("b").task is None)
        assert world.states() == {"a": "loaded", "b": "not_loaded"}

    run(play())


def test_client_that_comes_while_a_load_is_being_stopped_gets_the_model() -> None:
    async def play() -> None:
        world = World(a=60)
        world.sources["a"].hurdle = hurdle = Hurdle()
        leaving = asyncio.create_task(world.use("a"))
        await until(hurdle.reached.is_set)
        leaving.cancel()
        await asyncio.wait({leaving})
        late = asyncio.create_task(world.use("a"))
        world.sources["a"].hurdle = None
        hurdle.open()
        assert (await late).name == "a"

    run(play())


@pytest.mark.parametrize("keeps", ["operator", "pin"])
def test_load_of_the_operator_and_of_a_pinned_model_goes_on_without_its_client(keeps: str) -> None:
    async def play() -> None:
        world = World(a=60)
        world.entry("a").is_pinned = keeps == "pin"
        world.sources["a"].hurdle = hurdle = Hurdle()
        work = world.pool.load(world.entry("a")) if keeps == "operator" else world.use("a")
        leaving: asyncio.Task[Any] = asyncio.create_task(work)
        await until(hurdle.reached.is_set)
        leaving.cancel()
        await asyncio.wait({leaving})
        hurdle.open()
        await until(lambda: world.states() == {"a": "loaded"} and world.entry("a").num_leases == 0)

    run(play())


def test_load_of_the_operator_that_fails_raises() -> None:
    async def play() -> None:
        world = World(a=60)
        world.sources["a"].failure = OSError("no such disk")
        with pytest.raises(LoadFailed, match="no such disk"):
            await world.pool.load(world.entry("a"))

    run(play())


def test_model_that_never_fits_is_refused_with_figures() -> None:
    async def play() -> None:
        world = World(limit=2_000_000_000, a=900_000_000, b=1_500_000_000)
        world.entry("a").is_pinned = True
        await world.use("a")
        with pytest.raises(ModelTooLarge, match=r"'b' .*at least 1\.50 GB.*2\.00 GB.*pinned.*0\.90 GB"):
            await world.use("b")
        assert world.states() == {"a": "loaded", "b": "failed"}
        assert await world.use("a")

    run(play())


def test_small_caches_are_taken_if_there_is_no_room_for_the_usual_ones() -> None:
    async def play() -> None:
        world = World(a=60, b=60)
        world.sources["b"].need = MemoryNeed(30, 60)
        with await world.pool.lease(world.entry("a")):
            assert (await world.use("b")).num_bytes == 40  # what a leaves free

    run(play())


def test_failed_load_is_told_to_all_who_wait_and_tried_again_later() -> None:
    async def play() -> None:
        world = World(a=10, b=10)
        world.sources["a"].failure = OSError("cannot read model.safetensors")
        for result in await asyncio.gather(*(world.use("a") for _ in range(3)), return_exceptions=True):
            assert isinstance(result, LoadFailed)
            assert "'a' could not be loaded: cannot read model.safetensors" in str(result)
        assert (world.entry("a").state, world.pool.reserved_bytes) == ("failed", 0)
        assert "cannot read" in str(world.entry("a").failure)
        assert await world.use("b")
        world.sources["a"].failure = None
        assert await world.use("a")
        assert world.entry("a").failure is None

    run(play())


@pytest.mark.parametrize("keep_alive_s", [0.0, 0.01])
def test_keep_alive_of_a_request_unloads_its_model_after_that_time(keep_alive_s: float) -> None:
    async def play() -> None:
        world = World(a=10)
        await world.use("a", keep_alive_s)
        assert world.entry("a").seconds_left is not None
        await until(lambda: world.states() == {"a": "not_loaded"})
        assert world.memory.held == 0

    run(play())


def test_request_at_the_moment_of_unloading_gets_a_new_model() -> None:
    async def play() -> None:
        world = World(a=10)
        first = await world.use("a")
        world.pool._on_expired(world.entry("a"))
        second = await world.use("a")
        assert (first.is_closed, second.is_closed, second is first) == (True, False, False)

    run(play())


def test_next_request_stops_the_time_and_may_keep_the_model_for_ever() -> None:
    async def play() -> None:
        world = World(a=10)
        await world.use("a", 1000.0)
        entry = world.entry("a")
        with await world.pool.lease(entry, FOREVER):
            assert entry.timer is None
        assert (entry.timer, entry.seconds_left, entry.state) == (None, None, "loaded")

    run(play())


def test_operator_unloads_at_once_or_after_the_last_request() -> None:
    async def play() -> None:
        world = World(a=10)
        await world.use("a")
        await world.pool.unload(world.entry("a"))
        assert world.states() == {"a": "not_loaded"}
        with await world.pool.lease(world.entry("a")):
            await world.pool.unload(world.entry("a"))
            assert world.states() == {"a": "loaded"}
        await until(lambda: world.states() == {"a": "not_loaded"})
        await world.pool.unload(world.entry("a"))  # no effect

    run(play())


def test_close_stops_a_load_and_refuses_new_requests() -> None:
    async def play() -> None:
        world = World(a=10)
        world.sources["a"].hurdle = hurdle = Hurdle()
        waiting = asyncio.create_task(world.use("a"))
        await until(hurdle.reached.is_set)
        closing = asyncio.create_task(world.pool.close())
        await asyncio.sleep(0)
        with pytest.raises(PoolClosed):
            await world.pool.lease(ModelEntry("b", world.sources["a"]))
        hurdle.open()
        await closing
        with pytest.raises(PoolClosed):
            await waiting
        assert (world.memory.held, world.sources["a"].loads) == (0, [])

    run(play())


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(in_test_or_soak(20, 400)))
def test_random_histories(seed: int) -> None:
    """Loads, unloads, pins, times, failures and clients that leave, in a tight memory.

    No request is lost or gets another model, none loses its model, and the memory is never exceeded.
    """
    asyncio.run(_random_history(random.Random(seed)))


async def _random_history(dice: random.Random) -> None:
    world = World(limit=100, a=40, b=dice.choice([30, 60]), c=55, d=dice.choice([20, 130]))
    if dice.random() < 0.4:
        world.entry("a").is_pinned = True
    for source in world.sources.values():
        source.fails = lambda: dice.random() < 0.1
        if dice.random() < 0.5:
            source.need = MemoryNeed(source.need.least, source.need.least * 2)
    answered: list[str] = []

    async def client() -> None:
        for _ in range(dice.randrange(1, 6)):
            name = dice.choice("abcd")
            keep_alive_s = dice.choice([None, None, 0.0, 0.002, FOREVER])
            try:
                with await world.pool.lease(world.entry(name), keep_alive_s) as model:
                    assert (model.name, model.is_closed) == (name, False)
                    model.num_uses += 1
                    try:
                        for _ in range(dice.randrange(4)):
                            await asyncio.sleep(dice.choice([0, 0.001]))
                            assert not model.is_closed
                    finally:
                        model.num_uses -= 1
                answered.append(name)
            except LoadFailed as error:
                answered.append(str(error).split("'")[1])

    async def operator() -> None:
        for _ in range(6):
            with contextlib.suppress(ModelPinned, LoadFailed):
                change = dice.choice([world.pool.unload, world.pool.unload, world.pool.load])
                await change(world.entry(dice.choice("abcd")))
            await asyncio.sleep(0.001)

    tasks = [asyncio.create_task(client()) for _ in range(8)]
    leaving = asyncio.create_task(asyncio.sleep(0.003))
    operating = asyncio.create_task(operator())
    await leaving
    for task in dice.sample(tasks, 3):
        task.cancel()
    async with asyncio.timeout(PATIENCE_S):
        results = await asyncio.gather(*tasks, operating, return_exceptions=True)
    assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results), results
    assert answered
    assert world.memory.most <= 100
    assert all(entry.num_leases == 0 for entry in world.pool.entries)
    await world.pool.close()
    assert (world.memory.held, world.pool.reserved_bytes) == (0, 0)
    assert all(model.is_closed for source in world.sources.values() for model in source.loads)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90.0),
        ("-1", -1.0),
        ("10m", 600.0),
        ("1h30m", 5400.0),
        ("1.5s", 1.5),
        ("-5m", -300.0),
        ("250ms", 0.25),
        ("", None),
        ("m", None),
        ("10 m", None),
        ("10x", None),
        ("inf", None),
        ("nan", None),
    ],
)
def test_durations(text: str, seconds: float | None) -> None:
    assert duration_s(text) == seconds
