"""A library whose operations are wrong is not used."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from outrider.cpu.extension_check import wrong_operations


def broken(native: ModuleType, name: str, change: Any) -> Any:
    right = getattr(native, name)
    names = ("quantized_matmul", "gather_quantized_matmul", "top_two", "sample", "write_cells", "recurrence")
    functions = {one: getattr(native, one) for one in names}
    return SimpleNamespace(**functions | {name: lambda *args: change(right(*args))})


def test_the_real_operations_are_right(native: ModuleType) -> None:
    assert wrong_operations(native) == []


@pytest.mark.parametrize(
    ("name", "change", "wrong"),
    [
        ("top_two", lambda found: (found[0] + 1, found[1]), "the best two scores"),
        ("top_two", lambda found: (found[0], found[1] * 1.1), "the best two scores"),
        ("sample", lambda found: (found[0] + 1, found[1]), "drawn tokens"),
        ("write_cells", lambda found: [found[0], found[1] * 1.1], "written cells"),
        ("recurrence", lambda found: [found[0] * 1.1, found[1]], "the delta rule"),
        ("recurrence", lambda found: [found[0], found[1] * 1.1], "the delta rule"),
        ("quantized_matmul", lambda found: found * 1.1, "products, 4 bits affine"),
        ("gather_quantized_matmul", lambda found: found * 1.1, "products, 8 bits mxfp8"),
    ],
)
def test_a_wrong_operation_is_named(native: ModuleType, name: str, change: Any, wrong: str) -> None:
    found = wrong_operations(broken(native, name, change))
    assert wrong in found
    assert ("quantized" in name) == any("products" in one for one in found)
