"""Videos in bytes, for tests."""

from __future__ import annotations

import tempfile
from pathlib import Path

import cv2
import numpy as np


def clip(num_frames: int, width: int = 64, height: int = 48, seed: int = 0) -> np.ndarray:
    """Frames in which coloured squares move.  uint8 [frames, height, width, 3]"""
    random = np.random.default_rng(seed)
    frames = np.full((num_frames, height, width, 3), random.integers(0, 256, 3), np.uint8)
    for _ in range(4):
        color, place, speed = random.integers(0, 256, 3), random.integers(0, 40, 2), random.integers(-3, 4, 2)
        for number in range(num_frames):
            y, x = (place + number * speed) % (max(1, height - 8), max(1, width - 8))
            frames[number, y : y + 8, x : x + 8] = color
    return frames


def encoded_video(frames: np.ndarray, fps: float = 10, suffix: str = ".mp4", codec: str = "mp4v") -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"video{suffix}"
        size = frames.shape[2], frames.shape[1]
        writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*codec), fps, size)
        assert writer.isOpened()
        for frame in frames:
            writer.write(np.ascontiguousarray(frame[..., ::-1]))
        writer.release()
        return path.read_bytes()
