"""What pictures a client may send, and what it is told when one is refused. Pure."""

from __future__ import annotations

import os
from dataclasses import dataclass

from outrider.config import InvalidConfig
from outrider.request import InvalidRequest

MIB = 1 << 20


class InvalidMedia(InvalidRequest):
    """A picture that cannot be used; the message says which rule it breaks."""


@dataclass(frozen=True)
class MediaLimits:
    """The operator's rules. Every number bounds what one request can cost."""

    max_image_bytes: int = 20 * MIB  # as sent, after base64
    max_image_pixels: int = 32 * MIB  # width x height, decoded
    max_images: int = 16  # in one request; the frames of a video count
    max_frames: int = 8  # taken from one video
    fetch_timeout_s: float = 10.0  # for one answer of a server
    fetch_total_s: float = 30.0  # for all that a request fetches
    max_redirects: int = 3
    allow_private_urls: bool = False  # fetch from loopback, private and link-local addresses too
    local_folder: str | None = None  # file: URLs may name what lies in here

    def __post_init__(self) -> None:
        for name in ("max_image_bytes", "max_image_pixels", "max_images", "max_frames"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("fetch_timeout_s", "fetch_total_s"):
            if not getattr(self, name) > 0:
                raise InvalidConfig(f"{name} must be above 0, not {getattr(self, name)}")
        if self.local_folder is not None and not os.path.isdir(self.local_folder):
            raise InvalidConfig(f"{self.local_folder} is not a folder: media cannot be read from there")
