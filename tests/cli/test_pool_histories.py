"""Random histories over three models with adapters in a tight memory: every answer is that of a run alone."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from asgi_caller import Caller

from adapter_files import write_adapter
from outrider.engine.memory_plan import MIN_STEP_BYTES
from outrider.llm import LLM
from outrider.request import SamplingParams
from patience import in_test_or_soak, until
from pool_server import NUM_TOKENS, SMALL, PoolServer, no_memory_left_over
from tiny_models import tiny_model, write_checkpoint

MIB = 1 << 20
FAMILIES = {"one": "llama", "two": "qwen3", "three": "qwen2"}
PROMPTS = ("Hello", "What is 1 + 1?", "zz top")
AT_START = ("sql", "poem")  # adapters that a model is loaded with
AT_RUN_TIME = "extra"  # an adapter that the operator loads and unloads
KINDS = {"sql": "lora", "poem": "dora", AT_RUN_TIME: "lora"}
# Each model takes 2 MiB for rows, 1 MiB for adapters and less than 0.4 MiB for its weights: two of three fit.
TIGHT = ("--memory-limit", str(MIN_STEP_BYTES + int(7.5 * MIB)))
STEP_BYTES = 4 * MIB  # of arrays that steps compute with; they take less than 1 MiB here

Solo = dict[tuple[str, str | None, str], str]  # the answer by model, adapter and prompt


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tables = []
    for name, family in FAMILIES.items():
        write_checkpoint(folder / name, family)
        for adapter, kind in KINDS.items():
            path = folder / "adapters" / name / adapter
            write_adapter(path, tiny_model(family), kind=kind, seed=f"{name}{adapter}", scale=6.0)
        given = [f"{adapter}={folder / 'adapters' / name / adapter}" for adapter in AT_START]
        tables += [f"[models.{name}]", f'path = "{folder / name}"', f"adapters = {given}"]
    (folder / "models.toml").write_text("\n".join([*tables, ""]))
    return folder


@pytest.fixture(scope="module")
def solo(folder: Path) -> Solo:
    """Each model alone, with one adapter fused into its weights."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    found: Solo = {}
    for name in FAMILIES:
        for adapter in (None, *KINDS):
            path = None if adapter is None else folder / "adapters" / name / adapter
            with LLM(folder / name, drafter="none", max_rows=2, adapter=path) as llm:
                for prompt, out in zip(PROMPTS, llm.generate(list(PROMPTS), params), strict=True):
                    found[name, adapter, prompt] = out.text
    for prompt in PROMPTS:
        answers = [text for (_, _, given), text in found.items() if given == prompt]
        assert len({*answers}) == len(answers), "each model and adapter must have an answer of its own"
    return found


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 1 + in_test_or_soak(1, 60)))
def test_random_histories_give_the_tokens_of_each_model_and_adapter_alone(
    folder: Path, solo: Solo, seed: int
) -> None:
    """Loads, unloads, pins, adapters and clients that leave, where two of three models fit into the memory.

    Every answer is that of the model and the adapter that were asked for, alone; no request is lost; no byte
    is taken beyond the limit.
    """
    flags = ("--config", str(folder / "models.toml"), "--adapters-dir", str(folder / "adapters"))
    memory = ("--adapter-memory", "1MiB", *TIGHT)
    pins = ("--pin", "one") if seed % 2 else ()
    with no_memory_left_over():
        bytes_before = mx.get_active_memory()
        server = PoolServer(*flags, *SMALL, *memory, *pins)
        asyncio.run(History(server, solo, random.Random(seed), bytes_before).play())


class History:
    def __init__(self, server: PoolServer, solo: Solo, dice: random.Random, bytes_before: int) -> None:
        self.server, self.solo, self.dice = server, solo, dice
        self.bytes_before = bytes_before  # of MLX's arrays, without the server
        self.answered: Counter[str] = Counter()

    async def play(self) -> None:
        clients = [self.client() for _ in range(5)]
        leavers = [self.leaver() for _ in range(3)]
        await asyncio.gather(*clients, *leavers, self.operator(), self.operator_of_adapters())
        assert self.answered.total() == 3 * len(clients)
        await until(lambda: not self.server.server.context.live.num_live)
        await until(lambda: all(entry.task is None for entry in self.server.pool.models.entries))
        assert all(entry.num_leases == 0 for entry in self.server.pool.models.entries)
        await self.server.close()

    def drawn_model(self) -> tuple[str, str | None, dict[str, Any]]:
        """A model, an adapter or none, and the fields of a request that name them in one of two ways."""
        name, adapter = self.dice.choice([*FAMILIES]), self.dice.choice([None, *KINDS])
        if adapter is not None and self.dice.random() < 0.5:
            return name, adapter, {"model": f"{name}:{adapter}"}
        return name, adapter, {"model": name, "adapter": adapter}

    async def client(self) -> None:
        for _ in range(3):
            name, adapter, fields = self.drawn_model()
            prompt, keep_alive = self.dice.choice(PROMPTS), self.dice.choice([None, None, 0, "10m", -1])
            response = await self.server.complete(prompt=prompt, keep_alive=keep_alive, **fields)
            self.check_memory()
            if adapter == AT_RUN_TIME and response.status_code == 404:
                assert response.json()["error"]["code"] == "adapter_not_found"
                self.answered["unknown adapter"] += 1
                continue
            if adapter == AT_RUN_TIME and response.status_code == 400:  # unloaded since it was checked
                assert "there is no adapter" in response.json()["error"]["message"]
                self.answered["unknown adapter"] += 1
                continue
            assert response.status_code == 200, response.text
            answer = response.json()
            assert answer["model"] == fields["model"]
            assert answer["choices"][0]["text"] == self.solo[name, adapter, prompt], (name, adapter)
            self.answered[name] += 1

    async def leaver(self) -> None:
        _, _, fields = self.drawn_model()
        caller = Caller("/v1/completions", {"prompt": "Hello", "max_tokens": 64, "stream": True} | fields)
        calling = asyncio.create_task(caller.call(self.server.server))
        await asyncio.sleep(self.dice.choice([0, 0.01, 0.1]))
        caller.gone.set()
        await calling

    async def operator(self) -> None:
        for _ in range(3):
            name, verb = self.dice.choice([*FAMILIES]), self.dice.choice(["load", "unload"])
            response = await self.server.http.post(f"/v1/models/{name}/{verb}")
            is_pinned = self.server.pool.models.find(name).is_pinned
            assert response.status_code == (409 if verb == "unload" and is_pinned else 200), response.text
            self.check_memory()

    async def operator_of_adapters(self) -> None:
        for _ in range(4):
            name = self.dice.choice([*FAMILIES])
            if self.dice.random() < 0.6:
                body = {"name": AT_RUN_TIME, "path": f"{name}/{AT_RUN_TIME}", "model": name}
                response = await self.server.http.post("/v1/adapters", json=body)
                assert response.status_code in (200, 409), response.text  # it is loaded already
            else:
                url = f"/v1/adapters/{AT_RUN_TIME}"
                response = await self.server.http.delete(url, params={"model": name})
                assert response.status_code in (200, 404, 409), response.text  # not loaded, or in use
            self.check_memory()

    def check_memory(self) -> None:
        limit = self.server.pool.models.limit_bytes
        assert limit is not None
        assert self.server.pool.models.reserved_bytes <= limit
        assert mx.get_active_memory() - self.bytes_before <= limit + STEP_BYTES
