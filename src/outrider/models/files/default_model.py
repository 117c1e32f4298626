"""SmolLM2-135M-Instruct, the model that is served when the user names none. Downloaded on first use.

Owns the model's name, its folder in the cache and the notes in the folder. Must not know how the file is
downloaded (default_download) or read (gguf), or how the model is run.
"""

import json
import logging
import shutil
from pathlib import Path

from outrider.files.atomic import write_text
from outrider.models.files import generation_config, origin
from outrider.models.files.default_download import SMOLLM2, Release, download
from outrider.models.files.folders import build_once, models_folder
from outrider.models.gguf import convert as gguf
from outrider.progress import Listener, Progress, ignore

log = logging.getLogger(__name__)

NAME = "SmolLM2-135M-Instruct"
OLD_NAMES: tuple[str, ...] = ()
LICENSE = "Apache-2.0"

# As the publisher's model card recommends: https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}

# The file's own template adds this prompt where a request has no system message. In 4 bits the model answers
# more questions right without it: docs/BENCHMARKS.md, "The default model's answers".
SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOKENIZER_CONFIG = "tokenizer_config.json"

LICENSE_NOTE = f"""{NAME} is the work of Hugging Face (HuggingFaceTB) and is licensed under the
Apache License, Version 2.0. The full text is at https://www.apache.org/licenses/LICENSE-2.0

The weights in this folder are a modified form of it: quantised to 4 bits by others (GGUF, Q4_1) and
rearranged by Outrider. They come without any warranty.
"""

README = """# {name}, converted by Outrider

A small instruction-following language model by Hugging Face, {license}:
https://huggingface.co/HuggingFaceTB/{name}

- Made from `{file}` (sha256 `{sha256}`), fetched from: {source}.
- The weights are those of the GGUF file, to the bit: 4-bit groups of 32, the embedding in 8 bits.
- `generation_config.json` has the sampling values that the publisher recommends.
- The chat template adds no system prompt of its own.
- This folder can be deleted at any time; Outrider fetches the model again when it is needed.
"""


def folder() -> Path:
    return models_folder() / NAME


def is_cached() -> bool:
    return origin.is_intact(folder())


def ensure(progress: Listener = ignore, release: Release = SMOLLM2) -> Path:
    """Return the model's folder. Download and convert the model on first use; later calls need no network.

    Raises ModelUnavailable if the model cannot be downloaded or stored. No partial folder is left then.
    """

    def build(work: Path) -> None:
        scratch = work.parent / "download"
        scratch.mkdir()
        fetched = download(release, scratch, progress)
        progress(Progress("Converting the default model", 0, release.num_bytes))
        gguf.convert(fetched.path, work)
        shutil.rmtree(scratch)
        file, source = release.file_name, fetched.source
        readme = README.format(name=NAME, license=LICENSE, file=file, sha256=release.sha256, source=source)
        (work / "README.md").write_text(readme)
        (work / "LICENSE").write_text(LICENSE_NOTE)
        generation_config.write(work, generation_config.read(work) | SAMPLING)
        drop_system_prompt(work)
        origin.write(work, origin.Origin(NAME, source, LICENSE, release.sha256))
        progress(Progress("Converting the default model", release.num_bytes, release.num_bytes))

    made = build_once(folder(), build, origin.is_intact)
    add_sampling(made)
    drop_system_prompt(made)
    return made


def add_sampling(made: Path) -> None:
    """Add the recommended sampling values to a folder without them, as earlier versions made it.

    Each of the two writes leaves a usable folder, so other processes may use the folder meanwhile.
    """
    config = generation_config.read(made)
    if "temperature" in config:
        return
    try:
        origin.forget_size(made, generation_config.FILE_NAME)
        generation_config.write(made, config | SAMPLING)
    except OSError as error:
        log.warning(
            "%s has no recommended sampling values and cannot be changed: %s. Start the server with "
            "--default-temperature %g --default-top-p %g to get them.",
            *(made / generation_config.FILE_NAME, error.strerror, SAMPLING["temperature"], SAMPLING["top_p"]),
        )


def drop_system_prompt(made: Path) -> None:
    """Replace the chat template of the file, which earlier versions kept. As above, in two writes."""
    file = made / TOKENIZER_CONFIG
    config = json.loads(file.read_text())
    if SYSTEM_PROMPT not in config.get("chat_template", ""):
        return
    try:
        origin.forget_size(made, TOKENIZER_CONFIG)
        write_text(file, json.dumps(config | {"chat_template": CHAT_TEMPLATE}, indent=2) + "\n")
    except OSError as error:
        log.warning(
            "the chat template in %s adds a system prompt with which the model answers worse, and cannot be "
            'changed: %s. Send a system message, for example an empty one ("content": "").',
            *(file, error.strerror),
        )
