"""Adapters of several models in one server: each model has its own, with the options of its table."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from adapter_files import write_adapter
from pool_server import SMALL, PoolServer
from tiny_models import tiny_model, write_checkpoint

FAMILIES = {"one": "llama", "two": "qwen3"}


def write_files(folder: Path) -> Path:
    """Two models with an adapter "sql" each, "poem" for the second one, and the TOML file."""
    tables = []
    for name, family in FAMILIES.items():
        write_checkpoint(folder / name, family)
        for adapter in ("sql", "poem"):
            write_adapter(folder / "adapters" / name / adapter, tiny_model(family), seed=adapter, scale=6.0)
        tables += [f"[models.{name}]", f'path = "{folder / name}"']
        tables += [f'adapters = ["sql={folder / "adapters" / name / "sql"}"]', 'adapter-memory = "32MiB"']
    file = folder / "models.toml"
    file.write_text("\n".join([*tables, ""]))
    return file


def server_of(file: Path, *flags: str) -> PoolServer:
    return PoolServer("--config", str(file), *flags, *SMALL, "--memory-limit", "1GiB")


def over_http(file: Path) -> tuple[str, str]:
    """The flag that lets adapters be loaded over HTTP."""
    return "--adapters-dir", str(file.parent / "adapters")


async def names(server: PoolServer) -> list[str]:
    return [one["id"] for one in (await server.http.get("/v1/models")).json()["data"]]


def test_each_of_several_models_has_its_own_adapters(tmp_path: Path) -> None:
    file = write_files(tmp_path)
    asyncio.run(_history(server_of(file, *over_http(file))))


async def _history(world: PoolServer) -> None:
    try:
        assert await names(world) == ["one", "one:sql", "two", "two:sql"], "before anything is loaded"
        models = ("one", "one:sql", "two", "two:sql")
        texts = {name: await world.text(name) for name in models}
        assert len({*texts.values()}) == len(models)
        assert await world.text("two", adapter="sql") == texts["two:sql"]

        body = {"name": "poem", "path": "two/poem", "model": "two"}
        loaded = await world.http.post("/v1/adapters", json=body)
        assert loaded.status_code == 200, loaded.text
        listed = (await world.http.get("/v1/adapters")).json()["data"]
        assert [(one["model"], one["id"]) for one in listed] == [
            ("one", "sql"),
            ("two", "sql"),
            ("two", "poem"),
        ]
        assert await world.text("two:poem") not in texts.values()
        refused = await world.http.post("/v1/completions", json={"model": "one:poem", "prompt": "Hello"})
        assert refused.status_code == 404

        await world.http.post("/v1/models/two/unload")
        assert await names(world) == ["one", "one:sql", "two", "two:sql"]
        gone = await world.http.delete("/v1/adapters/sql", params={"model": "two"})
        assert gone.status_code == 404, "the model is not loaded"
        assert {name: await world.text(name) for name in models} == texts, "the model is loaded again"
        gone = await world.http.delete("/v1/adapters/sql", params={"model": "two"})
        assert gone.json()["deleted"] is True
        assert await world.text("one:sql") == texts["one:sql"]
    finally:
        await world.close()


def write_for_another_base(folder: Path) -> dict[str, Path]:
    """Adapters that the model "one" cannot take, by what is wrong with them."""
    deeper, wider = tiny_model("llama", num_hidden_layers=5), tiny_model("llama", intermediate_size=128)
    found = {
        "no such layer": write_adapter(folder / "deeper", deeper, seed="deeper"),
        "shape": write_adapter(folder / "wider", wider, seed="wider"),
        "damaged": write_adapter(folder / "damaged", tiny_model("llama")),
    }
    file = found["damaged"] / "adapters.safetensors"
    file.write_bytes(file.read_bytes()[:-64])
    return found


def test_adapters_for_another_base_are_refused_and_all_models_serve_on(tmp_path: Path) -> None:
    file = write_files(tmp_path)
    bad = write_for_another_base(tmp_path / "adapters" / "bad")

    async def play() -> None:
        server = server_of(file, *over_http(file))
        before = {name: await server.text(name) for name in ("one", "one:sql", "two")}
        for words, path in bad.items():
            body = {"name": "bad", "path": str(path.relative_to(tmp_path / "adapters")), "model": "one"}
            refused = await server.http.post("/v1/adapters", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "adapter_refused")
            assert words in refused.text
            assert (await server.complete("one:bad")).status_code == 404
        for path in ("../one", "/etc", "one/../../one", "sql\x00", "one/../../../../etc/passwd"):
            refused = await server.http.post(
                "/v1/adapters", json={"name": "bad", "path": path, "model": "one"}
            )
            assert refused.status_code in (400, 403), refused.text
        for name in ("../sql", "one:sql", "", "a" * 65, ".hidden"):
            refused = await server.http.post("/v1/adapters", json={"name": name, "path": "one/sql"})
            assert refused.status_code == 400, refused.text
        for model in ("one:../sql", "one:sql:sql", "one:/etc/passwd", "one:"):
            assert (await server.complete(model)).status_code == 404
        assert {name: await server.text(name) for name in before} == before
        await server.close()

    asyncio.run(play())


@pytest.mark.parametrize("option", ["adapter", "adapters"])
def test_model_whose_adapter_is_for_another_base_is_not_loaded_and_the_others_serve_on(
    tmp_path: Path, option: str
) -> None:
    file = write_files(tmp_path)
    path = write_for_another_base(tmp_path / "adapters" / "bad")["no such layer"]
    value = f'"{path}"' if option == "adapter" else f'["bad={path}"]'
    write_checkpoint(tmp_path / "three", "llama")
    tables = f'[models.three]\npath = "{tmp_path / "three"}"\n{option} = {value}\nadapter-memory = "32MiB"\n'
    file.write_text(file.read_text() + tables)

    async def play() -> None:
        server = server_of(file)
        for _ in range(2):  # it is tried again, and fails again
            response = await server.complete("three")
            assert response.status_code == 503, response.text
            assert "for another base model" in response.text
            assert str(tmp_path) not in response.text
        assert (await server.states())["three"] == "failed"
        await server.text("one:sql")
        await server.close()

    asyncio.run(play())
