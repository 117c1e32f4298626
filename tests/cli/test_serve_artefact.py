"""A published Qwen3.5 folder with all parts inside, over HTTP, with the flags that users of vllm-mlx type."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from image_files import data_url, encoded, noise
from server_process import serving
from tiny_artefacts import DENSE, write_published

FLAGS = ("--mllm", "--enable-mtp", "--continuous-batching")
NUM_TOKENS = 24


def question(seed: int | None, depth: int) -> dict[str, Any]:
    """About a picture, or about none."""
    url = None if seed is None else data_url(encoded(noise(40, 24, seed)))
    pictures = [{"type": "image_url", "image_url": {"url": url}}] if url else []
    content = [*pictures, {"type": "text", "text": "what is it?"}]
    return {
        "model": "model",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "draft_depth": depth,
    }


def test_pictures_and_text_draft_with_the_head_inside_the_folder(tmp_path: Path) -> None:
    write_published(tmp_path / "model", DENSE)
    with serving(tmp_path / "model", *FLAGS, "--max-rows", "4") as server:
        assert "--mllm: not needed" in server.banner
        assert "--continuous-batching: not needed" in server.banner
        banner = " ".join(server.banner.split())
        assert "images read" in banner
        assert "needs an MTP head" not in banner

        def ask(seed: int | None, depth: int) -> tuple[str, int]:
            reply = server.post("/v1/chat/completions", question(seed, depth)).json()
            details = reply["usage"]["completion_tokens_details"]
            return reply["choices"][0]["message"]["content"], details["accepted_prediction_tokens"]

        asked = [(seed, depth) for depth in (0, 3) for seed in (1, 2, None)]
        with ThreadPoolExecutor(len(asked)) as threads:
            answers = dict(zip(asked, threads.map(lambda one: ask(*one), asked), strict=True))
    for seed in (1, 2, None):
        assert answers[seed, 3][0] == answers[seed, 0][0]
        assert answers[seed, 3][1] >= NUM_TOKENS // 4
    assert len({answers[seed, 3][0] for seed in (1, 2, None)}) == 3
