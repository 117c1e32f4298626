"""With a prefix cache every answer is what it is without one: see prefix_sessions."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from patience import in_test_or_soak
from step.histories import world
from step.prefix_sessions import SessionTally, play_session

NUM_SESSIONS = {  # in `make test`, in `make soak`
    "llama": in_test_or_soak(4, 24),  # attention
    "gemma3_text": in_test_or_soak(1, 6),  # sliding windows
    "gpt_oss": in_test_or_soak(1, 4),
    "deepseek_v3": in_test_or_soak(1, 6),  # latent attention
    "qwen3_5": in_test_or_soak(2, 10),  # recurrent layers
    "qwen3_next": in_test_or_soak(1, 4),
    "qwen3-mixed": in_test_or_soak(1, 8),
    "qwen3_5-4bit kv16": in_test_or_soak(1, 4),
    "gpt_oss-mxfp4": in_test_or_soak(1, 4),
    "deepseek_v3-4bit": in_test_or_soak(1, 4),
    "llama-4bit kv16": in_test_or_soak(1, 10),  # bfloat16 keys and values
    "llama-4bit kv8": in_test_or_soak(1, 10),  # quantised ones
    "qwen3_5-4bit kv4": in_test_or_soak(1, 6),
    "llama drafted by llama": in_test_or_soak(1, 12),  # a draft model
    "llama drafted by qwen3_5": in_test_or_soak(1, 6),
}


def _play(family: str, seed: int, folder: Path) -> SessionTally:
    try:
        return play_session(world(family), seed, folder)
    except Exception as error:
        error.add_note(f"To play it again: OUTRIDER_SESSION={family}:{seed} pytest -s tests/step -k session")
        raise


@pytest.mark.soak
@pytest.mark.parametrize("family", NUM_SESSIONS)
def test_a_cached_prefix_never_changes_an_answer(family: str, tmp_path: Path) -> None:
    tally = SessionTally()
    for seed in range(NUM_SESSIONS[family]):
        tally.add(_play(family, seed, tmp_path / str(seed)))
    print(family, tally.summary())
    assert tally.played.excused <= world(family).tolerance.excused * tally.played.tokens
    assert tally.hit_cells > 10 * NUM_SESSIONS[family], "nothing counts unless the cache was used"
    assert tally.evictions > 0
    assert tally.restarts >= NUM_SESSIONS[family]
    assert tally.disk_reads > 0
    if family == "llama":
        assert tally.refused > 0
        assert tally.played.cells > 0


@pytest.mark.skipif(
    "OUTRIDER_SESSION" not in os.environ, reason="plays one session again: OUTRIDER_SESSION=llama:0"
)
def test_one_session_again(tmp_path: Path) -> None:
    family, _, seed = os.environ["OUTRIDER_SESSION"].partition(":")
    print(_play(family, int(seed), tmp_path))


@pytest.mark.soak
def test_sessions_for_as_long_as_asked(tmp_path: Path) -> None:
    seconds = float(os.environ.get("OUTRIDER_SOAK_SECONDS", "0"))
    if not seconds:
        pytest.skip("set OUTRIDER_SOAK_SECONDS")
    end, seed, tally = time.monotonic() + seconds, 100_000, SessionTally()
    while time.monotonic() < end:
        for family in NUM_SESSIONS:
            tally.add(_play(family, seed, tmp_path / f"{family}-{seed}"))
        seed += 1
    print(tally)
