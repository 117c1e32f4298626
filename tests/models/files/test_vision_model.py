"""outrider-vision-135m: joined once from the default model and the vision encoder, and loaded by name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from test_default_model import CONTENT, delivering, failing, tiny

from drawn_images import questions_about_single_shapes
from outrider import LLM, SamplingParams
from outrider.cli.main import main
from outrider.cli.model_specs import model_name
from outrider.models.errors import ModelUnavailable
from outrider.models.files import default_model, origin, vision_model
from outrider.models.files.cached import find_cached
from outrider.models.files.generation_config import sampling_defaults
from outrider.models.files.shipped_head import shipped_head
from outrider.models.loader import find_folder

RELEASE = tiny(delivering(CONTENT))
NO_RELEASE = tiny(failing("must not be asked"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the shipped vision encoder that a test may change."""
    copy = Path(shutil.copytree(vision_model.ENCODER_FOLDER, tmp_path / "encoder"))
    monkeypatch.setattr(vision_model, "ENCODER_FOLDER", copy)
    return copy


def left_behind(cache: Path) -> list[str]:
    return sorted(entry.name for entry in (cache / "models").iterdir() if entry.suffix != ".lock")


def test_first_use_makes_the_default_model_too(cache: Path) -> None:
    folder = vision_model.ensure(release=RELEASE)
    assert folder == vision_model.folder() == cache / "models" / vision_model.NAME
    assert left_behind(cache) == [default_model.NAME, vision_model.NAME]
    assert origin.is_intact(folder)


def test_a_folder_of_an_earlier_version_gets_the_recommended_sampling(cache: Path) -> None:
    folder = vision_model.ensure(release=RELEASE)
    assert sampling_defaults(folder).temperature == default_model.SAMPLING["temperature"]
    (folder / "generation_config.json").write_text("{}")
    record = origin.read(folder)
    assert record is not None
    (folder / origin.FILE_NAME).unlink()
    origin.write(folder, record)
    vision_model.ensure(release=NO_RELEASE)
    assert sampling_defaults(folder).temperature == default_model.SAMPLING["temperature"]


def test_text_weights_are_the_default_models_file_and_outlive_it(cache: Path) -> None:
    text = vision_model.ensure(release=RELEASE) / vision_model.TEXT_FILE
    weights = default_model.folder() / "model.safetensors"
    assert text.samefile(weights)
    content = weights.read_bytes()
    shutil.rmtree(default_model.folder())
    assert vision_model.ensure(release=NO_RELEASE) == text.parent  # no download is needed
    assert text.read_bytes() == content


def test_a_disk_without_links_gets_a_copy(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    text = vision_model.ensure(release=RELEASE) / vision_model.TEXT_FILE
    weights = default_model.folder() / "model.safetensors"
    assert not text.samefile(weights)
    assert text.read_bytes() == weights.read_bytes()


@pytest.mark.parametrize("file", [vision_model.ENCODER_WEIGHTS, vision_model.CHAT_TEMPLATE])
def test_another_encoder_is_joined_anew(cache: Path, encoder: Path, file: str) -> None:
    folder = vision_model.ensure(release=RELEASE)
    before = (folder / "origin.json").read_text()
    data = bytearray((encoder / file).read_bytes())
    data[-1] ^= 1  # the size stays
    (encoder / file).write_bytes(data)
    vision_model.ensure(release=NO_RELEASE)
    assert (folder / "origin.json").read_text() != before
    target = {vision_model.ENCODER_WEIGHTS: vision_model.VISION_FILE}.get(file, file)
    assert (folder / target).read_bytes() == data


def test_a_damaged_folder_is_made_again_and_the_default_model_is_not_touched(cache: Path) -> None:
    folder = vision_model.ensure(release=RELEASE)
    (folder / vision_model.VISION_FILE).write_bytes(b"cut")
    (folder / vision_model.TEXT_FILE).unlink()
    vision_model.ensure(release=NO_RELEASE)
    assert origin.is_intact(folder)
    assert default_model.is_cached()


def test_without_the_default_model_nothing_half_made_is_left(cache: Path) -> None:
    with pytest.raises(ModelUnavailable, match="must not be asked"):
        vision_model.ensure(release=NO_RELEASE)
    assert left_behind(cache) == []


RACING = """
from test_default_model import CONTENT, delivering, tiny
from outrider.models.files import vision_model
print(vision_model.ensure(release=tiny(delivering(CONTENT))))
"""


def test_two_first_starts_at_once_both_work(cache: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", RACING]
    starts = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    assert [start.communicate()[0].strip() for start in starts] == [str(vision_model.folder())] * 2
    assert left_behind(cache) == [default_model.NAME, vision_model.NAME]


def test_three_ids_get_other_names_and_no_other_token_changes(default_model_folder: Path) -> None:
    names = json.loads((vision_model.ENCODER_FOLDER / vision_model.IMAGE_TOKENS).read_text())
    text, vision = (
        json.loads((folder / "tokenizer.json").read_text())
        for folder in (default_model_folder, vision_model.ensure())
    )
    before, after = (
        {number: token for token, number in one["model"]["vocab"].items()} for one in (text, vision)
    )
    changed = {before[number]: after[number] for number in before if before[number] != after[number]}
    assert len(before) == len(after)
    assert changed == names
    assert len(changed) == 3


def test_pull_and_list_by_name(default_model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "pull", "Outrider-Vision-135M"]) == 0
    assert str(vision_model.folder()) in capsys.readouterr().out
    assert main(["models", "--json"]) == 0
    listed = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    for name in (default_model.NAME, vision_model.NAME):
        assert listed[name]["intact"] is True
        assert listed[name]["head"] == str(shipped_head(default_model_folder))
    assert default_model.NAME in listed[vision_model.NAME]["source"]


@pytest.mark.parametrize("old_name", [*vision_model.OLD_NAMES, "Outrider-SEE-135m"])
def test_the_old_name_goes_on_working(
    default_model_folder: Path, old_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert find_folder(old_name) == vision_model.ensure() == vision_model.folder()
    assert model_name(old_name) == vision_model.NAME
    assert main(["models", "pull", old_name]) == 0
    assert str(vision_model.folder()) in capsys.readouterr().out


@pytest.mark.parametrize("is_intact", [True, False])
def test_a_folder_of_an_earlier_release_is_taken_over(cache: Path, is_intact: bool) -> None:
    """The earlier release made the folder under the old name, and described the encoder in other words."""
    made = vision_model.ensure(release=RELEASE)
    text_file = (made / vision_model.TEXT_FILE).stat().st_ino
    origin.write(
        made, replace(origin.read(made), source="SmolLM2-135M-Instruct and Outrider's eye 0123456789ab")
    )
    if not is_intact:
        (made / vision_model.VISION_FILE).unlink()
    made.rename(made.with_name(vision_model.OLD_NAMES[0]))
    assert vision_model.ensure(release=NO_RELEASE) == made
    assert left_behind(cache) == [default_model.NAME, vision_model.NAME]
    assert origin.is_intact(made)
    assert (made / vision_model.TEXT_FILE).stat().st_ino == text_file
    assert find_cached(vision_model.OLD_NAMES[0]).path == made


@pytest.mark.parametrize("model", [default_model, vision_model])
def test_names_are_found_in_any_case(default_model_folder: Path, model: object) -> None:
    name = model.NAME  # type: ignore[attr-defined]
    for spelling in (name, name.lower(), name.upper()):
        assert find_folder(spelling) == model.folder()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def vision_llm(default_model_folder: Path) -> Iterator[LLM]:
    with LLM("OUTRIDER-VISION-135m", max_rows=2) as llm:
        yield llm


def test_images_are_read_from_python_with_drafts_of_the_default_head(
    vision_llm: LLM, default_model_folder: Path
) -> None:
    assert vision_llm.engine.facts.head == str(shipped_head(default_model_folder))
    question = questions_about_single_shapes()[0]
    content = [{"type": "image", "image": question.url}, {"type": "text", "text": question.text}]
    params = SamplingParams(max_tokens=24, temperature=0, draft_depth=3)
    out = vision_llm.chat([{"role": "user", "content": content}], params)
    assert out.text.strip() == question.answer
    assert sum(out.stats.accepted) > 0


def test_text_is_answered_as_by_the_default_model(vision_llm: LLM, default_model_folder: Path) -> None:
    def answer(llm: LLM) -> list[list[int]]:
        params = SamplingParams(max_tokens=24, temperature=0)
        messages = [  # the vision model's own template adds this prompt
            {"role": "system", "content": default_model.SYSTEM_PROMPT},
            {"role": "user", "content": "What is the capital of France?"},
        ]
        outs = [llm.chat(messages, params), *llm.generate("Once upon a time", params)]
        return [out.prompt_token_ids + out.token_ids for out in outs]

    with LLM(default_model_folder, max_rows=2, drafter="none") as llm:
        assert answer(llm) == answer(vision_llm)
