"""`outrider` itself: without a command it says what to do next."""

from __future__ import annotations

import argparse
import re

import pytest

from outrider import __version__
from outrider.cli import main as cli
from outrider.models.files import default_model


def test_without_a_command_it_greets_and_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    text = capsys.readouterr().out
    assert f"Outrider {__version__}" in text
    assert default_model.NAME in text
    assert "http://127.0.0.1:8000/" in text


def test_commands_in_the_greeting_exist(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main([])
    named = set(re.findall(r"^ *outrider ([a-z]+)", capsys.readouterr().out, re.MULTILINE))
    (commands,) = (a for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction))
    assert {"serve", "chat", "bench"} == named
    assert named <= set(commands.choices)


def test_an_unknown_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["sing"])
    assert caught.value.code == 2
    assert "'serve'" in capsys.readouterr().err
