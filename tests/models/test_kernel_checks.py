"""The list of checks that serving and `outrider doctor` share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outrider import fallbacks, gpu_kernels
from outrider.models.kernel_checks import all_checks


@pytest.fixture(autouse=True)
def no_fallbacks() -> Iterator[None]:
    fallbacks.clear()
    yield
    fallbacks.clear()


def test_names_differ_and_only_cpu_code_is_checked_on_a_cpu() -> None:
    checks = all_checks()
    assert len({check.name for check in checks}) == len(checks)
    assert {check.name for check in checks if check.applies()} <= {"BLAS", "own matmul", "native extension"}


@pytest.mark.parametrize(
    "name", ["delta-rule", "delta-layer", "quantised-matmul", "cell-writing", "masked-attention"]
)
def test_a_kernel_that_is_off_is_found_under_the_name_of_its_check(name: str) -> None:
    (*_, check) = (one for one in all_checks() if one.name.startswith(f"{name} kernels"))
    assert check.fallback() is None
    assert not gpu_kernels.is_close(lambda: float("nan"), name, 0.1)
    fallback = check.fallback()
    assert fallback is not None
    assert fallback.reason == "they are off by nan"
    assert fallback.instead == "slower MLX operations"


def test_a_kernel_that_cannot_be_built_says_why() -> None:
    def broken() -> float:
        raise RuntimeError("no such instruction")

    assert not gpu_kernels.is_close(broken, "delta-rule", 0.1)
    assert [one.reason for one in fallbacks.noted()] == ["they cannot be built: no such instruction"]
