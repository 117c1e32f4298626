"""Pictures, cached prefixes, resting heads, preemptions and failures at once: see media_histories."""

from __future__ import annotations

import os

import pytest

from step.media_histories import MediaHistory, MediaTally, MediaWorld

NUM_HISTORIES = {"qwen2_5_vl": 4, "qwen3_5": 4, "smolvlm": 3}  # sections of rope, recurrent layers, tiles
FIRST_SEED = int(os.environ.get("OUTRIDER_MEDIA_SEED", "0"))


@pytest.mark.parametrize("family", NUM_HISTORIES)
def test_whatever_happens_around_it_a_request_gives_what_it_gives_alone(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    world, tally = MediaWorld(tmp_path_factory.mktemp(family), family), MediaTally()
    for seed in range(FIRST_SEED, FIRST_SEED + NUM_HISTORIES[family]):
        try:
            tally.add(MediaHistory(world, seed).run())
        except Exception as error:
            error.add_note(f"To begin with it: OUTRIDER_MEDIA_SEED={seed} pytest {__file__} -k {family}")
            raise
    print(family, tally)
    assert tally.hit_cells > 50
    assert tally.caught_up > 0
    assert tally.encoded > 0
    assert tally.failed_steps > 0
