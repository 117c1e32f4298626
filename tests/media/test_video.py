import os
from pathlib import Path

import cv2
import numpy as np
import pytest

from outrider.media.frames import FrameSample
from outrider.media.images import decode_frames, decode_image, frame_pixels, video_header
from outrider.media.limits import InvalidMedia, MediaLimits
from outrider.media.video import video_kind
from video_files import clip, encoded_video

LIMITS = MediaLimits(max_frames=3, max_image_pixels=10_000)


def video(folder: Path, suffix: str = ".mp4", codec: str = "mp4v", count: int = 11) -> bytes:
    """A video whose frames become more and more red."""
    path = str(folder / f"video{suffix}")
    writer = cv2.VideoWriter(path, cv2.VideoWriter_fourcc(*codec), 10, (64, 48))
    assert writer.isOpened()
    for number in range(count):
        writer.write(np.full((48, 64, 3), (0, 0, number * 20), np.uint8))
    writer.release()
    return Path(path).read_bytes()


@pytest.fixture
def empty_temp(tmp_path, monkeypatch):
    """A folder for temporary files that must be empty at the end."""
    folder = tmp_path / "temp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == [], "something was left behind"


@pytest.mark.parametrize(("suffix", "codec", "kind"), [(".mp4", "mp4v", "mp4"), (".webm", "VP90", "webm")])
def test_frames_are_spread_from_the_first_to_the_last(tmp_path, empty_temp, suffix, codec, kind):
    data = video(tmp_path, suffix, codec)
    assert video_kind(data) == kind
    frames = decode_frames(data, f"video/{kind}", LIMITS)
    assert [frame.size for frame in frames] == [(64, 48)] * 3
    reds = [int(frame.pixels[..., 0].mean()) for frame in frames]
    assert np.abs(np.array(reds) - [0, 100, 200]).max() < 15
    assert max(int(frame.pixels[..., 2].mean()) for frame in frames) < 15


@pytest.mark.parametrize(("suffix", "codec"), [(".mp4", "mp4v"), (".webm", "VP90")])
def test_frames_are_the_same_with_and_without_seeking(tmp_path, suffix, codec, monkeypatch):
    data = encoded_video(clip(40), suffix=suffix, codec=codec)
    sample = FrameSample((0, 1, 5, 20, 21, 39), 32, 24, num_tokens=1)
    limits = MediaLimits()
    header = video_header(data, "", limits)
    assert (header.num_frames, header.fps, header.width, header.height) == (40, 10.0, 64, 48)
    without = frame_pixels(data, "", limits, sample)
    monkeypatch.setattr("outrider.media.video.MAX_SKIPPED", -1)
    sought = frame_pixels(data, "", limits, sample)
    assert list(without) == list(sought) == [0, 1, 5, 20, 21, 39]
    assert all(frame.shape == (24, 32, 3) for frame in sought.values())
    assert all(np.array_equal(without[number], sought[number]) for number in sought)
    assert not np.array_equal(sought[0], sought[39])


class Liar:
    """A cv2.VideoCapture that gives other values for some properties."""

    def __init__(self, monkeypatch, **values):
        real, self._values = cv2.VideoCapture, {getattr(cv2, f"CAP_PROP_{k}"): v for k, v in values.items()}
        monkeypatch.setattr(cv2, "VideoCapture", lambda *args: self._opened(real(*args)))

    def _opened(self, capture):
        self._capture = capture
        return self

    def get(self, what):
        return self._values.get(what, self._capture.get(what))

    def __getattr__(self, name):
        return getattr(self._capture, name)


@pytest.mark.parametrize("fps", [0.0, -1.0, 1e9, float("nan"), float("inf")])
def test_a_rate_that_cannot_be_believed_is_replaced(tmp_path, monkeypatch, fps):
    """Times of frames become positions, which must stay small."""
    data = video(tmp_path)
    Liar(monkeypatch, FPS=fps)
    assert video_header(data, "", LIMITS).fps == 24.0


@pytest.mark.parametrize("count", [0, -9e18])
def test_frames_are_counted_where_the_header_does_not_say(tmp_path, monkeypatch, count):
    """As in what browsers record: the rate is that of a clock then."""
    data = video(tmp_path, ".webm", "VP90")
    Liar(monkeypatch, FRAME_COUNT=count, FPS=1000.0)
    header = video_header(data, "", LIMITS)
    assert header.num_frames == 11
    assert abs(header.fps - 10) < 0.1
    assert len(decode_frames(data, "", LIMITS)) == 3


def test_a_video_of_too_many_frames_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    data = video(tmp_path)
    liar = Liar(monkeypatch, FRAME_COUNT=200_001)
    liar.grab = liar.read = lambda: pytest.fail("a frame was decoded")
    with pytest.raises(InvalidMedia, match=r"200,001 frames; the limit is 200,000"):
        decode_frames(data, "", LIMITS)


def test_a_short_video_gives_what_it_has(tmp_path, empty_temp):
    assert len(decode_frames(video(tmp_path, count=1), "", LIMITS)) == 1


def test_frames_are_read_where_an_opened_descriptor_keeps_its_position(tmp_path, empty_temp, monkeypatch):
    """As on macOS, where opening /dev/fd/N gives a duplicate of N."""
    data, positions, real = video(tmp_path), [], cv2.VideoCapture

    def capture(path: str, api: int) -> cv2.VideoCapture:
        positions.append(os.lseek(int(path.removeprefix("/dev/fd/")), 0, os.SEEK_CUR))
        return real(path, api)

    monkeypatch.setattr(cv2, "VideoCapture", capture)
    assert decode_frames(data, "", LIMITS)
    assert set(positions) == {0}


def test_damaged_and_mislabelled_videos_are_refused(tmp_path, empty_temp):
    data = video(tmp_path)
    for wrong in (data[:100], data[:8] + bytes(500), b"\x1a\x45\xdf\xa3" + bytes(500)):
        with pytest.raises(InvalidMedia):
            decode_frames(wrong, "", LIMITS)
    with pytest.raises(InvalidMedia, match="declared"):
        decode_frames(data, "video/webm", LIMITS)
    with pytest.raises(InvalidMedia, match="64 x 48"):
        decode_frames(data, "", MediaLimits(max_image_pixels=1000))
    with pytest.raises(InvalidMedia, match="known format"):
        decode_image(data, "", LIMITS)  # a video is no image


@pytest.mark.parametrize(
    "data", [b"#EXTM3U\nhttp://host/a.ts\n", b"ffconcat version 1.0\nfile /etc/passwd\n"]
)
def test_files_that_name_other_files_never_reach_the_decoder(data, empty_temp, monkeypatch):
    monkeypatch.setattr(cv2, "VideoCapture", lambda *_: pytest.fail("the file was opened"))
    with pytest.raises(InvalidMedia, match="known format"):
        decode_frames(data, "video/mp4", LIMITS)
