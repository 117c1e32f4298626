"""Makes a smolvlm checkpoint for other programs from the default model's folder and a vision encoder.

    python recipes/vision/assemble.py MODEL_FOLDER ENCODER_FOLDER OUTPUT_FOLDER [--untied]

Owns the names of the weights: the text weights are the default model's, byte for byte, under the names that
smolvlm checkpoints give them. `outrider.models.files.vision_model` writes the other files. `--untied` adds
the output matrix as a file of its own, for programs that do not tie the matrix to the embedding (mlx-vlm).
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outrider.models.files.vision_model import (
    EMBEDDING,
    ENCODER_WEIGHTS,
    TEXT_FILE,
    VISION_FILE,
    seal,
    source_of,
    write_settings,
)

OUTPUT_FILE = "lm_head.safetensors"
COPY_BYTES = 1 << 22


def assemble(model: Path, encoder: Path, folder: Path, *, untied: bool = False) -> None:
    """`model`: the default model as `outrider models pull` leaves it. `encoder`: the folder that ships."""
    folder.mkdir(parents=True)
    weights = model / "model.safetensors"
    places = dict.fromkeys(rewrite(weights, folder / TEXT_FILE, text_name), TEXT_FILE)
    shutil.copyfile(encoder / ENCODER_WEIGHTS, folder / VISION_FILE)
    places |= dict.fromkeys(tensors(read_header(folder / VISION_FILE)[0]), VISION_FILE)
    if untied:
        places |= dict.fromkeys(rewrite(weights, folder / OUTPUT_FILE, output_name), OUTPUT_FILE)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    write_settings(model, encoder, folder)
    seal(model, folder, source_of(encoder))


def text_name(name: str) -> str:
    return "model.text_model." + name.removeprefix("model.")


def output_name(name: str) -> str | None:
    start = f"{EMBEDDING}."
    return "lm_head." + name.removeprefix(start) if name.startswith(start) else None


def rewrite(source: Path, target: Path, rename: Callable[[str], str | None]) -> list[str]:
    """Copies the tensors that `rename` gives a name; returns the names."""
    header, start = read_header(source)
    kept, spans, end = {"__metadata__": {"format": "mlx"}}, [], 0
    for name, entry in sorted(tensors(header).items(), key=lambda item: item[1]["data_offsets"][0]):
        if (new := rename(name)) is not None:
            first, last = entry["data_offsets"]
            kept[new] = {**entry, "data_offsets": [end, end + last - first]}
            spans.append((first, last))
            end += last - first
    encoded = json.dumps(kept, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with source.open("rb") as data, target.open("wb") as out:
        out.write(struct.pack("<Q", len(encoded)) + encoded)
        for first, last in spans:
            data.seek(start + first)
            while first < last:
                out.write(block := data.read(min(COPY_BYTES, last - first)))
                first += len(block)
    return list(tensors(kept))


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where its data begins."""
    with file.open("rb") as data:
        (length,) = struct.unpack("<Q", data.read(8))
        return json.loads(data.read(length)), 8 + length


def tensors(header: dict[str, Any]) -> dict[str, Any]:
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("encoder", type=Path)
    parser.add_argument("output", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--untied", action="store_true")
    options = parser.parse_args()
    assemble(options.model, options.encoder, options.output, untied=options.untied)


if __name__ == "__main__":
    main()
