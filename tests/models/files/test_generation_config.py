"""generation_config.json: the publisher's sampling values, and clear messages about bad ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.models.files.generation_config import FILE_NAME, InvalidGenerationConfig, sampling_defaults
from outrider.request import SamplingDefaults


def defaults_of(folder: Path, text: str) -> SamplingDefaults:
    (folder / FILE_NAME).write_text(text)
    return sampling_defaults(folder)


@pytest.mark.parametrize(
    ("config", "values"),
    [
        ({}, {}),
        ({"eos_token_id": [1, 2], "max_length": 99, "temperature": None}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0}, None),
        ({"temperature": 1, "repetition_penalty": 1.05}, None),
        ({"top_k": -1}, {"top_k": 0}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0, "top_p": 0.9}),
    ],
)
def test_values_are_taken_as_they_stand(
    tmp_path: Path, config: dict[str, Any], values: dict[str, Any] | None
) -> None:
    """`values` None: all of the config but do_sample."""
    if values is None:
        values = {name: value for name, value in config.items() if name != "do_sample"}
    assert defaults_of(tmp_path, json.dumps(config)).given == values


def test_a_model_without_the_file_has_no_defaults(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path).given == {}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"temperature": "0.6"}', "temperature must be a number from 0 to 100, not '0.6'"),
        ('{"temperature": NaN}', "temperature must be"),
        ('{"temperature": -1}', "temperature must be"),
        ('{"temperature": true}', "temperature must be"),
        ('{"top_p": 0}', "top_p must be above 0"),
        ('{"top_p": [0.9]}', "top_p must be above 0"),
        ('{"top_k": 2.5}', "top_k must be 0"),
        ('{"min_p": 2}', "min_p must be from 0 to 1"),
        ('{"repetition_penalty": 0}', "repetition_penalty must be from"),
        ('{"do_sample": "no"}', "do_sample must be true or false"),
    ],
)
def test_a_bad_value_is_named_with_its_file_and_the_way_out(
    tmp_path: Path, config: str, message: str
) -> None:
    with pytest.raises(InvalidGenerationConfig) as caught:
        defaults_of(tmp_path, config)
    for words in (str(tmp_path / FILE_NAME), message, "--generation-config none"):
        assert words in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[1]", '"x"', "[" * 100_000])
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidGenerationConfig, match="Correct or remove the file"):
        defaults_of(tmp_path, text)
