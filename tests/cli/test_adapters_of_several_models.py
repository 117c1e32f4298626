"""Adapters of several models in one server: each model has its own, with the options of its table."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

import httpx

from adapter_files import write_adapter
from outrider.api.app import create_pool_server
from outrider.api.operations.metrics import Metrics
from outrider.api.settings import ServerSettings
from outrider.cli.adapters import adapters_folder
from outrider.cli.model_specs import model_specs
from outrider.cli.option_sources import resolve
from outrider.cli.serve_options import add_options
from outrider.cli.served_pool import ServedPool
from tiny_models import tiny_model, write_checkpoint

FLAGS = ("--draft-depth", "0", "--max-rows", "2", "--memory-budget", "2MiB", "--no-prefix-cache")
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


class World:
    def __init__(self, file: Path) -> None:
        parser = argparse.ArgumentParser()
        add_options(parser)
        flags = ("--config", str(file), "--adapters-dir", str(file.parent / "adapters"), *FLAGS)
        options = resolve(parser.parse_args(flags), {})
        self.pool = ServedPool(model_specs(options), 1 << 30, Metrics())
        self.pool.load_at_start()
        server = create_pool_server(
            self.pool.models,
            self.pool.settings(ServerSettings(allowed_hosts=("test",))),
            metrics=self.pool.shared.metrics,
            stop_engine=self.pool.close,
            expected=self.pool.shared.expected,
            adapters_folder=adapters_folder(options),
        )
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://test")

    async def text(self, model: str, **fields: Any) -> str:
        body = {"model": model, "prompt": "Hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = await self.http.post("/v1/completions", json=body | fields)
        assert answer.status_code == 200, answer.text
        found: str = answer.json()["choices"][0]["text"]
        return found

    async def names(self) -> list[str]:
        return [one["id"] for one in (await self.http.get("/v1/models")).json()["data"]]

    async def close(self) -> None:
        await self.http.aclose()
        await self.pool.close()
        self.pool.stop()


def test_each_of_several_models_has_its_own_adapters(tmp_path: Path) -> None:
    asyncio.run(_history(World(write_files(tmp_path))))


async def _history(world: World) -> None:
    try:
        assert await world.names() == ["one", "one:sql", "two", "two:sql"], "before anything is loaded"
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
        assert await world.names() == ["one", "one:sql", "two", "two:sql"]
        gone = await world.http.delete("/v1/adapters/sql", params={"model": "two"})
        assert gone.status_code == 404, "the model is not loaded"
        assert {name: await world.text(name) for name in models} == texts, "the model is loaded again"
        gone = await world.http.delete("/v1/adapters/sql", params={"model": "two"})
        assert gone.json()["deleted"] is True
        assert await world.text("one:sql") == texts["one:sql"]
    finally:
        await world.close()
