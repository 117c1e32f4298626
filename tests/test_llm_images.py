"""Pictures through the Python API."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from image_files import data_url, encoded, noise
from outrider import LLM, InvalidRequest, SamplingParams
from tiny_models import write_checkpoint
from tiny_vision import write_vision_checkpoint

GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module", params=["smolvlm", "qwen3_5"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp(request.param)
    write_vision_checkpoint(folder, request.param)
    with LLM(folder, max_rows=4) as llm:
        yield llm


def about(image: Any, **part: Any) -> list[dict[str, Any]]:
    shown = part or {"type": "image", "image": image}
    return [{"role": "user", "content": [shown, {"type": "text", "text": "what?"}]}]


def test_a_picture_in_any_form_gives_one_answer(llm: LLM, tmp_path: Path) -> None:
    pixels = noise(30, 20, 1)
    file = tmp_path / "a.png"
    file.write_bytes(encoded(pixels))
    url = data_url(encoded(pixels))
    forms = [pixels, Image.fromarray(pixels), encoded(pixels, "BMP"), file, str(file), url]
    found = {tuple(llm.chat(about(form), GREEDY).token_ids) for form in forms}
    found.add(tuple(llm.chat(about(None, type="image_url", image_url={"url": url}), GREEDY).token_ids))
    assert len(found) == 1
    assert found != {tuple(llm.chat(about(noise(30, 20, 2)), GREEDY).token_ids)}


def test_conversations_with_and_without_pictures_go_together(llm: LLM) -> None:
    text = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    conversations = [about(noise(seed=3)), text, about(noise(seed=4))]
    together = [answer.token_ids for answer in llm.chat(conversations, GREEDY)]
    assert together == [llm.chat(one, GREEDY).token_ids for one in conversations]
    assert len({tuple(ids) for ids in together}) == 3
    streamed = [token for delta in llm.stream_chat(conversations[0], GREEDY) for token in delta.token_ids]
    assert streamed == together[0]


def test_what_cannot_be_read_is_refused(llm: LLM, tmp_path: Path) -> None:
    for image in (b"no picture", "http://host/a.png", tmp_path / "missing.png", 7, noise()[0]):
        with pytest.raises(InvalidRequest):
            llm.chat(about(image), GREEDY)
    with pytest.raises(InvalidRequest, match="has no audio encoder"):
        llm.chat(about(None, type="input_audio"), GREEDY)
    with pytest.raises(InvalidRequest, match="'smell'"):
        llm.chat(about(None, type="smell"), GREEDY)


def test_image_that_crashes_its_decoder_is_refused_and_the_process_lives(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert llm._images is not None
    (worker,) = llm._images.decoder._workers
    monkeypatch.setattr(worker, "_module", "media.crashing_media_child")
    if worker.process_id is not None:
        os.kill(worker.process_id, signal.SIGKILL)  # the next one is of that module
    with pytest.raises(InvalidRequest, match="cannot be decoded: it crashed"):
        llm.chat(about(b"crash"), GREEDY)
    assert len(llm.chat(about(encoded(noise())), GREEDY).token_ids) == 10


def test_close_ends_the_decoders_process(tmp_path: Path) -> None:
    write_vision_checkpoint(tmp_path, "smolvlm")
    with LLM(tmp_path) as llm:
        llm.chat(about(encoded(noise())), GREEDY)
        assert llm._images is not None
        (worker,) = llm._images.decoder._workers
        process = worker._process
        assert process is not None
        assert process.popen.poll() is None
    assert process.popen.poll() is not None


def test_a_text_model_refuses_pictures_rather_than_not_seeing_them(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    with LLM(tmp_path) as llm, pytest.raises(InvalidRequest, match="text only"):
        llm.chat(about(noise()), GREEDY)
