"""Images and videos in child processes: the same pixels as in this process, and a crash costs one image."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from test_video import video

from image_files import animation, data_url, encoded, noise
from outrider.media import images
from outrider.media.decoder import MediaDecoder
from outrider.media.limits import InvalidMedia, MediaLimits
from outrider.media.loader import MediaItem, MediaLoader

LIMITS = MediaLimits(max_frames=3, max_images=4, max_image_pixels=100_000)


@pytest.fixture(scope="module")
def decoder() -> Iterator[MediaDecoder]:
    decoder = MediaDecoder(LIMITS, num_processes=1)
    yield decoder
    decoder.close()


@pytest.mark.parametrize("format", list(images.FORMATS))
def test_images_are_those_of_this_process(decoder: MediaDecoder, format: str) -> None:
    data = encoded(noise(120, 90), format)
    expected = images.decode_image(data, "", LIMITS)
    found = decoder.decode_image(data, "")
    assert (found.pixels == expected.pixels).all()
    assert found.digest == expected.digest


@pytest.mark.parametrize("kind", ["mp4", "webm", "gif"])
def test_frames_are_those_of_this_process(decoder: MediaDecoder, tmp_path: Path, kind: str) -> None:
    data = (
        animation(7)
        if kind == "gif"
        else video(tmp_path, f".{kind}", {"mp4": "mp4v", "webm": "VP90"}[kind], count=9)
    )
    expected = images.decode_frames(data, "", LIMITS)
    found = decoder.decode_frames(data, "")
    assert [frame.digest for frame in found] == [frame.digest for frame in expected]
    assert decoder.count_frames(data, "") == len(expected) == 3


def test_refusals_are_those_of_this_process(decoder: MediaDecoder) -> None:
    for data, declared in (
        (b"no image", ""),
        (encoded(noise()), "image/gif"),
        (encoded(noise(400, 400)), ""),
    ):
        with pytest.raises(InvalidMedia) as expected:
            images.decode_image(data, declared, LIMITS)
        with pytest.raises(InvalidMedia) as found:
            decoder.decode_image(data, declared)
        assert str(found.value) == str(expected.value)


def test_decoder_that_crashes_or_hangs_costs_one_image() -> None:
    decoder = MediaDecoder(LIMITS, num_processes=1)
    (worker,) = decoder._workers
    worker._module = "crashing_media_child"
    try:
        with pytest.raises(InvalidMedia, match="cannot be decoded: it crashed"):
            decoder.decode_image(b"crash", "")
        assert decoder.decode_image(encoded(noise()), "").size == (12, 8)
        worker._limits = replace(worker._limits, answer_s=0.3)
        with pytest.raises(InvalidMedia, match=r"more than 0\.3 s"):
            decoder.decode_image(b"hang", "")
        assert decoder.process_ids == []
    finally:
        decoder.close()


def test_killed_process_costs_no_image(decoder: MediaDecoder) -> None:
    assert decoder.decode_image(encoded(noise()), "").size == (12, 8)
    os.kill(decoder.process_ids[0], signal.SIGKILL)
    assert decoder.decode_image(encoded(noise()), "").size == (12, 8)


def test_frames_are_counted_before_any_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MediaDecoder, "decode_frames", lambda *_: pytest.fail("frames were decoded"))
    monkeypatch.setattr(MediaDecoder, "decode_image", lambda *_: pytest.fail("an image was decoded"))
    loader = MediaLoader(LIMITS, lambda image: image)
    items = [MediaItem("video", data_url(animation(9), "image/gif"))] * 2
    with pytest.raises(InvalidMedia, match="7 images"):
        asyncio.run(loader.load([*items, MediaItem("image", data_url(encoded(noise())))]))
    loader.close()


def test_video_with_too_many_frames_is_refused_by_its_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = video(tmp_path, count=9)
    monkeypatch.setattr("outrider.media.video.MAX_VIDEO_FRAMES", 8)
    monkeypatch.setattr("cv2.VideoCapture.read", lambda *_: pytest.fail("a frame was decoded"), raising=False)
    for read in (images.count_frames, images.decode_frames):
        with pytest.raises(InvalidMedia, match="9 frames; the limit is 8"):
            read(data, "", LIMITS)
