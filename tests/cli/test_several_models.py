"""Several real models in one server: their tokens, their memory, bad models among good ones, options."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from asgi_caller import Caller

from outrider.cli.model_specs import ModelSpec, model_specs
from outrider.config import InvalidConfig
from outrider.engine.memory_plan import MIN_STEP_BYTES
from outrider.models import loader
from patience import Hurdle, until
from pool_server import NUM_TOKENS, SMALL, PoolServer, no_memory_left_over, options_of
from tiny_models import write_checkpoint

MIB = 1 << 20
FAMILIES = {"one": "llama", "two": "qwen3", "three": "qwen2"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, family in FAMILIES.items():
        write_checkpoint(folder / name, family)
    return folder


def paths(folder: Path) -> list[str]:
    return [str(folder / name) for name in FAMILIES]


def test_bad_models_among_good_ones(folder: Path, tmp_path: Path) -> None:
    """Damaged, missing, without weights, too large: each has its own error, and the others serve on."""
    damaged, bare, huge = (tmp_path / name for name in ("damaged", "bare", "huge"))
    for path in (damaged, bare, huge):
        write_checkpoint(path, "llama")
    (damaged / "model.safetensors").write_bytes((damaged / "model.safetensors").read_bytes()[:3000])
    (bare / "model.safetensors").unlink()
    _write_huge(huge / "model.safetensors")
    gone = write_gone(tmp_path)

    async def play() -> None:
        given = (folder / "one", damaged, bare, huge, tmp_path / "missing", gone)
        world = PoolServer(*map(str, given), *SMALL, "--memory-limit", "1GiB")
        for name, status, words in (
            ("damaged", 503, "cut short"),
            ("bare", 503, "no weights"),
            ("huge", 400, "needs at least 40.00 GB"),
            (str(tmp_path / "missing"), 503, "no such folder"),
        ):
            for _ in range(2):  # it is tried again, and fails again
                response = await world.complete(name)
                assert (response.status_code, words in response.text) == (status, True), response.text
            assert str(tmp_path) not in response.text or name.startswith("/")
        assert (await world.complete("gone")).status_code == 200
        for file in gone.iterdir():
            file.unlink()
        assert (await world.complete("gone")).status_code == 200  # it is loaded
        await world.http.post("/v1/models/gone/unload")
        response = await world.complete("gone")
        assert (response.status_code, "config.json is missing" in response.text) == (503, True), response.text
        assert (await world.complete("one")).status_code == 200
        states = await world.states()
        assert (states["one"], states["damaged"], states["gone"]) == ("loaded", "failed", "failed")
        await world.close()

    asyncio.run(play())


def write_gone(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "gone", "llama")
    return tmp_path / "gone"


def _write_huge(file: Path) -> None:
    """A file of 40 GB, which takes no space on the disk."""
    num_floats = 10_000_000_000
    entry = {"dtype": "F32", "shape": [num_floats], "data_offsets": [0, 4 * num_floats]}
    header = json.dumps({"model.embed_tokens.weight": entry}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(file, 8 + len(header) + 4 * num_floats)


def test_names_are_no_paths_and_each_api_lists_what_is_served(folder: Path) -> None:
    async def play() -> None:
        world = PoolServer(*paths(folder), *SMALL)
        names = ("../one", "one/../two", "/etc/passwd", "%2e%2e%2fone", "ONE", "one\x00", "a" * 5000)
        for name in names:
            response = await world.complete(name)
            assert response.status_code in (400, 404), response.text
        listed = "It serves 'one', 'two', 'three'."
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
            ("/v1/completions", {"prompt": "Hi"}),
            ("/v1/responses", {"input": "Hi"}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}),
        ):
            response = await world.http.post(path, json=body | {"model": "../one"})
            error = response.json()["error"]
            assert (response.status_code, listed in error["message"]) == (404, True)
        for url in ("/v1/models/..%2fone", "/v1/models/%2fetc%2fpasswd", "/v1/models/one%2f..%2ftwo"):
            assert (await world.http.get(url)).status_code == 404
            assert (await world.http.post(f"{url}/load")).status_code in (404, 405)
        assert set((await world.states()).values()) == {"not_loaded"}
        await world.close()

    asyncio.run(play())


def test_one_server_shows_each_model(folder: Path) -> None:
    async def play() -> None:
        world = PoolServer(*paths(folder), *SMALL)
        listed = (await world.http.get("/v1/models")).json()["data"]
        assert [(one["id"], one["state"]) for one in listed] == [(name, "not_loaded") for name in FAMILIES]
        assert all(one["max_model_len"] for one in listed)
        answers = await asyncio.gather(*(world.complete(name) for name in ("two", "two", "one", None)))
        assert [answer.json()["model"] for answer in answers] == ["two", "two", "one", "one"]
        status = (await world.http.get("/v1/status")).json()
        models = {one["name"]: one for one in status["models"]}
        assert [models[name]["loads"] for name in FAMILIES] == [1, 1, 0]
        assert status["memory"]["limit_bytes"] == world.pool.models.limit_bytes
        metrics = (await world.http.get("/metrics")).text
        assert f'outrider_model_committed_tokens_total{{model="two"}} {2.0 * NUM_TOKENS}' in metrics
        assert 'outrider_model_loaded{model="three"} 0.0' in metrics
        assert f"outrider_committed_tokens_total {4.0 * NUM_TOKENS}" in metrics
        await world.close()

    asyncio.run(play())


def test_waiting_stream_shows_life_while_its_model_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first bytes come before the model is loaded, and the answer follows in the same stream."""

    async def play() -> None:
        world = PoolServer(*paths(folder), *SMALL)
        gate = asyncio.Event()
        lease = world.pool.models.lease

        async def slow_lease(*args: Any) -> Any:
            await gate.wait()
            return await lease(*args)

        monkeypatch.setattr(world.pool.models, "lease", slow_lease)
        object.__setattr__(world.server.context.settings, "keep_alive_s", 0.01)
        caller = Caller("/v1/completions", {"model": "two", "prompt": "Hi", "max_tokens": 3, "stream": True})
        calling = asyncio.create_task(caller.call(world.server))
        await until(lambda: b": keep-alive" in caller.received)
        assert b"data:" not in caller.received
        gate.set()
        await calling
        assert caller.received.endswith(b"data: [DONE]\n\n")
        await world.close()

    asyncio.run(play())


def test_two_clients_load_two_models_at_once_where_one_fits(folder: Path) -> None:
    """Each gets its answer, the second after the first: no model is unloaded under a request."""

    async def play() -> None:
        limit = ("--memory-limit", str(MIN_STEP_BYTES + 3 * MIB))
        world = PoolServer(*paths(folder), *SMALL, *limit)
        for _ in range(2):
            names = ("one", "two", "one", "two")
            answers = await asyncio.gather(*(world.complete(name) for name in names))
            assert [(answer.status_code, answer.json()["model"]) for answer in answers] == [
                (200, name) for name in names
            ]
        states = await world.states()
        assert sorted(states.values()) == ["loaded", "not_loaded", "not_loaded"]
        assert [world.pool.models.find(name).num_loads for name in ("one", "two")] in ([1, 2], [2, 1], [2, 2])
        await world.close()

    asyncio.run(play())


@pytest.mark.parametrize("is_stream", [True, False])
def test_load_ends_when_its_only_client_leaves_and_its_memory_is_free(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    hurdle, evaluate = Hurdle(), loader._evaluate

    def held(path: Path, arrays: list[mx.array]) -> None:
        evaluate(path, arrays)
        if path.name == "one":
            hurdle.stop()

    monkeypatch.setattr(loader, "_evaluate", held)
    monkeypatch.setattr(loader, "READ_BYTES", 1)

    async def play() -> None:
        world = PoolServer(*paths(folder), *SMALL, "--memory-limit", str(MIN_STEP_BYTES + 3 * MIB))
        body = {"model": "one", "prompt": "Hi", "max_tokens": 3, "stream": is_stream}
        with no_memory_left_over():
            num_threads = engine_threads()
            caller = Caller("/v1/completions", body)
            calling = asyncio.create_task(caller.call(world.server))
            await until(hurdle.reached.is_set)
            other = asyncio.create_task(world.complete("two"))
            await until(lambda: world.pool.models.find("two").stage == "waiting for memory")
            caller.gone.set()
            await calling
            hurdle.open()
            assert (await other).status_code == 200
            assert await world.states() == {"one": "not_loaded", "two": "loaded", "three": "not_loaded"}
            assert world.pool.models.find("one").num_loads == 0
            await world.http.post("/v1/models/two/unload")
            assert engine_threads() == num_threads
        assert (await world.complete("one")).status_code == 200
        await world.close()

    asyncio.run(play())


def test_load_of_the_operator_goes_on_when_his_client_leaves(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurdle, evaluate = Hurdle(), loader._evaluate

    def held(path: Path, arrays: list[mx.array]) -> None:
        hurdle.stop()
        evaluate(path, arrays)

    monkeypatch.setattr(loader, "_evaluate", held)

    async def play() -> None:
        world = PoolServer(*paths(folder), *SMALL)
        caller = Caller("/v1/models/one/load", {})
        calling = asyncio.create_task(caller.call(world.server))
        await until(hurdle.reached.is_set)
        caller.gone.set()
        await calling
        hurdle.open()
        entry = world.pool.models.find("one")
        await until(lambda: entry.state == "loaded" and entry.num_leases == 0)
        await world.close()

    asyncio.run(play())


def engine_threads() -> int:
    return sum(thread.name == "outrider-engine" for thread in threading.enumerate())


def test_unloaded_and_failed_models_leave_no_thread_and_no_memory(folder: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "mute", "llama")
    (tmp_path / "mute" / "tokenizer.json").unlink()
    (tmp_path / "mute" / "tokenizer_config.json").unlink()

    async def play() -> None:
        world = PoolServer(str(folder / "one"), str(tmp_path / "mute"), *SMALL)
        num_threads = engine_threads()
        for _ in range(2):
            with no_memory_left_over():
                assert (await world.complete("one")).status_code == 200
                assert engine_threads() == num_threads + 1
                assert (await world.http.post("/v1/models/one/unload")).json()["state"] == "not_loaded"
                response = await world.complete("mute")
                assert (response.status_code, "has no tokenizer" in response.text) == (503, True)
            assert engine_threads() == num_threads
        await world.close()

    asyncio.run(play())


def test_keep_alive_that_is_no_duration_is_refused(folder: Path) -> None:
    async def play() -> None:
        world = PoolServer(*paths(folder), *SMALL)
        for value in ("soon", "", "10 minutes", "nan"):
            response = await world.complete("one", keep_alive=value)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "keep_alive")
        assert (await world.complete("one", keep_alive=True)).status_code == 400
        await world.close()

    asyncio.run(play())


# -- options ---------------------------------------------------------------------------------------------


def specs_of(tmp_path: Path, text: str, *flags: str) -> list[ModelSpec]:
    file = tmp_path / "outrider.toml"
    file.write_text(text)
    return model_specs(options_of("--config", str(file), *flags))


TABLES = """
max-rows = 8
[models.coder]
path = "/models/qwen-coder"
aliases = ["code", "gpt-4"]
draft-depth = 2
max-context = 4096
default-temperature = 0.2
idle-unload = "5m"
[models.writer]
path = "owner/writer"
pin = true
"""


def test_tables_of_the_file_name_models_and_their_own_options(tmp_path: Path) -> None:
    coder, writer = specs_of(tmp_path, TABLES)
    assert (coder.name, coder.model, coder.aliases) == ("coder", "/models/qwen-coder", ("code", "gpt-4"))
    own = [coder.options[key] for key in ("draft_depth", "max_context", "default_temperature", "max_rows")]
    assert own == [2, 4096, 0.2, 8]
    assert (coder.idle_unload_s, coder.is_pinned) == (300.0, False)
    assert (writer.model, writer.is_pinned, writer.options["draft_depth"]) == ("owner/writer", True, None)
    assert [spec.name for spec in specs_of(tmp_path, TABLES, "writer")] == ["writer"]
    assert [spec.is_pinned for spec in specs_of(tmp_path, TABLES, "--pin", "code")] == [True, True]


@pytest.mark.parametrize(
    ("text", "flags", "words"),
    [
        ("[models.a]\nmax-rows = 2", (), "no path"),
        ('[models.a]\npath = "x"\nport = 1', (), "not an option of a model"),
        ('[models.a]\npath = "x"\nkv-bits = 3', (), "kv-bits"),
        (TABLES, ("--adapter", "x"), "--adapter belongs to one model"),
        (TABLES, ("--adapters", "a=b"), "--adapters belongs to one model"),
        ('[models.a]\npath = "x"\ndraft-depth = 99', (), "draft-depth"),
        ("models = 3", (), "tables"),
        (TABLES, ("--pin", "nobody"), "--pin nobody"),
        (TABLES, ("--served-model-name", "x"), "--served-model-name belongs to one model"),
        (TABLES.replace('"gpt-4"', '"writer"'), (), "two models have the name writer"),
        (TABLES.replace('"gpt-4"', r'"a\u0007"'), (), "cannot be the name"),
        ("", ("--models-dir", "/no/such/dir"), "--models-dir"),
        ("", ("--idle-unload", "soon"), "--idle-unload"),
    ],
)
def test_bad_tables_and_flags_are_named(
    tmp_path: Path, text: str, flags: tuple[str, ...], words: str
) -> None:
    with pytest.raises(InvalidConfig, match=words):
        specs_of(tmp_path, text, *flags)


def test_models_dir_serves_folders_and_gguf_files(folder: Path, tmp_path: Path) -> None:
    for path in ("good", "owner/nested"):
        write_checkpoint(tmp_path / path, "llama")
    (tmp_path / "file.gguf").write_bytes(b"GGUF")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "no-weights").mkdir()
    (tmp_path / "no-weights" / "config.json").write_text("{}")
    specs = model_specs(options_of("--models-dir", str(tmp_path)))
    assert [spec.name for spec in specs] == ["file", "good", "owner/nested"]
    specs = model_specs(options_of(str(folder / "one"), "--models-dir", str(tmp_path)))
    assert [spec.name for spec in specs] == ["one", "file", "good", "owner/nested"]


def test_cached_models_are_served_under_the_names_of_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = tmp_path / "hub"
    snapshot = hub / "models--owner--chat" / "snapshots" / "0123abc"
    write_checkpoint(snapshot, "llama")
    refs = hub / "models--owner--chat" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0123abc")
    bare = hub / "models--owner--no-weights" / "snapshots" / "4567def"
    bare.mkdir(parents=True)
    (bare / "config.json").write_text("{}")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    (spec,) = model_specs(options_of("--models-dir", "cached"))
    assert (spec.name, spec.model) == ("owner/chat", snapshot)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "nothing"))
    with pytest.raises(InvalidConfig, match="no models in the caches"):
        model_specs(options_of("--models-dir", "cached"))


def test_two_models_of_the_same_name_are_refused(folder: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "one", "llama")
    with pytest.raises(InvalidConfig, match="two models have the name one"):
        model_specs(options_of(str(folder / "one"), str(tmp_path / "one")))
