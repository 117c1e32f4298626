"""Pictures, cached prefixes, resting heads, preemptions and failures at once: see media_histories."""

from __future__ import annotations

import os

import pytest

from outrider.cpu.extension import extension
from outrider.cpu.quantized import quantized_layers
from patience import case_only_in_soak, in_test_or_soak
from step.media_histories import MediaHistory, MediaTally, MediaWorld

NUM_HISTORIES = {  # in `make test`, in `make soak`
    "qwen2_5_vl": 4,  # sections of rope
    "qwen3_5": in_test_or_soak(2, 4),  # recurrent layers
    "smolvlm": in_test_or_soak(1, 3),  # tiles
    "qwen2_5_vl-4bit": in_test_or_soak(1, 4),
    "smolvlm-8bit": 3,
    "qwen3_vl_moe-mixed": in_test_or_soak(1, 4),  # experts; 4, 5, 6 and 8 bits
}
# Hits, catching up and failures in the first ones.
FIRST_SEED = {
    "qwen2_5_vl": 1,
    "qwen3_5": 2,
    "smolvlm": 1,
    "qwen2_5_vl-4bit": 1,
    "smolvlm-8bit": 1,
    "qwen3_vl_moe-mixed": 5,
}


@pytest.mark.soak
@pytest.mark.parametrize(
    "family",
    [
        case_only_in_soak("qwen2_5_vl"),
        "qwen3_5",
        "smolvlm",
        "qwen2_5_vl-4bit",
        case_only_in_soak("smolvlm-8bit"),
        "qwen3_vl_moe-mixed",
    ],
)
def test_whatever_happens_around_it_a_request_gives_what_it_gives_alone(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    world, tally = MediaWorld(tmp_path_factory.mktemp(family), family), MediaTally()
    if family.endswith("-mixed") and extension() is not None:
        assert {layer.bits for _, layer in quantized_layers(world.trunk.model)} == {4, 5, 6, 8}
    first_seed = int(os.environ.get("OUTRIDER_MEDIA_SEED", FIRST_SEED[family]))
    for seed in range(first_seed, first_seed + NUM_HISTORIES[family]):
        try:
            tally.add(MediaHistory(world, seed).run())
        except Exception as error:
            error.add_note(f"To begin with it: OUTRIDER_MEDIA_SEED={seed} pytest {__file__} -k {family}")
            raise
    print(family, tally)
    assert tally.hit_cells > 20
    assert tally.caught_up > 0
    assert tally.encoded > 0
    assert tally.failed_steps > 0
