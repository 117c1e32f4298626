"""A real server with adapters: named at the start, loaded and unloaded while it serves."""

from __future__ import annotations

from pathlib import Path

import httpx

from adapter_files import write_adapter
from patience import PATIENCE_S
from server_process import CONTEXT, ServerProcess, serving, write_tiny_model
from tiny_models import quantized_tiny_model

NAME = "llama-4bit"


def answer(server: ServerProcess, **fields: object) -> str:
    body = {"prompt": "Hello there", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    response = server.post("/v1/completions", body | fields)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def test_adapters_are_served_beside_the_model(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny", with_head=False, name=NAME)
    for name in ("sql", "poem"):
        adapted, _ = quantized_tiny_model(NAME, max_position_embeddings=CONTEXT)
        write_adapter(tmp_path / "adapters" / name, adapted, seed=name, scale=6.0)
    (tmp_path / "adapters" / "bad").mkdir()
    folder = str(tmp_path / "adapters")
    flags = ("--adapters", f"sql={folder}/sql", "--adapters-dir", folder, "--log-level", "warning")
    with serving(model, *flags) as server:
        plain, sql = answer(server), answer(server, model="tiny:sql")
        assert plain != sql
        assert answer(server, adapter="sql") == sql
        assert server.post("/v1/completions", {"prompt": "a", "adapter": "poem"}).status_code == 404
        assert server.post("/v1/adapters", {"name": "poem", "path": "bad"}).status_code == 400
        assert server.post("/v1/adapters", {"name": "poem", "path": "poem"}).status_code == 200
        assert answer(server, model="tiny:poem") not in (plain, sql)
        memory = server.get("/v1/status")["memory"]["adapters"]
        assert 0 < memory["bytes"] < memory["budget_bytes"] == 1 << 30
        assert [one["id"] for one in server.get("/v1/models")["data"]] == ["tiny", "tiny:sql", "tiny:poem"]
        gone = httpx.delete(f"{server.url}/v1/adapters/sql", timeout=PATIENCE_S)
        assert gone.json()["deleted"] is True
        assert server.post("/v1/completions", {"prompt": "a", "model": "tiny:sql"}).status_code == 404
        assert answer(server) == plain
