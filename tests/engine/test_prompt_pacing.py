"""Prompts beside decoding rows: chunks, stalls and shares of the time, on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from scheduler_harness import Harness, rows_of

from outrider.config import EngineConfig
from outrider.engine.prompt_pacing import MIN_CHUNK, PromptPacing, chunk_sizes
from outrider.engine.sequence import Sequence
from outrider.plan import MANY_TOKENS, StepPlan
from outrider.speculate.controller import DepthController
from outrider.speculate.costs import CostTable, MeasuredCosts
from outrider.speculate.prompt_costs import MeasuredPromptCosts, PromptCosts

STALL_S = 0.2
DECODE_S = 0.02


class Machine:
    """A decode pass takes DECODE_S; a prompt pass takes `prompt_s(tokens, pairs)`, by the truth."""

    def __init__(self, token_s: float = 0.004, pair_s: float = 0.0, pass_s: float = 0.01) -> None:
        self.token_s, self.pair_s, self.overhead_s = token_s, pair_s, pass_s
        self.chunks: list[int] = []  # tokens of each step that prefilled
        self.steps_s: list[float] = []

    def seconds_of(self, plan: StepPlan) -> float:
        decode_s = prompt_s = 0.0
        for batch in plan.batches:
            tokens = sum(row.num_fed for row in batch)
            if all(row.start >= row.num_prompt for row in batch):
                decode_s += DECODE_S
            else:
                self.chunks.append(tokens)
                pairs = sum(row.num_fed * row.start for row in batch)
                prompt_s += self.overhead_s + tokens * self.token_s + pairs * self.pair_s
        self.steps_s.append(decode_s + prompt_s)
        return decode_s + prompt_s


def measured(
    machine: Machine, wrong_by: float = 1.0, sizes: tuple[int, ...] = (16, 64, 256)
) -> DepthController:
    pass_s = {size: (machine.overhead_s + size * machine.token_s) / wrong_by for size in sizes}
    decode = MeasuredCosts({(1, 1): DECODE_S, (1, 9): DECODE_S, (64, 1): DECODE_S, (64, 9): DECODE_S}, {})
    return DepthController(CostTable(decode), prompts=MeasuredPromptCosts(pass_s, machine.pair_s / wrong_by))


def serving(machine: Machine, controller: DepthController | None = None, **config: int) -> Harness:
    settings = EngineConfig(max_rows=64, **config)
    harness = Harness(
        max_rows=64,
        prefill_step_size=1 << 20,
        controller=controller or measured(machine),
        seconds_of=machine.seconds_of,
        config=settings,
    )
    return harness


def chats(harness: Harness, num: int) -> list[Sequence]:
    rows = [harness.add(5, max_tokens=100_000) for _ in range(num)]
    harness.run_until(lambda: all(row.is_decoding for row in rows))
    return rows


def pace_beside(harness: Harness, machine: Machine, chat: Sequence, prompts: list[Sequence]) -> float:
    """The chat's pace until the prompts are computed, as a share of its pace alone."""
    before, since_s = chat.num_generated, harness.now_s
    machine.steps_s.clear()
    harness.run_until(lambda: all(row.is_decoding for row in prompts), 100_000)
    return (chat.num_generated - before) * DECODE_S / (harness.now_s - since_s)


@pytest.mark.parametrize("num_chats", [1, 7])
@pytest.mark.parametrize("pair_s", [0.0, 4e-7])
def test_chats_beside_a_long_prompt_keep_half_of_their_pace(num_chats: int, pair_s: float) -> None:
    machine = Machine(pair_s=pair_s)
    harness = serving(machine)
    chat = chats(harness, num_chats)[0]
    pace = pace_beside(harness, machine, chat, [harness.add(7400, max_tokens=2)])
    assert 0.5 <= pace < 0.6
    assert max(machine.steps_s) <= STALL_S


@pytest.mark.parametrize("wrong_by", [0.3, 3.0])
def test_pace_and_gaps_follow_what_is_really_measured(wrong_by: float) -> None:
    """The calibration is wrong, and its cost of cells too."""
    machine = Machine(pair_s=4e-7)
    harness = serving(machine, measured(machine, wrong_by))
    chat = chats(harness, 1)[0]
    prompt = harness.add(7400, max_tokens=2)
    pace_beside(harness, machine, chat, [harness.add(600, max_tokens=2)])  # the first chunks are lessons
    assert pace_beside(harness, machine, chat, [prompt]) > 0.45
    late = machine.steps_s[len(machine.steps_s) // 4 :]
    assert sum(seconds > 1.1 * STALL_S for seconds in late) <= 0.02 * len(late)


def test_a_prompt_beside_chats_gets_about_half_of_the_time() -> None:
    machine = Machine()
    harness = serving(machine)
    chats(harness, 4)
    prompt, since_s = harness.add(7400, max_tokens=2), harness.now_s
    harness.run_until(lambda: prompt.is_decoding, 10_000)
    alone_s = 7400 * machine.token_s
    assert harness.now_s - since_s < 2.6 * alone_s


def test_rows_share_the_time_when_more_prompts_wait_than_rows_decode() -> None:
    machine = Machine()
    harness = serving(machine)
    chat = chats(harness, 1)[0]
    prompts = [harness.add(3000, max_tokens=2) for _ in range(3)]
    assert 0.2 < pace_beside(harness, machine, chat, prompts) < 0.35
    assert max(machine.steps_s) <= STALL_S


def test_a_prompt_alone_gets_the_chunk_that_costs_least() -> None:
    machine = Machine(token_s=1e-5)
    harness = serving(machine, measured(machine, sizes=(16, 64, 256, 1024, 2048)))
    prompt = harness.add(7000, max_tokens=1)
    harness.run_until(lambda: prompt.id not in harness.live)
    assert machine.chunks == [2048, 2048, 2048, 856]


def test_a_prompt_alone_keeps_newcomers_waiting_for_a_first_chunk_at_most() -> None:
    machine = Machine(pair_s=4e-7)
    harness = serving(machine)
    prompt = harness.add(7400, max_tokens=1)
    harness.run_until(lambda: prompt.id not in harness.live)
    assert machine.chunks[0] == 64  # 256 are hardly better
    assert set(machine.chunks[-10:-1]) == {32}  # never less than half
    assert max(machine.steps_s) <= machine.overhead_s + 64 * machine.token_s


def test_the_operators_chunk_is_taken_as_it_is() -> None:
    machine = Machine()
    harness = serving(machine, prefill_step_size=1000)
    prompt = harness.add(3000, max_tokens=1)
    harness.run_until(lambda: prompt.id not in harness.live)
    assert machine.chunks == [1000, 1000, 1000]


def test_without_a_stall_limit_prompts_run_at_full_speed() -> None:
    machine = Machine()
    harness = serving(machine, max_stall_ms=0, prefill_step_size=512)
    chats(harness, 1)
    machine.chunks.clear()
    prompt = harness.add(2048, max_tokens=2)
    assert harness.run_until(lambda: prompt.is_decoding) == 4
    assert machine.chunks == [512] * 4


def test_a_decode_pass_longer_than_the_limit_still_lets_prompts_go_on() -> None:
    machine = Machine()
    slow = MeasuredCosts({(1, 1): 0.5, (1, 9): 0.5}, {})
    pass_s = {size: machine.overhead_s + size * machine.token_s for size in (16, 64)}
    controller = DepthController(CostTable(slow), prompts=MeasuredPromptCosts(pass_s))

    def seconds_of(plan: StepPlan) -> float:
        return machine.seconds_of(plan) + 0.5 - DECODE_S

    harness = serving(machine, controller)
    harness._seconds_of = seconds_of
    chats(harness, 1)
    machine.chunks.clear()
    prompt = harness.add(64, max_tokens=2)
    assert harness.run_until(lambda: prompt.is_decoding, 20) <= 8
    assert min(machine.chunks) >= MIN_CHUNK or len(machine.chunks) == 1


def test_time_that_no_prompt_needed_is_not_saved_up() -> None:
    machine = Machine()
    harness = serving(machine)
    chat = chats(harness, 1)[0]
    harness.steps(500)
    assert 0.5 <= pace_beside(harness, machine, chat, [harness.add(2000, max_tokens=2)]) < 0.6


def test_one_pass_that_took_very_long_is_not_paid_back_for_as_long() -> None:
    machine = Machine()
    harness = serving(machine)
    chats(harness, 1)
    usual, harness._seconds_of = harness._seconds_of, lambda plan: 30.0
    prompt = harness.add(2000, max_tokens=2)
    harness.step()
    harness._seconds_of = usual
    since_s = harness.now_s
    harness.run_until(lambda: prompt.is_decoding, 10_000)
    assert harness.now_s - since_s < 3 * 2000 * machine.token_s


def test_decoding_rows_overlap_steps_while_a_prompt_waits_for_its_turn() -> None:
    machine = Machine()
    harness = Harness(
        max_rows=4,
        prefill_step_size=1 << 20,
        controller=measured(machine),
        seconds_of=machine.seconds_of,
        config=EngineConfig(max_rows=4),
        ahead=1.0,
    )
    chats(harness, 2)
    prompt, num_ahead = harness.add(1000, max_tokens=2), harness.num_ahead
    num_steps = harness.run_until(lambda: prompt.is_decoding, 10_000)
    assert harness.num_ahead - num_ahead > num_steps / 2


# -- several prompts in a pass ---------------------------------------------------------------------------


def first_pass(lengths: list[int], costs: Callable[[], DepthController], chunk: int = 64) -> list[int]:
    harness = Harness(max_rows=8, prefill_step_size=chunk, controller=costs())
    for length in lengths:
        harness.add(length, max_tokens=2)
    return [row.num_fed for row in rows_of(harness.step())]


def no_padding(pass_s: dict[int, float]) -> DepthController:
    costs = CostTable(MeasuredCosts({(1, 1): 1.0, (1, 2): 1.5}, {}, padding_share=0.0))
    return DepthController(costs, prompts=MeasuredPromptCosts(pass_s))


def padding(pass_s: dict[int, float]) -> DepthController:
    costs = CostTable(MeasuredCosts({(1, 1): 1.0, (1, 2): 1.5}, {}, padding_share=1.0))
    return DepthController(costs, prompts=MeasuredPromptCosts(pass_s))


def test_where_padding_is_free_a_pass_is_filled_with_prompts_of_any_length() -> None:
    linear = {16: 0.16, 64: 0.64}
    assert first_pass([30, 5, 20, 4], lambda: no_padding(linear)) == [30, 5, 20, 4]
    assert first_pass([30, 5, 100], lambda: no_padding(linear)) == [30, 5, 24]  # a chunk of the third


def test_where_padding_costs_what_tokens_cost_prompts_of_other_lengths_wait_for_their_own_pass() -> None:
    linear = {16: 0.16, 64: 0.64, 256: 2.56}
    assert first_pass([60, 5, 58], lambda: padding(linear), chunk=256) == [60]
    assert first_pass([60, 60, 60], lambda: padding(linear), chunk=256) == [60, 60, 60]


def test_where_a_pass_costs_the_same_for_few_tokens_prompts_are_padded_together() -> None:
    flat = {16: 0.035, 512: 0.036}
    assert first_pass([60, 5, 58], lambda: padding(flat), chunk=256) == [60, 5, 58]


def test_a_short_prompt_need_not_wait_until_a_long_one_has_passed_its_turn() -> None:
    linear = {16: 0.16, 64: 0.64}
    assert first_pass([1000, 20], lambda: no_padding(linear)) == [32, 20]
    assert first_pass([1000, 20, 30], lambda: no_padding(linear)) == [32, 20]  # half of the pass is enough
    assert first_pass([1000, 20], lambda: padding(linear)) == [64]


def test_few_sizes_serve_all_chunks() -> None:
    sizes = {size for rest in range(1, 3000) for size in chunk_sizes(rest, 2048) if size < min(rest, 2048)}
    assert sizes == {16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536}
    assert chunk_sizes(5, 2048) == [5]
    assert chunk_sizes(100, 10) == [10]


# -- memory ----------------------------------------------------------------------------------------------


def test_chunks_shrink_where_attention_stores_its_scores() -> None:
    """A pass may take 1,000,000 bytes: 1,000 for each token, and 4 for each pair of a token and a cell."""
    pass_s = MeasuredPromptCosts({16: 1e-3, 512: 2e-3}, 0.0, token_bytes=1000, pair_bytes=4)
    controller = DepthController(prompts=pass_s)
    harness = Harness(prefill_step_size=512, controller=controller, step_bytes=1_000_000)
    prompt = harness.add(8000, max_tokens=1)
    chunks = [row.num_fed for plan in harness.steps(200) for row in rows_of(plan)]
    assert sum(chunks) == 8000
    assert chunks[0] == 512
    done = 0
    for size in chunks:
        assert size * 1000 + 4 * size * done <= 1_000_000 or size <= MIN_CHUNK
        done += size
    assert chunks[-2] < 64
    assert prompt.id not in harness.live


COPIED_BYTES = 10**6  # dequantised weights of a wide pass
FREE_TOKENS = {16: 0.04, 2048: 0.05}  # a pass costs about the same for any number of tokens


def copying(padding_share: float = 1.0, few_shapes: bool = False) -> DepthController:
    costs = CostTable(MeasuredCosts({(1, 1): 1.0, (1, 2): 1.5}, {}, padding_share=padding_share))
    prompts = MeasuredPromptCosts(FREE_TOKENS, token_bytes=10)
    return DepthController(costs, None, few_shapes, prompts, COPIED_BYTES)


def prompt_passes(
    lengths: list[int], step_bytes: float, controller: DepthController | None = None
) -> list[list[int]]:
    """Tokens of each row, by pass."""
    harness = Harness(
        max_rows=len(lengths),
        prefill_step_size=2048,
        controller=controller or copying(),
        step_bytes=step_bytes,
    )
    for length in lengths:
        harness.add(length, max_tokens=1)
    passes = [
        [row.num_fed for row in batch if row.start < row.num_prompt]
        for plan in harness.steps(50)
        for batch in plan.batches
    ]
    assert sum(map(sum, passes)) == sum(lengths)
    return [own for own in passes if own]


@pytest.mark.parametrize("lengths", [[5000], [700, 100, 100, 100], [300, 300], [120, 130, 125, 127, 128]])
def test_wide_passes_are_not_planned_where_their_dequantised_weights_do_not_fit(lengths: list[int]) -> None:
    for own in prompt_passes(lengths, COPIED_BYTES):
        assert len(own) * max(own) < MANY_TOKENS
    widest = max(len(own) * max(own) for own in prompt_passes(lengths, 2 * COPIED_BYTES))
    assert widest >= MANY_TOKENS


def test_narrower_chunks_are_nearly_as_wide_as_they_may_be() -> None:
    assert prompt_passes([1200], COPIED_BYTES) == [[384], [384], [432]]
    assert prompt_passes([1200], 2 * COPIED_BYTES) == [[1200]]
    assert prompt_passes([500], COPIED_BYTES) == [[500]]


def test_a_chunk_that_is_padded_to_a_wide_pass_is_cut() -> None:
    """Where passes are traced, a width of 500 is rounded up to 512."""
    assert prompt_passes([500], COPIED_BYTES, copying(few_shapes=True)) == [[384], [116]]
    assert prompt_passes([500], 2 * COPIED_BYTES, copying(few_shapes=True)) == [[500]]


def test_wide_passes_need_memory_also_where_nothing_was_measured() -> None:
    controller = DepthController(copied_bytes=COPIED_BYTES)
    assert prompt_passes([800], COPIED_BYTES - 1, controller)[0] == [384]
    assert prompt_passes([800], COPIED_BYTES, DepthController(copied_bytes=COPIED_BYTES)) == [[800]]


def test_short_prompts_do_not_force_a_long_one_into_a_wide_pass() -> None:
    """Five short rows fill a narrow pass. With a sixth row of any size, it would be a wide one."""
    lengths = [1000, 100, 100, 100, 100, 100]
    passes = prompt_passes(lengths, COPIED_BYTES, copying(padding_share=0.0))
    assert passes[0] == [384]
    for own in passes:
        assert len(own) * max(own) < MANY_TOKENS


def test_the_scorer_of_prompts_reads_fewer_tokens_at_once_where_copies_do_not_fit() -> None:
    costs = PromptCosts(None, copied_bytes=COPIED_BYTES)
    for max_bytes, expected in ((COPIED_BYTES - 1, 384), (COPIED_BYTES, 2048)):
        assert PromptPacing(costs, 2048, 512, 0.2, max_bytes).max_scored_tokens == expected
