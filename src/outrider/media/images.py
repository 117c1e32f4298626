"""Decodes images with Pillow. For clients' images this runs in a child process: see decoder.py.

The content decides the format, and only a few formats are allowed. An image whose header announces too many
pixels is refused before it is decoded.
"""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from outrider.media.frames import FrameSample, VideoHeader
from outrider.media.limits import InvalidMedia, MediaLimits, import_extra
from outrider.media.video import is_fps, read_frames, read_header, resized, spread, video_kind

if TYPE_CHECKING:
    from PIL import Image

log = logging.getLogger(__name__)

T = TypeVar("T")

FORMATS = {  # by Pillow's name of the format
    "JPEG": "image/jpeg",
    "PNG": "image/png",
    "WEBP": "image/webp",
    "GIF": "image/gif",
    "BMP": "image/bmp",
}
MEDIA_TYPE_ALIASES = {
    "image/jpg": "image/jpeg",
    "image/pjpeg": "image/jpeg",
    "image/apng": "image/png",
    "image/x-ms-bmp": "image/bmp",
}
UNSPECIFIC_TYPES = (  # declared types that do not name a format
    "",
    "image/*",
    "application/octet-stream",
    "binary/octet-stream",
)
DEFAULT_DURATION_MS = 100  # of a frame of an animation that does not say: what browsers take
ANIMATED_FORMATS = ("GIF", "WEBP", "PNG")


@dataclass(frozen=True, eq=False)
class DecodedImage:
    """A decoded image: upright, RGB."""

    pixels: np.ndarray  # uint8 [height, width, 3]
    digest: str  # of shape and pixels: equal images have equal digests in whatever format they were sent

    @property
    def size(self) -> tuple[int, int]:
        """Return width and height."""
        return self.pixels.shape[1], self.pixels.shape[0]


def decode_image(data: bytes, declared: str, limits: MediaLimits) -> DecodedImage:
    """Decode an image, or the first frame of an animation. `declared`: its media type, "" if unknown."""
    return image_from_pixels(image_pixels(data, declared, limits))


def decode_frames(data: bytes, declared: str, limits: MediaLimits) -> list[DecodedImage]:
    """Decode frames of a video or an animation, evenly spread from the first to the last."""
    return [image_from_pixels(frame) for frame in frame_pixels(data, declared, limits).values()]


def image_pixels(data: bytes, declared: str, limits: MediaLimits) -> np.ndarray:
    return _open(data, declared, limits, _pixels)


def frame_pixels(
    data: bytes, declared: str, limits: MediaLimits, sample: FrameSample | None = None
) -> dict[int, np.ndarray]:
    """The frames of a sample by their numbers; without one, evenly spread from the first to the last."""
    if video_kind(data) is not None:
        return read_frames(data, declared, limits, sample)

    def frames(image: Image.Image) -> dict[int, np.ndarray]:
        count = _checked_count(image, limits)
        decoded = {}
        for number in spread(count, limits.max_frames) if sample is None else sample.numbers:
            image.seek(number)
            pixels = _pixels(image)
            decoded[number] = pixels if sample is None else resized(pixels, sample)
        return decoded

    return _open(data, declared, limits, frames)


def video_header(data: bytes, declared: str, limits: MediaLimits) -> VideoHeader:
    """The header of a video or an animation. At most the first frame of an animation is decoded."""
    if video_kind(data) is not None:
        return read_header(data, declared, limits)

    def header(image: Image.Image) -> VideoHeader:
        count = _checked_count(image, limits)
        image.load()  # WebP's durations are known only then
        fps = 1000 / float(image.info.get("duration") or DEFAULT_DURATION_MS)
        fps = fps if is_fps(fps) else 1000 / DEFAULT_DURATION_MS
        return VideoHeader(count, fps, image.width, image.height)

    return _open(data, declared, limits, header)


def count_frames(data: bytes, declared: str, limits: MediaLimits) -> int:
    """The number of frames that `frame_pixels` returns without a sample, at most. No pixels are decoded."""
    if video_kind(data) is not None:
        count = read_header(data, declared, limits).num_frames
    else:
        count = _open(data, declared, limits, lambda image: _checked_count(image, limits))
    return min(count, limits.max_frames)


def image_from_pixels(pixels: np.ndarray) -> DecodedImage:
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8 or 0 in pixels.shape:
        raise InvalidMedia("an image must be an array of uint8 [height, width, 3]")
    pixels = np.ascontiguousarray(pixels)
    digest = hashlib.sha256(repr(pixels.shape).encode())
    digest.update(pixels.data)
    return DecodedImage(pixels, digest.hexdigest())


def _pixels(image: Image.Image) -> np.ndarray:
    """uint8 [height, width, 3]"""
    from PIL import ImageOps

    upright = ImageOps.exif_transpose(image)
    return np.asarray(upright.convert("RGB"))


def _checked_count(image: Image.Image, limits: MediaLimits) -> int:
    count = int(getattr(image, "n_frames", 1))
    if count * image.width * image.height > limits.max_image_pixels * limits.max_images:
        raise InvalidMedia(f"a video has {count} frames of {image.width} x {image.height} pixels: too many")
    return count


def _open(data: bytes, declared: str, limits: MediaLimits, use: Callable[[Image.Image], T]) -> T:
    """Open the image, check the header, then call `use`. Any exception of Pillow refuses the image."""
    pillow = import_extra("PIL.Image", "images")
    try:
        with pillow.open(io.BytesIO(data), formats=list(FORMATS)) as image:
            _check_header(image, declared, limits)
            return use(image)
    except InvalidMedia:
        raise
    except pillow.UnidentifiedImageError:
        known = ", ".join(FORMATS)
        refusal = f"the data is not an image in a known format ({known}; videos as MP4, WebM, GIF)"
    except pillow.DecompressionBombError:  # Pillow's own limit, before `_check_header` can look
        refusal = f"an image has too many pixels; the limit is {limits.max_image_pixels:,} in all"
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error and others
        log.info("an image of %d bytes cannot be decoded: %r", len(data), error)
        refusal = "an image is damaged or cut short"
    raise InvalidMedia(refusal)


def _check_header(image: Image.Image, declared: str, limits: MediaLimits) -> None:
    width, height = image.size
    if width * height > limits.max_image_pixels:
        raise InvalidMedia(
            f"an image has {width} x {height} pixels; the limit is {limits.max_image_pixels:,} in all"
        )
    found = FORMATS[str(image.format)]
    declared = MEDIA_TYPE_ALIASES.get(declared, declared)
    is_animation = declared.startswith("video/") and image.format in ANIMATED_FORMATS
    if declared not in (*UNSPECIFIC_TYPES, found) and not is_animation:
        raise InvalidMedia(f"an image is declared as {declared[:60]!r} but contains {found}")
