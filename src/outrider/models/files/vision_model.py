"""outrider-vision-135m: the default model and a vision encoder that ships with Outrider, joined on first use.

Owns the model's name, its folder in the cache and the joining. The text weights are the default model's own
file, linked and not copied. Three vocabulary ids that the default model never saw in training are renamed to
image marks. Must not know how the default model is fetched or how a model is run.
"""

import hashlib
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from outrider.models.files import default_model, origin
from outrider.models.files.default_download import SMOLLM2, Release
from outrider.models.files.folders import build_once, models_folder
from outrider.progress import Listener, ignore

NAME = "outrider-vision-135m"
OLD_NAMES: tuple[str, ...] = ("outrider-see-135m",)  # of earlier releases; accepted like NAME

# The files that ship with Outrider.
ENCODER_FOLDER = Path(__file__).parent / "data" / NAME
ENCODER_WEIGHTS = "vision.safetensors"
ENCODER_CONFIG = "config.json"
IMAGE_TOKENS = "tokens.json"
CHAT_TEMPLATE = "chat_template.jinja"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")

# The weight files of the joined model.
TEXT_FILE = "model-text.safetensors"
VISION_FILE = "model-vision.safetensors"

# Keys of the text model's config that the joined config repeats at its top level.
TOP_LEVEL_KEYS = (
    "bos_token_id",
    "pad_token_id",
    "eos_token_id",
    "torch_dtype",
    "vocab_size",
    "tie_word_embeddings",
)
EMBEDDING = "model.embed_tokens"


def folder() -> Path:
    return models_folder() / NAME


def ensure(progress: Listener = ignore, release: Release = SMOLLM2) -> Path:
    """Return the model's folder. Build the folder on first use and after an update of the vision encoder.

    Downloads the default model if needed. Raises ModelUnavailable if the default model cannot be had.
    """
    source = source_of(ENCODER_FOLDER)

    def build(work: Path) -> None:
        text_model = default_model.ensure(progress, release)
        _link(text_model / "model.safetensors", work / TEXT_FILE)
        shutil.copyfile(ENCODER_FOLDER / ENCODER_WEIGHTS, work / VISION_FILE)
        write_settings(text_model, ENCODER_FOLDER, work)
        seal(text_model, work, source)

    def is_usable(made: Path) -> bool:
        record = origin.read(made)
        return record is not None and record.source == source and origin.is_intact(made)

    for name in OLD_NAMES:  # rename the folder of an earlier release, so that the cache has one copy only
        with suppress(OSError):  # no such folder, or the new folder exists already
            os.rename(models_folder() / name, folder())
    made = build_once(folder(), build, is_usable)
    default_model.add_sampling(made)
    return made


def source_of(encoder: Path) -> str:
    """Describe what a joined folder is made from. Another encoder has another description."""
    digest = hashlib.sha256()
    for name in (ENCODER_WEIGHTS, ENCODER_CONFIG, IMAGE_TOKENS, CHAT_TEMPLATE, *PROCESSOR_FILES):
        digest.update(hashlib.sha256((encoder / name).read_bytes()).digest())
    return f"{default_model.NAME} and Outrider's vision encoder {digest.hexdigest()[:12]}"


def write_settings(text_model: Path, encoder: Path, folder: Path) -> None:
    """Write all files except the weights. `encoder` is the folder that ships with Outrider."""
    config = joined_config(_read_json(text_model / "config.json"), _read_json(encoder / ENCODER_CONFIG))
    _write_json(folder / "config.json", config)
    tokenizer = renamed_tokens(_read_json(text_model / "tokenizer.json"), _read_json(encoder / IMAGE_TOKENS))
    _write_json(folder / "tokenizer.json", tokenizer)
    settings = _read_json(text_model / "tokenizer_config.json")
    settings["chat_template"] = (encoder / CHAT_TEMPLATE).read_text()
    _write_json(folder / "tokenizer_config.json", settings)
    for name in ("generation_config.json", "LICENSE"):
        shutil.copyfile(text_model / name, folder / name)
    for name in (CHAT_TEMPLATE, *PROCESSOR_FILES):
        shutil.copyfile(encoder / name, folder / name)
    shutil.copyfile(encoder / "MODEL_CARD.md", folder / "README.md")


def seal(text_model: Path, folder: Path, source: str) -> None:
    """Write the origin. The MTP head is found by the checksum of the default model's file in the origin."""
    text_origin = origin.read(text_model)
    sha256 = text_origin.sha256 if text_origin is not None else None
    origin.write(folder, origin.Origin(NAME, source, default_model.LICENSE, sha256))


def joined_config(text: dict[str, Any], encoder: dict[str, Any]) -> dict[str, Any]:
    """Put the text model's config into the vision model's.

    An entry for the embedding's quantisation is repeated under the names that mlx-vlm uses.
    """
    text = dict(text)
    quantization = text.pop("quantization", None)
    joined = {**encoder, **{key: text[key] for key in TOP_LEVEL_KEYS if key in text}, "text_config": text}
    if quantization:
        joined["quantization"] = dict(quantization)
    if quantization and EMBEDDING in quantization:
        for name in ("language_model.embed_tokens", "language_model.lm_head"):
            joined["quantization"][name] = quantization[EMBEDDING]
    return joined


def renamed_tokens(tokenizer: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Return the content of tokenizer.json with some tokens renamed. `names`: old name to new name."""
    added = [
        {**token, "content": names.get(token["content"], token["content"])}
        for token in tokenizer["added_tokens"]
    ]
    vocabulary = {names.get(token, token): index for token, index in tokenizer["model"]["vocab"].items()}
    return {**tokenizer, "added_tokens": added, "model": {**tokenizer["model"], "vocab": vocabulary}}


def _link(file: Path, target: Path) -> None:
    """Hard-link the file, or copy it on a file system without hard links."""
    try:
        os.link(file, target)
    except OSError:
        shutil.copyfile(file, target)


def _read_json(file: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(file.read_text())
    return value


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
