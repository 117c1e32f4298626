"""The options of `outrider serve` about adapters."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.adapters import adapters_folder, max_adapters, named_adapters
from outrider.cli.option_sources import resolve
from outrider.cli.serve_options import add_options
from outrider.config import InvalidConfig


def options(*flags: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return resolve(parser.parse_args(list(flags)), {})


def test_adapters_are_given_as_words_by_commas_or_again() -> None:
    flags = ("model", "--adapters", "sql=a/sql", "poem=b/poem", "--adapters", "c=d,e=f")
    expected = {"sql": "a/sql", "poem": "b/poem", "c": "d", "e": "f"}
    assert named_adapters(options(*flags)) == expected


def test_how_many_may_be_loaded(tmp_path: Path) -> None:
    assert max_adapters(options()) == 0
    assert max_adapters(options("--adapters", "a=b")) == 16
    assert max_adapters(options("--adapters-dir", str(tmp_path), "--max-adapters", "3")) == 3
    assert adapters_folder(options("--adapters-dir", str(tmp_path))) == tmp_path.resolve()
    assert adapters_folder(options()) is None


@pytest.mark.parametrize(
    ("check", "flags", "reason"),
    [
        (named_adapters, ("--adapters", "sql"), "NAME=DIR"),
        (named_adapters, ("--adapters", "=dir"), "NAME=DIR"),
        (named_adapters, ("--adapters", "a=b", "a=c"), "twice"),
        (named_adapters, ("--adapter", "x", "--adapters", "a=b"), "one or the others"),
        (named_adapters, ("--adapter", "x", "--adapters-dir", "a"), "one or the others"),
        (max_adapters, ("--max-adapters", "3"), "needs --adapters"),
        (max_adapters, ("--adapters", "a=b", "--max-adapters", "0"), "at least 1"),
        (adapters_folder, ("--adapters-dir", "/nowhere/at/all"), "no such folder"),
    ],
)
def test_bad_options_are_refused(check: Any, flags: tuple[str, ...], reason: str) -> None:
    with pytest.raises(InvalidConfig, match=reason):
        check(options(*flags))
