"""What the stored costs of a model depend on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.build_controller import fingerprint
from outrider.cpu import extension


def test_costs_measured_with_other_instructions_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: Any = SimpleNamespace(path=tmp_path, config={"model_type": "llama"})
    facts: Any = SimpleNamespace(
        device="cpu", dtype="float32", weight_bits=(), kv_bits=None, drafter="none", draft_model=None
    )

    def name_with(instructions: str | None) -> str:
        monkeypatch.setattr(extension, "instructions", lambda: instructions)
        return fingerprint(loaded, None, None, facts, 4, None, None)

    assert len({name_with(name) for name in ("avx512amx", "avx512vnni", None)}) == 3
    assert name_with("avx2") == name_with("avx2")
