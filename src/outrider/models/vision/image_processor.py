"""Image processing on the host, without MLX: an image's prompt text and the inputs of the vision encoder.

Runs on worker threads: `read` is called for many images at the same time and stores nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from outrider.media.image_reader import ProcessedImage, VideoReader
from outrider.media.images import DecodedImage
from outrider.media.limits import InvalidMedia
from outrider.models.vision.families import VisionFamily
from outrider.models.vision.video_processor import GridVideoReader
from outrider.prompt_media import MediaPiece, PromptMedia, TokenGrid, grid_positions

TILES_PER_PIECE = 4  # tiles of an image that are encoded between two steps; chosen by hand


class TileReader:
    """idefics3 and smolvlm: an image is cut into square tiles. A small copy of the whole image comes last."""

    def __init__(self, processor: Any, config: Mapping[str, Any], family: VisionFamily) -> None:
        vision = config["vision_config"]
        per_side = vision["image_size"] // vision["patch_size"] // config["scale_factor"]
        self.placeholder = str(getattr(processor, "image_token", family.placeholder))
        self.videos: VideoReader | None = None
        self._per_tile = per_side * per_side
        self._image_processor = processor.image_processor
        self._image_token_id = int(processor.image_token_id)
        self._around = str(processor.fake_image_token)
        self._global = str(getattr(processor, "global_image_token", None) or processor.global_image_tag)

    def read(self, image: DecodedImage) -> ProcessedImage:
        found = _processed(self._image_processor, [[_as_pil(image)]], return_row_col_info=True)
        pixels = np.asarray(found["pixel_values"], np.float32)  # [1, tiles, 3, side, side]
        mask = np.asarray(found["pixel_attention_mask"])  # [1, tiles, side, side]
        text = self._text(int(found["rows"][0][0]), int(found["cols"][0][0]))
        parts = []
        for first in range(0, pixels.shape[1], TILES_PER_PIECE):
            some = slice(first, first + TILES_PER_PIECE)
            inputs = {"pixel_values": pixels[:, some], "pixel_attention_mask": mask[:, some]}
            parts.append((inputs["pixel_values"].shape[1] * self._per_tile, inputs))
        return ProcessedImage(image.digest, text, tuple(parts))

    def place(self, prompt_ids: Sequence[int], images: Sequence[ProcessedImage]) -> PromptMedia:
        return PromptMedia(_pieces(prompt_ids, self._image_token_id, images))

    def _text(self, rows: int, columns: int) -> str:
        tile = self.placeholder * self._per_tile
        lines = [
            "".join(f"{self._around}<row_{row}_col_{column}>{tile}" for column in range(1, columns + 1))
            + "\n"
            for row in range(1, rows + 1)
        ]
        gap = "\n" if lines else ""
        return "".join(lines) + f"{gap}{self._around}{self._global}{tile}{self._around}"


class GridReader:
    """Qwen's families: an image keeps its shape and is cut into patches. A square of patches is one token."""

    def __init__(self, processor: Any, config: Mapping[str, Any], family: VisionFamily) -> None:
        self.placeholder = family.placeholder
        self._image_processor = processor.image_processor
        self._image_token_id = int(config.get("image_token_id", processor.image_token_id))
        self._merge = int(self._image_processor.merge_size)
        self._video_token_id = config.get("video_token_id", processor.video_token_id)
        self.videos: VideoReader | None = None
        if family.videos is not None and self._video_token_id is not None:
            self.videos = GridVideoReader(processor, config, family.videos)

    def read(self, image: DecodedImage) -> ProcessedImage:
        found = _processed(self._image_processor, [_as_pil(image)])
        patches = np.asarray(found["image_grid_thw"])[0]
        grid = TokenGrid(int(patches[1]) // self._merge, int(patches[2]) // self._merge)
        inputs = {
            "pixel_values": np.asarray(found["pixel_values"], np.float32),
            "image_grid_thw": np.asarray(found["image_grid_thw"], np.int32),
        }
        size = grid.num_tokens
        return ProcessedImage(image.digest, self.placeholder * size, ((size, inputs),), (grid,))

    def place(self, prompt_ids: Sequence[int], images: Sequence[ProcessedImage]) -> PromptMedia:
        pieces = _pieces(prompt_ids, self._image_token_id, images, self._video_token_id)
        token_ids = [id for id in (self._image_token_id, self._video_token_id) if id is not None]
        grids = [grid for image in images for grid in image.grids]
        return PromptMedia(pieces, *grid_positions(prompt_ids, token_ids, grids))


class SpanReader:
    """Gemma 4: an image keeps its shape and becomes one run of tokens, which may attend to each other."""

    def __init__(self, processor: Any, config: Mapping[str, Any], family: VisionFamily) -> None:
        self.placeholder = str(processor.image_token or family.placeholder)
        self.videos: VideoReader | None = None
        self._image_processor = processor.image_processor
        self._image_token_id = int(config.get("image_token_id", processor.image_token_id))
        self._begin, self._end = str(processor.boi_token), str(processor.eoi_token)
        text = config.get("text_config") or {}
        self._is_bidirectional = text.get("use_bidirectional_attention") == "vision"

    def read(self, image: DecodedImage) -> ProcessedImage:
        try:
            found, (size,) = self._image_processor([_as_pil(image)])
        except ValueError as error:
            raise _refused(error) from None
        inputs = {"pixel_values": np.asarray(found["pixel_values"], np.float32)}  # [1, 3, height, width]
        text = f"{self._begin}{self.placeholder * int(size)}{self._end}"
        return ProcessedImage(image.digest, text, ((int(size), inputs),))

    def place(self, prompt_ids: Sequence[int], images: Sequence[ProcessedImage]) -> PromptMedia:
        pieces = _pieces(prompt_ids, self._image_token_id, images)
        return PromptMedia(pieces, is_bidirectional=self._is_bidirectional)


class SquareReader:
    """Gemma 3: an image becomes a square of one size, and one run of tokens, which attend to each other."""

    def __init__(self, processor: Any, config: Mapping[str, Any], family: VisionFamily) -> None:
        self.placeholder = str(processor.boi_token or family.placeholder)
        self.videos: VideoReader | None = None
        self._image_processor = processor.image_processor
        self._image_token_id = int(processor.image_token_id)
        self._size = int(processor.image_seq_length)
        self._text = str(processor.full_image_sequence)

    def read(self, image: DecodedImage) -> ProcessedImage:
        found = _processed(self._image_processor, [_as_pil(image)], do_pan_and_scan=False)
        inputs = {
            "pixel_values": np.asarray(found["pixel_values"], np.float32),  # [1, 3, side, side]
            "mask": np.ones((1, self._size), np.int32),  # mlx-vlm's code asks for one
        }
        return ProcessedImage(image.digest, self._text, ((self._size, inputs),))

    def place(self, prompt_ids: Sequence[int], images: Sequence[ProcessedImage]) -> PromptMedia:
        pieces = _pieces(prompt_ids, self._image_token_id, images)
        return PromptMedia(pieces, is_bidirectional=True)


def _as_pil(image: DecodedImage) -> Any:
    from PIL import Image

    return Image.fromarray(image.pixels)


def _processed(image_processor: Any, images: Any, **options: Any) -> Any:
    try:
        return image_processor(images, return_tensors="np", **options)
    except ValueError as error:  # for example an image a hundred times as wide as high
        raise _refused(error) from None


def _refused(error: ValueError) -> InvalidMedia:
    return InvalidMedia(f"the model's processor refuses an image: {error}")


def _pieces(
    prompt_ids: Sequence[int],
    image_token_id: int,
    images: Sequence[ProcessedImage],
    video_token_id: int | None = None,
) -> tuple[MediaPiece, ...]:
    ids = np.asarray(prompt_ids)
    is_video = ids == (-1 if video_token_id is None else video_token_id)
    cells = np.flatnonzero((ids == image_token_id) | is_video).astype(np.int32)
    kinds = [image.is_video for image in images for size, _ in image.inputs for _ in range(size)]
    if is_video[cells].tolist() != kinds:
        raise InvalidMedia(
            f"the images need {len(kinds)} tokens and the prompt has {len(cells)} image tokens: the prompt "
            "text may contain the model's own placeholder for an image"
        )
    pieces, at = [], 0
    for image in images:
        for number, (size, inputs) in enumerate(image.inputs):
            pieces.append(MediaPiece(f"{image.digest}/{number}", inputs, cells[at : at + size]))
            at += size
    return tuple(pieces)
