"""A server of several models in the test's own process: `outrider serve` without a socket."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import mlx.core as mx

from outrider.api.app import Server, create_pool_server
from outrider.api.operations.metrics import Metrics
from outrider.api.settings import ServerSettings
from outrider.cli.adapters import adapters_folder
from outrider.cli.model_specs import model_specs
from outrider.cli.option_sources import resolve
from outrider.cli.serve_options import add_options
from outrider.cli.served_pool import ServedPool

SMALL = ("--draft-depth", "0", "--max-rows", "2", "--memory-budget", "2MiB", "--no-prefix-cache")
NUM_TOKENS = 12


def options_of(*flags: str, **environ: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return resolve(parser.parse_args(flags), environ)


class PoolServer:
    def __init__(self, *flags: str) -> None:
        """`flags`: of `outrider serve`."""
        options = options_of(*flags)
        self.pool = ServedPool(model_specs(options), options["memory_limit"], Metrics())
        self.pool.load_at_start()
        settings = self.pool.settings(ServerSettings(allowed_hosts=("test",)))
        self.server: Server = create_pool_server(
            self.pool.models,
            settings,
            metrics=self.pool.shared.metrics,
            stop_engine=self.pool.close,
            expected=self.pool.shared.expected,
            adapters_folder=adapters_folder(options),
        )
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.server.app, raise_app_exceptions=False), base_url="http://test"
        )

    async def complete(self, model: str | None, prompt: str = "Hello", **fields: Any) -> httpx.Response:
        body = {"model": model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
        return await self.http.post("/v1/completions", json=body | {"ignore_eos": True} | fields)

    async def text(self, model: str, prompt: str = "Hello", **fields: Any) -> str:
        response = await self.complete(model, prompt, **fields)
        assert response.status_code == 200, response.text
        found: str = response.json()["choices"][0]["text"]
        return found

    async def states(self) -> dict[str, str]:
        models = (await self.http.get("/v1/status")).json()["models"]
        return {model["name"]: model["state"] for model in models}

    async def close(self) -> None:
        await self.http.aclose()
        await self.pool.close()
        self.pool.stop()


@contextmanager
def no_memory_left_over() -> Iterator[None]:
    gc.collect()
    before = mx.get_active_memory()
    yield
    gc.collect()
    assert mx.get_active_memory() <= before + 4096  # a few scalars of MLX stay
