"""From bytes to pixels, with Pillow, on a worker thread.

The content decides what a picture is, within a few formats; what promises too much is not decoded.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from outrider.media.limits import InvalidMedia, MediaLimits
from outrider.media.video import read_frames, video_kind

if TYPE_CHECKING:
    from PIL import Image

T = TypeVar("T")

FORMATS = {
    "JPEG": "image/jpeg",
    "PNG": "image/png",
    "WEBP": "image/webp",
    "GIF": "image/gif",
    "BMP": "image/bmp",
}
ALIASES = {
    "image/jpg": "image/jpeg",
    "image/pjpeg": "image/jpeg",
    "image/apng": "image/png",
    "image/x-ms-bmp": "image/bmp",
}
UNSAID = ("", "image/*", "application/octet-stream", "binary/octet-stream")
ANIMATED = ("GIF", "WEBP", "PNG")


@dataclass(frozen=True, eq=False)
class DecodedImage:
    """Decoded, upright, RGB."""

    pixels: np.ndarray  # uint8 [height, width, 3]
    digest: str  # of the pixels and their size: equal pictures have equal digests, however they were sent

    @property
    def size(self) -> tuple[int, int]:
        """Width, height."""
        return self.pixels.shape[1], self.pixels.shape[0]


def decode_image(data: bytes, declared: str, limits: MediaLimits) -> DecodedImage:
    """`declared`: the media type that came with it, or nothing. Of an animation, the first frame."""
    return _guarded(data, declared, limits, _picture)


def decode_frames(data: bytes, declared: str, limits: MediaLimits) -> list[DecodedImage]:
    """A video or a moving picture as frames, evenly spread from the first to the last."""
    if video_kind(data) is not None:
        return [image_from_pixels(frame) for frame in read_frames(data, declared, limits)]

    def frames(image: Image.Image) -> list[DecodedImage]:
        count = int(getattr(image, "n_frames", 1))
        if count * image.width * image.height > limits.max_image_pixels * limits.max_images:
            raise InvalidMedia(
                f"a video has {count} frames of {image.width} x {image.height} pixels: too many"
            )
        chosen = np.linspace(0, count - 1, min(count, limits.max_frames)).round().astype(int).tolist()
        return [_picture(frame) for frame in _seek(image, chosen)]

    return _guarded(data, declared, limits, frames)


def image_from_pixels(pixels: np.ndarray) -> DecodedImage:
    """A picture from pixels that are decoded already."""
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8 or 0 in pixels.shape:
        raise InvalidMedia("a picture must be an array of bytes [height, width, 3]")
    pixels = np.ascontiguousarray(pixels)
    digest = hashlib.sha256(repr(pixels.shape).encode())
    digest.update(pixels.data)
    return DecodedImage(pixels, digest.hexdigest())


def _picture(image: Image.Image) -> DecodedImage:
    from PIL import ImageOps

    upright = ImageOps.exif_transpose(image)
    return image_from_pixels(np.asarray(upright.convert("RGB")))


def _seek(image: Image.Image, frames: list[int]) -> Iterator[Image.Image]:
    for number in frames:
        image.seek(number)
        yield image


def _guarded(data: bytes, declared: str, limits: MediaLimits, use: Callable[[Image.Image], T]) -> T:
    """Open, check what the header says, then decode; whatever Pillow raises is the picture's fault."""
    pillow = _pillow()
    try:
        with pillow.open(io.BytesIO(data), formats=list(FORMATS)) as image:
            _check_header(image, declared, limits)
            return use(image)
    except InvalidMedia:
        raise
    except pillow.UnidentifiedImageError:
        known = ", ".join(FORMATS)
        refusal = f"the data is no picture in a known format ({known}; videos as MP4, WebM, GIF)"
    except Exception as error:  # decoders raise what they like: OSError, SyntaxError, struct.error, ...
        refusal = f"a picture is damaged or cut short ({type(error).__name__}: {str(error)[:100]})"
    raise InvalidMedia(refusal)


def _check_header(image: Image.Image, declared: str, limits: MediaLimits) -> None:
    width, height = image.size
    if width * height > limits.max_image_pixels:
        raise InvalidMedia(
            f"a picture has {width} x {height} pixels; the most is {limits.max_image_pixels:,} in all"
        )
    found = FORMATS[str(image.format)]
    declared = ALIASES.get(declared, declared)
    if declared not in (*UNSAID, found) and not (declared.startswith("video/") and image.format in ANIMATED):
        raise InvalidMedia(f"a picture is declared as {declared[:60]!r} and holds {found}")


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise InvalidMedia("this server cannot read pictures: install outrider[vision]") from None
    return Image
