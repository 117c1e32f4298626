"""Images in bytes, for tests."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def noise(width: int = 12, height: int = 8, seed: int = 0) -> np.ndarray:
    """uint8 [height, width, 3]"""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def encoded(pixels: np.ndarray, format: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format, **options)
    return out.getvalue()


def animation(num_frames: int, format: str = "GIF", width: int = 10, height: int = 6) -> bytes:
    frames = [Image.fromarray(noise(width, height, seed)) for seed in range(num_frames)]
    out = io.BytesIO()
    frames[0].save(out, format, save_all=True, append_images=frames[1:], duration=50)
    return out.getvalue()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def png_bomb(side: int) -> bytes:
    """A few hundred bytes that announce side x side pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(1000)))
