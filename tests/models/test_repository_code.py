"""No code from a model's folder runs: what a repository says is data, and its chat template is sandboxed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.chat.conversation import Message, TextPart
from outrider.chat.special_tokens import Vocabulary
from outrider.chat.template import ChatTemplate
from outrider.models.loader import ModelLoadError, load
from outrider.request import InvalidRequest
from tiny_models import write_checkpoint, write_tokenizer

CODE = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import PreTrainedTokenizerFast
class Evil(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that exists as soon as the code has run. Whoever is asked for permission says yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    return tmp_path / "the code ran"


def write_model(folder: Path, marker: Path, **tokenizer: Any) -> Path:
    write_checkpoint(folder, "llama")
    (folder / "evil.py").write_text(CODE.format(marker=str(marker)))
    write_tokenizer(folder, **tokenizer)
    return folder


def test_a_model_file_is_not_run(tmp_path: Path, marker: Path) -> None:
    folder = write_model(tmp_path / "model", marker)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_file": "evil.py"}))
    with pytest.raises(ModelLoadError, match="custom module"):
        load(folder)
    assert not marker.exists()


def test_the_code_of_a_tokenizer_is_not_run_and_nobody_is_asked(tmp_path: Path, marker: Path) -> None:
    auto_map = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    folder = write_model(tmp_path / "model", marker, tokenizer_class="Evil", auto_map=auto_map)
    with pytest.raises(ModelLoadError, match="tokenizer"):
        load(folder)
    assert not marker.exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(messages[0]) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
    ],
)
def test_a_chat_template_reaches_nothing_but_its_messages(tmp_path: Path, template: str) -> None:
    write_checkpoint(tmp_path, "llama")
    write_tokenizer(tmp_path, template=template)
    tokenizer = load(tmp_path).tokenizer
    with pytest.raises(InvalidRequest, match="template rejects"):
        ChatTemplate(tokenizer, Vocabulary(tokenizer)).render([Message("user", (TextPart("Hi"),))])


def test_weights_are_safetensors_and_nothing_that_unpickles(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    (tmp_path / "model.safetensors").rename(tmp_path / "model.bin")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelLoadError, match=r"no weights \(model\*.safetensors\)"):
        load(tmp_path)
