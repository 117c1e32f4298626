"""A published Qwen3.5 folder with all parts inside, over HTTP, with the flags that users of vllm-mlx type."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from image_files import data_url, encoded, noise
from server_process import serving
from tiny_artefacts import DENSE, write_published
from video_files import clip, encoded_video

FLAGS = ("--mllm", "--enable-mtp", "--continuous-batching")
NUM_TOKENS = 24


Shown = int | str | None  # the seed of a picture, "video", or nothing


def question(shown: Shown, depth: int) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "text", "text": "what is it?"}]
    if shown == "video":
        url = data_url(encoded_video(clip(40)), "video/mp4")
        content.insert(0, {"type": "video_url", "video_url": {"url": url}})
    elif isinstance(shown, int):
        url = data_url(encoded(noise(40, 24, shown)))
        content.insert(0, {"type": "image_url", "image_url": {"url": url}})
    return {
        "model": "model",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "draft_depth": depth,
    }


def test_pictures_videos_and_text_draft_with_the_head_inside_the_folder(tmp_path: Path) -> None:
    write_published(tmp_path / "model", DENSE)
    flags = (*FLAGS, "--max-rows", "4", "--max-video-frames", "6")
    with serving(tmp_path / "model", *flags) as server:
        assert "--mllm: not needed" in server.banner
        assert "--continuous-batching: not needed" in server.banner
        banner = " ".join(server.banner.split())
        assert "images read" in banner
        assert "needs an MTP head" not in banner

        def ask(shown: Shown, depth: int) -> tuple[str, int]:
            reply = server.post("/v1/chat/completions", question(shown, depth)).json()
            details = reply["usage"]["completion_tokens_details"]
            return reply["choices"][0]["message"]["content"], details["accepted_prediction_tokens"]

        asked = [(shown, depth) for depth in (0, 3) for shown in (1, 2, "video", None)]
        with ThreadPoolExecutor(len(asked)) as threads:
            answers = dict(zip(asked, threads.map(lambda one: ask(*one), asked), strict=True))
        found = server.post("/tokenize", {"messages": question("video", 0)["messages"]}).json()
        prompt = server.post("/detokenize", {"tokens": found["tokens"]}).json()["prompt"]
    assert prompt.count(" seconds>") == 3  # read as a video: pairs of its 6 frames
    for shown in (1, 2, "video", None):
        assert answers[shown, 3][0] == answers[shown, 0][0]
        assert answers[shown, 3][1] >= (1 if shown == "video" else NUM_TOKENS // 4)
    assert len({answers[shown, 3][0] for shown in (1, 2, "video", None)}) == 4
