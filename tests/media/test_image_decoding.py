import contextlib
import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from image_files import animation, encoded, noise, png_bomb
from outrider.media.images import decode_frames, decode_image, image_from_pixels
from outrider.media.limits import InvalidMedia, MediaLimits

LIMITS = MediaLimits(max_image_pixels=10_000, max_images=4, max_frames=3)


@pytest.mark.parametrize("format", ["PNG", "WEBP", "BMP"])
def test_lossless_formats_give_the_same_pixels_and_digest(format):
    options = {"lossless": True} if format == "WEBP" else {}
    found = decode_image(encoded(noise(), format, **options), "", LIMITS)
    assert (found.pixels == noise()).all()
    assert found.digest == image_from_pixels(noise()).digest


def test_digest_depends_on_pixels_and_shape():
    flat = np.zeros((4, 6, 3), np.uint8)
    assert image_from_pixels(flat).digest != image_from_pixels(flat.reshape(6, 4, 3)).digest
    assert image_from_pixels(noise(seed=1)).digest != image_from_pixels(noise(seed=2)).digest


def test_transparent_grey_and_palette_images_become_rgb():
    for mode in ("RGBA", "LA", "L", "P", "1"):
        out = io.BytesIO()
        Image.fromarray(noise()).convert(mode).save(out, "PNG")
        assert decode_image(out.getvalue(), "image/png", LIMITS).pixels.shape == (8, 12, 3)


def test_an_image_is_turned_upright():
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter turn
    found = decode_image(encoded(noise(), "PNG", exif=turned), "", LIMITS)
    assert (found.pixels == np.rot90(noise(), -1)).all()


def test_the_content_decides_and_a_wrong_declaration_is_refused():
    jpeg = encoded(noise(), "JPEG")
    for declared in ("image/jpeg", "image/jpg", "", "application/octet-stream"):
        assert decode_image(jpeg, declared, LIMITS).size == (12, 8)
    for declared in ("image/png", "text/html", "image/svg+xml"):
        with pytest.raises(InvalidMedia, match="declared"):
            decode_image(jpeg, declared, LIMITS)


@pytest.mark.parametrize("data", [b"x", b"<svg></svg>", b"%PDF-1.4", b"<html>", b"GIF89a", bytes(1000)])
def test_data_that_is_no_image_is_refused(data):
    with pytest.raises(InvalidMedia):
        decode_image(data, "image/png", LIMITS)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_truncated_image_is_refused(format):
    data = encoded(noise(64, 64), format)
    with pytest.raises(InvalidMedia):
        decode_image(data[: len(data) // 2], "", LIMITS)


def test_a_decompression_bomb_is_refused_by_its_header():
    """A few bytes announce 30,000 x 30,000 pixels. The image is refused before memory is allocated."""
    for side, match in ((30_000, "too many pixels"), (9_000, "9000 x 9000")):
        with pytest.raises(InvalidMedia, match=match):
            decode_image(png_bomb(side), "image/png", LIMITS)
    with pytest.raises(InvalidMedia, match="101 x 100"):
        decode_image(encoded(noise(101, 100)), "", LIMITS)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP"]))
def test_damage_anywhere_is_either_read_or_refused(data, format):
    good = bytearray(encoded(noise(20, 20), format))
    for _ in range(data.draw(st.integers(1, 8))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(InvalidMedia):
        assert decode_image(bytes(good), "", LIMITS).pixels.shape[2] == 3


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_a_video_is_sampled_from_its_first_to_its_last_frame(format):
    options = {"lossless": True} if format == "WEBP" else {}
    frames = [Image.fromarray(noise(seed=seed)) for seed in range(5)]
    out = io.BytesIO()
    frames[0].save(out, format, save_all=True, append_images=frames[1:], duration=50, **options)
    found = decode_frames(out.getvalue(), "video/mp4" if format == "GIF" else "", LIMITS)
    assert len(found) == 3
    if format != "GIF":
        assert [f.digest for f in found] == [image_from_pixels(noise(seed=seed)).digest for seed in (0, 2, 4)]


def test_a_short_video_gives_all_its_frames_and_a_long_one_is_refused():
    assert len(decode_frames(animation(2), "image/gif", LIMITS)) == 2
    assert len(decode_frames(encoded(noise()), "image/png", LIMITS)) == 1
    with pytest.raises(InvalidMedia, match="frames"):
        decode_frames(animation(80, width=30, height=20), "", LIMITS)
