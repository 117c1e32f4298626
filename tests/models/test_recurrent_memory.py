"""What a verify window of recurrent layers takes: eight rows, three drafts, layers as wide as Qwen3.5-27B's.

A state after every position would be 96 MiB a layer. A window stores deltas instead, of which a new
state is made at the commit, layer by layer.
"""

from __future__ import annotations

import gc

import mlx.core as mx
import pytest
from mlx_lm.models import qwen3_5

from outrider.models.trunk import Trunk
from outrider.plan import StepPlan
from outrider.request import SamplingParams
from outrider.step.runner import Runner
from plan_rows import plan_row

NUM_ROWS, DEPTH = 8, 3
MIB = 1 << 20
STATE_BYTES = NUM_ROWS * 48 * 128 * 128 * 4  # of one layer, all rows
WINDOW_STATE_BYTES = (1 + DEPTH) * STATE_BYTES
LAYERS_OF_27B = 48  # recurrent ones
GREEDY = SamplingParams(temperature=0)
NUM_TRIES = 4  # a host that runs far ahead of the device allocates more: the least of several steps counts

CONFIG = {
    "model_type": "qwen3_5_text",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_value_heads": 48,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}


def decoding_runner(num_layers: int) -> Runner:
    """Eight rows that have been fed their first token; three of four layers are recurrent."""
    config = {**CONFIG, "num_hidden_layers": num_layers}
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict({"model_type": "qwen3_5", "text_config": config}))
    mx.eval(model.parameters())
    runner = Runner(Trunk(model, 512))
    rows = tuple(plan_row([slot], params=GREEDY, slot=slot) for slot in range(NUM_ROWS))
    runner.run(StepPlan(NUM_ROWS, 64, (), (rows,)))
    return runner


def peak_of_a_step(runner: Runner, drafts: tuple[int, ...] = (2, 3, 4)) -> int:
    """Bytes that a step takes above what was held before it."""
    rows = tuple(plan_row([slot, 1], (), drafts, params=GREEDY, slot=slot) for slot in range(NUM_ROWS))
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    runner.run(StepPlan(NUM_ROWS, 64, (), (rows,)))
    return mx.get_peak_memory() - before


@pytest.fixture(scope="module")
def runner() -> Runner:
    """Three recurrent layers."""
    return decoding_runner(4)


@pytest.fixture(scope="module")
def deep() -> Runner:
    """Eighteen recurrent layers: one more commit under way at once is little for each of them."""
    return decoding_runner(24)


def test_nothing_of_a_verify_window_outlives_the_step(runner: Runner) -> None:
    peak_of_a_step(runner)
    gc.collect()  # what other tests left
    mx.synchronize()
    before = mx.get_active_memory()
    for _ in range(3):
        peak_of_a_step(runner)
    mx.synchronize()
    assert mx.get_active_memory() == before


def test_one_more_layer_takes_more_deltas_not_states(runner: Runner, deep: Runner) -> None:
    small = min(peak_of_a_step(runner) for _ in range(NUM_TRIES))
    # MLX has up to ten operations under way. From some eight layers on as many of them are commits as ever
    # will be.
    twelve, eighteen = (
        min(peak_of_a_step(more) for _ in range(NUM_TRIES)) for more in (decoding_runner(16), deep)
    )
    per_layer = (eighteen - twelve) / 6
    whole = eighteen + (LAYERS_OF_27B - 18) * per_layer
    print(
        f"peak of a step: {small / MIB:.0f} MiB with 3 recurrent layers, "
        f"{per_layer / MIB:.1f} for each more, "
        f"{whole / MIB:.0f} MiB with {LAYERS_OF_27B}; "
        f"a state a position: {LAYERS_OF_27B * WINDOW_STATE_BYTES / MIB:.0f} MiB"
    )
    assert per_layer < STATE_BYTES / 4
    assert small < 4 * STATE_BYTES
    assert whole < LAYERS_OF_27B * WINDOW_STATE_BYTES / 10


def test_new_states_are_not_made_side_by_side_where_all_is_kept(runner: Runner, deep: Runner) -> None:
    few, many = (min(peak_of_a_step(some, ()) for _ in range(NUM_TRIES)) for some in (runner, deep))
    assert few < 4 * STATE_BYTES
    assert (many - few) / 15 < STATE_BYTES / 4
