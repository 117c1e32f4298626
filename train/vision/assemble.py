"""Makes an ordinary vision model folder of the default model's folder and the eye.

    python train/vision/assemble.py MODEL_FOLDER EYE_FOLDER OUTPUT_FOLDER [--untied]

Owns how the two are joined. The text weights are the default model's, byte for byte, under the names that
smolvlm checkpoints give them; three ids of the vocabulary that the default model never met get the names of
picture marks. `--untied` adds the output matrix as a file of its own, for programs that do not tie it to the
embedding (mlx-vlm).
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

TEXT_FILE, EYE_FILE, OUTPUT_FILE = "model-text.safetensors", "model-vision.safetensors", "lm_head.safetensors"
COPIED = ("generation_config.json", "LICENSE")
COPIED_FROM_EYE = ("preprocessor_config.json", "processor_config.json", "chat_template.jinja")
TOP_LEVEL = (
    "bos_token_id",
    "pad_token_id",
    "eos_token_id",
    "torch_dtype",
    "vocab_size",
    "tie_word_embeddings",
)
EMBEDDING = "model.embed_tokens."
COPY_BYTES = 1 << 22


def assemble(model: Path, eye: Path, folder: Path, *, untied: bool = False) -> None:
    """`model`: the default model as `outrider models pull` leaves it. `eye`: what ships for this one."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = model / "model.safetensors"
    places = dict.fromkeys(rewrite(weights, folder / TEXT_FILE, text_name), TEXT_FILE)
    shutil.copyfile(eye / "vision.safetensors", folder / EYE_FILE)
    places |= dict.fromkeys(tensors(read_header(folder / EYE_FILE)[0]), EYE_FILE)
    if untied:
        places |= dict.fromkeys(rewrite(weights, folder / OUTPUT_FILE, output_name), OUTPUT_FILE)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})

    write_json(
        folder / "config.json",
        joined_config(read_json(model / "config.json"), read_json(eye / "config.json")),
    )
    names = read_json(eye / "tokens.json")
    write_json(folder / "tokenizer.json", renamed_tokens(read_json(model / "tokenizer.json"), names))
    settings = read_json(model / "tokenizer_config.json")
    settings["chat_template"] = (eye / "chat_template.jinja").read_text()
    write_json(folder / "tokenizer_config.json", settings)
    for file in (*(model / name for name in COPIED), *(eye / name for name in COPIED_FROM_EYE)):
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    seal(model, folder)


def text_name(name: str) -> str:
    return "model.text_model." + name.removeprefix("model.")


def output_name(name: str) -> str | None:
    return "lm_head." + name.removeprefix(EMBEDDING) if name.startswith(EMBEDDING) else None


def joined_config(text: dict[str, Any], eye: dict[str, Any]) -> dict[str, Any]:
    """Quantisation is told twice: under mlx-lm's name of the embedding and under mlx-vlm's."""
    text = dict(text)
    quantization = text.pop("quantization", None)
    joined = {**eye, **{key: text[key] for key in TOP_LEVEL if key in text}, "text_config": text}
    if quantization:
        embedding = quantization[EMBEDDING.rstrip(".")]
        aliases = ("language_model.embed_tokens", "language_model.lm_head")
        joined["quantization"] = quantization | dict.fromkeys(aliases, embedding)
    return joined


def renamed_tokens(tokenizer: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    for token in tokenizer["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {names.get(token, token): number for token, number in vocabulary.items()}
    return tokenizer


def seal(model: Path, folder: Path) -> None:
    """origin.json: whose weights these are, so that the default model's head is found, and all sizes."""
    origin = read_json(model / "origin.json")
    files = {
        path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != "origin.json"
    }
    write_json(folder / "origin.json", origin | {"name": "outrider-see-135m", "files": files})


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


def read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


def write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("eye", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--untied", action="store_true")
    options = parser.parse_args()
    assemble(options.model, options.eye, options.output, untied=options.untied)


if __name__ == "__main__":
    main()
