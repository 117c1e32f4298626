"""The order of the test files names files that exist."""

from pathlib import Path

from longest_files import LONGEST


def test_every_name_is_that_of_one_file() -> None:
    found = [file.stem for file in Path(__file__).parent.rglob("test_*.py")]
    assert [name for name in LONGEST if found.count(name) != 1] == []
    assert len(set(LONGEST)) == len(LONGEST)
