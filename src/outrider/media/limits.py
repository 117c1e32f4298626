"""Limits for images and videos of clients, and the error for refused ones. Pure."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from outrider.config import InvalidConfig
from outrider.request import InvalidRequest

MIB = 1 << 20


class InvalidMedia(InvalidRequest):
    """An image or video that cannot be used. The message names the rule it breaks."""


def import_extra(module: str, kind: str) -> Any:
    """A module of outrider[vision]. `kind`: what the module decodes."""
    try:
        return import_module(module)
    except ImportError:
        raise InvalidMedia(f"this server cannot read {kind}: install outrider[vision]") from None


@dataclass(frozen=True)
class MediaLimits:
    """The operator's limits. Each number bounds the cost of one request. Defaults chosen by hand."""

    max_image_bytes: int = 20 * MIB  # encoded image, after base64 decoding
    max_image_pixels: int = 32 * MIB  # width x height, decoded
    max_images: int = 16  # in one request; each frame of a video that is read as images counts
    max_frames: int = 8  # sampled from one video that is read as images
    max_video_frames: int = 128  # of all videos of one request that are read as videos
    fetch_timeout_s: float = 10.0  # for one answer of a web server
    fetch_total_s: float = 30.0  # for all downloads of one request
    max_redirects: int = 3
    allow_private_urls: bool = False  # fetch from loopback, private and link-local addresses too
    local_folder: str | None = None  # file: URLs may name files in this folder

    def __post_init__(self) -> None:
        for name in ("max_image_bytes", "max_image_pixels", "max_images", "max_frames", "max_video_frames"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("fetch_timeout_s", "fetch_total_s"):
            if not getattr(self, name) > 0:
                raise InvalidConfig(f"{name} must be above 0, not {getattr(self, name)}")
        if self.local_folder is not None and not os.path.isdir(self.local_folder):
            raise InvalidConfig(f"{self.local_folder} is not a folder: local media cannot be read")
