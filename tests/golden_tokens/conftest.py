"""The option that records the golden answers anew."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record", action="store_true", help="store the golden answers instead of comparing them"
    )
