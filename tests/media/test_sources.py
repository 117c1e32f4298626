import os

import pytest

from outrider.config import InvalidConfig
from outrider.media.limits import InvalidMedia, MediaLimits
from outrider.media.sources import DataUrl, FileUrl, WebUrl, parse_source, read_inline

LIMITS = MediaLimits()


def read(text: str, limits: MediaLimits = LIMITS) -> bytes:
    source = parse_source(text)
    assert not isinstance(source, WebUrl)
    return read_inline(source, limits)


def test_kinds_of_sources_are_told_apart_whatever_their_case():
    assert parse_source("DATA:image/PNG;base64,AAAA") == DataUrl("image/png", True, "AAAA")
    assert parse_source("data:,a%20b") == DataUrl("", False, "a%20b")
    assert isinstance(parse_source("HTTPS://host/a.png"), WebUrl)
    assert parse_source("file:///tmp/a%20b.png") == FileUrl("/tmp/a b.png")


@pytest.mark.parametrize(
    "text", ["", "a.png", "/etc/passwd", "ftp://host/a", "javascript:1", "data:image/png;base64"]
)
def test_other_sources_are_refused(text):
    with pytest.raises(InvalidMedia):
        parse_source(text)


def test_data_urls_with_breaks_and_without_padding_are_read():
    assert read("data:image/png;base64,aGVs\nbG8") == b"hello"
    assert read("data:image/png;base64,aGVsbG8%3D") == b"hello"
    assert read("data:,a%20b") == b"a b"


@pytest.mark.parametrize("payload", ["", "!!!!", "aGVsbG8=x", "aGVsb", "aGVs-_8="])
def test_damaged_base64_is_refused(payload):
    with pytest.raises(InvalidMedia):
        read(f"data:image/png;base64,{payload}")


def test_data_over_the_limit_is_refused_before_it_is_decoded():
    limits = MediaLimits(max_image_bytes=10)
    assert read("data:;base64," + "AAAA" * 3, MediaLimits(max_image_bytes=9)) == bytes(9)
    for count in (4, 4000):
        with pytest.raises(InvalidMedia, match="10"):
            read("data:;base64," + "AAAA" * count, limits)


def test_files_are_refused_unless_a_folder_is_allowed(tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(b"abc")
    with pytest.raises(InvalidMedia, match="--allow-local-media"):
        read(file.as_uri())
    assert read(file.as_uri(), MediaLimits(local_folder=str(tmp_path))) == b"abc"


def test_files_outside_the_folder_are_refused_by_any_way(tmp_path):
    inside, outside = tmp_path / "media", tmp_path / "media-secret"
    inside.mkdir()
    outside.mkdir()
    (outside / "a.png").write_bytes(b"abc")
    (inside / "link.png").symlink_to(outside / "a.png")
    (inside / "folder").symlink_to(outside)
    limits = MediaLimits(local_folder=str(inside))
    ways = ["media-secret/a.png", "media/../media-secret/a.png", "media/link.png", "media/folder/a.png"]
    ways += ["media/%2e%2e/media-secret/a.png"]
    for way in ways:
        with pytest.raises(InvalidMedia, match="leads out"):
            read(f"file://{tmp_path}/{way}", limits)


def test_only_plain_files_are_read(tmp_path):
    limits = MediaLimits(local_folder=str(tmp_path), max_image_bytes=4)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "big").write_bytes(bytes(5))
    for name in ("", "pipe", "missing", "big", "a%00b"):
        with pytest.raises(InvalidMedia):
            read(f"file://{tmp_path}/{name}", limits)
    with pytest.raises(InvalidMedia, match="host"):
        read(f"file://server{tmp_path}/big", limits)


def test_limits_that_make_no_sense_are_refused(tmp_path):
    for wrong in ({"max_images": 0}, {"fetch_total_s": 0}, {"local_folder": str(tmp_path / "none")}):
        with pytest.raises(InvalidConfig):
            MediaLimits(**wrong)
