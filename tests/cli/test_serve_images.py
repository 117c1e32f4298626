"""A server process with a vision model, and the official clients: pictures while text streams run."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from image_files import data_url, encoded, noise
from patience import PATIENCE_S
from server_process import serving
from tiny_vision import write_vision_checkpoint


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def media_processes(ancestor: int) -> list[int]:
    """The processes that decode images for a server. Empty where there is no /proc."""
    found = []
    for folder in Path("/proc").glob(f"{ancestor}/task/*/children"):
        for child in map(int, folder.read_text().split()):
            is_media = b"outrider.media.child" in Path(f"/proc/{child}/cmdline").read_bytes()
            found += [child] if is_media else media_processes(child)
    return found


def test_pictures_over_http_while_text_streams_run(tmp_path: Path) -> None:
    write_vision_checkpoint(tmp_path / "model", "smolvlm")
    media = tmp_path / "media"
    media.mkdir()
    (media / "a.png").write_bytes(encoded(noise(seed=3)))
    flags = ("--allow-local-media", str(media), "--max-images", "2", "--max-rows", "4")
    with serving(tmp_path / "model", *flags) as server:
        assert "images read" in " ".join(server.banner.split())
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)

        def ask(*parts: dict[str, Any], **changes: Any) -> str:
            content: Any = [*parts, {"type": "text", "text": "what is it?"}]
            settings = {"temperature": 0, "max_tokens": 10, "extra_body": {"ignore_eos": True}} | changes
            answer = client.chat.completions.create(
                model="model", messages=[{"role": "user", "content": content}], **settings
            )
            return str(answer.choices[0].message.content)

        streamed: list[str] = []

        def stream() -> None:
            chunks = client.completions.create(
                model="model", prompt="once", max_tokens=300, temperature=0, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            streamed.extend(chunk.choices[0].text for chunk in chunks)

        thread = threading.Thread(target=stream)
        thread.start()
        pictures = [data_url(encoded(noise(40, 24, seed))) for seed in (1, 2)]
        busy = [ask(image(url)) for url in pictures]
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        num_encoded = server.metric("outrider_image_pieces_encoded_total")
        assert num_encoded >= 2
        assert server.metric("outrider_image_encode_seconds_count") == num_encoded
        assert server.metric("outrider_image_cache_bytes") > 0
        num_hits = server.metric("outrider_image_cache_hits_total")
        assert [ask(image(url)) for url in pictures] == busy
        assert server.metric("outrider_image_pieces_encoded_total") == num_encoded
        assert server.metric("outrider_image_cache_hits_total") == num_hits + num_encoded
        assert busy[0] != busy[1]
        assert ask(image((media / "a.png").as_uri())) == ask(image(data_url(encoded(noise(seed=3)))))
        again = client.completions.create(
            model="model", prompt="once", max_tokens=300, temperature=0, extra_body={"ignore_eos": True}
        )
        assert "".join(streamed) == again.choices[0].text

        decoders = media_processes(server.process.pid)
        assert decoders or not Path("/proc/self").exists()
        for process_id in decoders:
            os.kill(process_id, signal.SIGKILL)
        assert ask(image(pictures[1])) == busy[1]
        with pytest.raises(openai.BadRequestError, match="3 images"):
            ask(*[image(pictures[0])] * 3)
        claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE_S)
        source: Any = {"type": "base64", "media_type": "image/png", "data": pictures[0].partition(",")[2]}
        message = claude.messages.create(
            model="model",
            max_tokens=10,
            messages=[
                {
                    "role": "user",
                    "content": [{"type": "image", "source": source}, {"type": "text", "text": "what is it?"}],
                }
            ],
            extra_body={"ignore_eos": True, "temperature": 0},
        )
        block = message.content[0]
        assert block.type == "text"
        assert block.text == busy[0]
        source = {"type": "url", "url": "http://127.0.0.1:1/a.png"}
        with pytest.raises(anthropic.BadRequestError, match="public internet"):
            claude.messages.create(
                model="model",
                max_tokens=1,
                messages=[{"role": "user", "content": [{"type": "image", "source": source}]}],
            )
