"""OUTRIDER_KERNEL: what its values mean."""

from __future__ import annotations

import logging

import pytest

from outrider.cpu import kernel_switch
from outrider.cpu.kernel_switch import wanted_instructions
from outrider.cpu.library_cache import Unusable


@pytest.mark.parametrize(
    ("value", "wanted"), [("on", ""), ("ON", ""), ("avx2", "avx2"), ("AVX512amx", "avx512amx"), ("maybe", "")]
)
def test_it_names_instructions_or_none(value: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernel_switch.SWITCH, value)
    assert wanted_instructions() == wanted


def test_without_it_the_best_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernel_switch.SWITCH, raising=False)
    assert wanted_instructions() == ""


def test_off_is_an_exception_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernel_switch.SWITCH, "off")
    with pytest.raises(Unusable, match="OUTRIDER_KERNEL=off"):
        wanted_instructions()


def test_an_unknown_value_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(kernel_switch.SWITCH, "avx1024")
    with caplog.at_level(logging.WARNING, "outrider.cpu.blas"):
        wanted_instructions()
        wanted_instructions()
    (record,) = caplog.records
    assert record.getMessage().startswith("OUTRIDER_KERNEL='avx1024' is none of on, off, avx512amx,")
