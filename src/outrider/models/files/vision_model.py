"""outrider-see-135m: the default model with an eye that comes with Outrider, joined on first use.

Owns its name, its place in the cache and how the two become one folder. The text weights are the default
model's very file, linked and not copied; three ids of the vocabulary that it never met get the names of
picture marks. Must not know how the default model is fetched, nor how a model is run.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from outrider.models.files import default_model, origin
from outrider.models.files.default_download import SMOLLM2, Release
from outrider.models.files.folders import build_once, models_folder
from outrider.progress import Listener, ignore

NAME = "outrider-see-135m"
EYE = Path(__file__).parent / "data" / NAME
EYE_WEIGHTS, EYE_CONFIG, EYE_TOKENS, CHAT_TEMPLATE = (
    "vision.safetensors",
    "config.json",
    "tokens.json",
    "chat_template.jinja",
)
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
TEXT_FILE, EYE_FILE = "model-text.safetensors", "model-vision.safetensors"
TOP_LEVEL = (
    "bos_token_id",
    "pad_token_id",
    "eos_token_id",
    "torch_dtype",
    "vocab_size",
    "tie_word_embeddings",
)
EMBEDDING = "model.embed_tokens"


def folder() -> Path:
    """Where the model is, or will be."""
    return models_folder() / NAME


def ensure(progress: Listener = ignore, release: Release = SMOLLM2) -> Path:
    """The model's folder; made on first use, and again when another eye comes with Outrider.

    Fetches the default model if need be. Raises ModelUnavailable when that cannot be had.
    """
    source = source_of(EYE)

    def build(work: Path) -> None:
        model = default_model.ensure(progress, release)
        _link(model / "model.safetensors", work / TEXT_FILE)
        shutil.copyfile(EYE / EYE_WEIGHTS, work / EYE_FILE)
        write_settings(model, EYE, work)
        seal(model, work, source)

    def is_usable(made: Path) -> bool:
        record = origin.read(made)
        return record is not None and record.source == source and origin.is_intact(made)

    return build_once(folder(), build, is_usable)


def source_of(eye: Path) -> str:
    """In words: of what a folder is made. Two eyes never share them."""
    digest = hashlib.sha256()
    for name in (EYE_WEIGHTS, EYE_CONFIG, EYE_TOKENS, CHAT_TEMPLATE, *PROCESSOR_FILES):
        digest.update(hashlib.sha256((eye / name).read_bytes()).digest())
    return f"{default_model.NAME} and Outrider's eye {digest.hexdigest()[:12]}"


def write_settings(model: Path, eye: Path, folder: Path) -> None:
    """All files but the weights. `model`: the default model's folder; `eye`: what comes with Outrider."""
    config = joined_config(_read_json(model / "config.json"), _read_json(eye / EYE_CONFIG))
    _write_json(folder / "config.json", config)
    tokenizer = renamed_tokens(_read_json(model / "tokenizer.json"), _read_json(eye / EYE_TOKENS))
    _write_json(folder / "tokenizer.json", tokenizer)
    settings = _read_json(model / "tokenizer_config.json")
    settings["chat_template"] = (eye / CHAT_TEMPLATE).read_text()
    _write_json(folder / "tokenizer_config.json", settings)
    for file in (model / "generation_config.json", model / "LICENSE"):
        shutil.copyfile(file, folder / file.name)
    for name in (CHAT_TEMPLATE, *PROCESSOR_FILES):
        shutil.copyfile(eye / name, folder / name)
    shutil.copyfile(eye / "MODEL_CARD.md", folder / "README.md")


def seal(model: Path, folder: Path, source: str) -> None:
    """Its origin names the default model's file, by which the default model's head is found."""
    made_from = origin.read(model)
    sha256 = made_from.sha256 if made_from is not None else None
    origin.write(folder, origin.Origin(NAME, source, default_model.LICENSE, sha256))


def joined_config(text: dict[str, Any], eye: dict[str, Any]) -> dict[str, Any]:
    """An embedding quantised in its own way is told twice: under mlx-lm's name and under mlx-vlm's."""
    text = dict(text)
    quantization = text.pop("quantization", None)
    joined = {**eye, **{key: text[key] for key in TOP_LEVEL if key in text}, "text_config": text}
    if quantization:
        joined["quantization"] = dict(quantization)
    if quantization and EMBEDDING in quantization:
        for name in ("language_model.embed_tokens", "language_model.lm_head"):
            joined["quantization"][name] = quantization[EMBEDDING]
    return joined


def renamed_tokens(tokenizer: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """A tokenizer in which some tokens go by other names."""
    added = [
        {**token, "content": names.get(token["content"], token["content"])}
        for token in tokenizer["added_tokens"]
    ]
    vocabulary = {names.get(token, token): number for token, number in tokenizer["model"]["vocab"].items()}
    return {**tokenizer, "added_tokens": added, "model": {**tokenizer["model"], "vocab": vocabulary}}


def _link(file: Path, target: Path) -> None:
    """One file under two names, or a copy where the disk knows no links."""
    try:
        os.link(file, target)
    except OSError:
        shutil.copyfile(file, target)


def _read_json(file: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(file.read_text())
    return value


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
