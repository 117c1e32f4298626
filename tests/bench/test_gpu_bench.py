"""The benchmark at real sizes, at tiny ones: its script, its cells, and what it does when one fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from benchmarks.gpu import __main__ as program
from benchmarks.gpu import bare, exactness, mlx_lm_loop, model_cells, shared_prefixes, wide_passes
from benchmarks.gpu.loop import Load, Loop
from benchmarks.gpu.scripted import AcceptanceScript, scripted
from benchmarks.gpu.shapes import SHAPES
from benchmarks.gpu.shared_prefixes import Order, SharedPrefixes
from benchmarks.gpu.weights import Subject, count_parameters, new_model, random_subject

from outrider.engine.draft_planner import DraftPlanner
from outrider.models import machine
from outrider.models.merged_linear import MergedLinearPart, MergedQuantizedLinearPart
from outrider.plan import BLOCK_SIZE
from outrider.request import DraftDepth
from outrider.speculate import calibration
from outrider.speculate.controller import DepthController
from outrider.speculate.costs import MeasuredCosts
from outrider.step import verify
from patience import case_only_in_soak

LOAD = Load(rows=3, num_prompt=12, steps=12, seconds=60)
QUICK = ["--rows", "2", "--depths", "1", "--steps", "8", "--seconds", "0.2", "--rounds", "1"]
QUICK += ["--context", "16", "--bandwidth-bytes", "1000000"]


@pytest.fixture(scope="module", autouse=True)
def _settled() -> None:
    machine.settle()


@pytest.fixture(scope="module")
def hybrid() -> Subject:
    return random_subject("tiny-4b", "f32")


def run(tmp_path: Path, *args: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "out.json"
    code = program.main([*QUICK, "--out", str(out), *args])
    return code, json.loads(out.read_text())


# -- the script ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.5, 0.7, 0.85, 1.0])
def test_the_device_and_the_host_read_the_same_script(share: float) -> None:
    script, rows, most = AcceptanceScript(share, seed=3), 5, 4
    starts = [0, 7, 100, 4000, 262144]
    positions = [[start + j for j in range(most)] for start in starts]
    num_drafts = [4, 4, 0, 2, 4]
    drafts, targets = mx.zeros((rows, most), mx.int32), mx.ones((rows, most + 1), mx.int32)
    found = script.count_accepted(targets, drafts, mx.array(num_drafts), mx.array(positions)).tolist()
    for row in range(rows):
        right = [script.is_right(row, p) for p in positions[row][: num_drafts[row]]]
        assert found[row] == (right.index(False) if False in right else len(right))


@pytest.mark.parametrize("share", [0.5, 0.7, 0.85])
def test_so_many_drafts_are_right_in_every_row(share: float) -> None:
    script = AcceptanceScript(share)
    for row in range(32):
        right = sum(script.is_right(row, position) for position in range(2000))
        assert abs(right / 2000 - share) < 0.05


def turn_at(
    subject: Subject, share: float, policy: DraftDepth, controller: DepthController, outruns: bool = False
) -> Any:
    with scripted(AcceptanceScript(share)):
        return Loop(subject, outruns).turn(policy, LOAD, controller)


@pytest.mark.parametrize("outruns", [False, True])
@pytest.mark.parametrize(("share", "depth", "stride"), [(1.0, 3, 4.0), (0.0, 3, 1.0), (1.0, 0, 1.0)])
def test_the_step_takes_the_script_s_word(
    hybrid: Subject, share: float, depth: int, stride: float, outruns: bool
) -> None:
    turn = turn_at(hybrid, share, depth, DepthController(), outruns)
    assert (turn.stride, turn.mean_depth, turn.steps) == (stride, depth, LOAD.steps)


def test_the_controller_learns_from_the_script(hybrid: Subject) -> None:
    chances = {}
    for share in (0.0, 1.0):
        controller = DepthController()
        turn_at(hybrid, share, 2, controller)
        chances[share] = controller.acceptance.chances("head", 0)[0]
    assert chances[0.0] < 0.4 < 0.75 < chances[1.0]


def test_the_script_goes_as_it_came() -> None:
    before = verify.count_accepted, DraftPlanner.observe
    script = AcceptanceScript(0.5)
    with scripted(script):
        assert verify.count_accepted == script.count_accepted
        assert DraftPlanner.observe is not before[1]
    assert (verify.count_accepted, DraftPlanner.observe) == before


# -- models ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "billions"),
    [("4b", 4.2), ("27b", 26.9), ("35b-a3b", 34.66), ("122b-a10b", 122.11), ("dense-4b", 4.0)],
)
def test_shapes_are_as_large_as_they_say(name: str, billions: float) -> None:
    assert count_parameters(new_model(*SHAPES[name])) / 1e9 == pytest.approx(billions, abs=0.05)


@pytest.mark.parametrize(
    ("dtype", "bytes_a_weight"), [("f32", 4), ("bf16", 2), ("8bit", 1.0625), ("4bit", 0.5625)]
)
def test_weights_are_made_in_their_dtype(dtype: str, bytes_a_weight: float) -> None:
    subject = random_subject("tiny-27b", dtype)
    assert subject.trunk.num_bytes / subject.num_parameters == pytest.approx(bytes_a_weight, rel=0.05)
    assert subject.num_parameters == count_parameters(new_model(*SHAPES["tiny-27b"]))
    embedding = subject.trunk.num_bytes - subject.weight_bytes
    assert embedding == subject.projection_bytes  # of the same shape, and only one of them is read
    assert subject.trunk.dtype == (mx.float32 if dtype == "f32" else mx.bfloat16)
    assert all(x.dtype == subject.trunk.dtype for x in (subject.head.layers[0].fc.weight,))


@pytest.mark.parametrize("dtype", ["f32", "4bit"])
def test_where_engines_join_products_mlx_lm_has_its_own_layers(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def joined(subject: Subject) -> bool:
        kinds = MergedLinearPart, MergedQuantizedLinearPart
        return any(isinstance(module, kinds) for module in subject.model.modules())

    apart = random_subject("tiny-4b", dtype)
    monkeypatch.setattr(machine, "outruns_host", lambda: True)
    subject = random_subject("tiny-4b", dtype)
    assert joined(subject)
    assert not joined(apart)
    assert (subject.num_parameters, subject.weight_bytes) == (apart.num_parameters, apart.weight_bytes)
    monkeypatch.setattr(mlx_lm_loop, "_turn", lambda subject, load: joined(subject))
    assert mlx_lm_loop.mlx_lm_turn(subject, LOAD) is False  # type: ignore[comparison-overlap]
    assert joined(subject)


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    subject = random_subject("tiny-35b-a3b", "8bit")
    experts = 4 * 3 * 8 * 64 * 128 * 17 // 16  # of four layers, in 8 bits with their scales and biases
    one, two, many = (subject.weight_bytes - subject.bytes_read(num) for num in (1, 2, 100))
    assert one == pytest.approx(experts * 6 / 8, abs=1)  # two of eight are chosen
    assert two == pytest.approx(experts * 6 / 8 * 6 / 8, abs=1)
    assert many == 0
    assert subject.head_bytes_read(1) < subject.head_bytes == subject.head_bytes_read(100)
    router = subject.trunk.model.model.layers[0].mlp.gate
    assert router.bits == 8


def test_a_step_moves_at_least_its_weights_states_keys_and_drafts(hybrid: Subject) -> None:
    plain = bare.bytes_a_step(hybrid, 1, 0, 0)
    states = 2 * 3 * (4 * 32 * 32 + 3 * 256) * 4  # in and out, of three layers, in float32
    keys = 100 * 2 * 2 * 32 * 4  # of one layer
    assert plain == hybrid.weight_bytes + states
    assert bare.bytes_a_step(hybrid, 1, 0, 100) == plain + keys
    assert bare.bytes_a_step(hybrid, 1, 2, 0) == plain + 2 * (hybrid.head_bytes + hybrid.projection_bytes)


# -- cells -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("4b", "bf16"),
        ("dense-4b", "f32"),
        case_only_in_soak("27b", "4bit"),  # quantised products are slow on a CPU
        case_only_in_soak("35b-a3b", "4bit"),
    ],
)
def test_all_cells_of_a_model(model: str, dtype: str, tmp_path: Path) -> None:
    own = f"tiny-{model}/{dtype}"
    blocks = "blocks/rows=2/depth=1/longest=0"
    cells = ["about", "costs", "bare/rows=2", "loop/rows=2/accept=70", "mlx-lm/rows=2", blocks]
    names = [f"{own}/{cell}" for cell in cells]
    code, found = run(tmp_path, "--tiny", "--models", model, "--dtypes", dtype, "--only", *names)
    assert code == 0
    assert list(found["cells"]) == names
    MeasuredCosts.from_json(found["cells"][f"{own}/costs"])
    loop, times = found["cells"][f"{own}/loop/rows=2/accept=70"], found["cells"][f"{own}/bare/rows=2"]
    assert loop["0"]["stride"] == 1.0
    assert 1.0 <= loop["1"]["stride"] <= 2.0
    ratio, stride, cost = loop["1"]["ratio"][0], loop["1"]["stride"], times["1"]["cost_ratio"]
    assert loop["1"]["efficiency"] == pytest.approx(ratio * cost / stride)
    assert loop["auto"]["of_best"] <= 1.0
    assert found["cells"][f"{own}/mlx-lm/rows=2"]["ratio"][0] > 0
    assert {"slots", "blocks", "8 bits"} <= found["cells"][f"{own}/{blocks}"].keys()


def test_one_row_beside_mlx_lm_and_a_model_from_a_folder(tmp_path: Path) -> None:
    folder = str(Path(__file__).parents[1] / "data" / "tiny-hybrid")
    only = ["--only", "default/own/mlx-lm/rows=1", "default/own/loop/rows=1/*"]
    code, found = run(tmp_path, "--models", "default", "--model", folder, "--rows", "1", *only)
    assert code == 0
    assert found["cells"]["default/own/about"]["head"].endswith("mtp.safetensors")
    assert found["cells"]["default/own/mlx-lm/rows=1"]["tokens_per_s"]["mlx_lm"] > 0


def test_a_cell_that_fails_is_told_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(model_cells, "measure_bare", broken)
    only = ["--only", "*/bare/*", "*/mlx-lm/*"]
    code, found = run(tmp_path, "--tiny", "--models", "dense-4b", *only)
    assert code == 1
    assert found["cells"]["tiny-dense-4b/bf16/bare/rows=2"]["error"] == "RuntimeError: no such kernel"
    assert found["cells"]["tiny-dense-4b/bf16/mlx-lm/rows=2"]["ratio"]
    said = capsys.readouterr().out
    assert "Traceback" in said
    assert "failed: tiny-dense-4b/bf16/bare/rows=2" in said


def test_mlx_lm_is_compared_at_temperature_0_only(capsys: pytest.CaptureFixture[str]) -> None:
    program.main(["--list"])
    assert "4b/bf16/mlx-lm/rows=32" in capsys.readouterr().out.splitlines()
    program.main(["--list", "--temperature", "0.8"])
    assert "mlx-lm" not in capsys.readouterr().out


def test_after_the_deadline_nothing_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main([*QUICK, "--tiny", "--deadline", "-1", "--only", "bandwidth"]) == 0
    assert "not started in time: bandwidth" in capsys.readouterr().out


@pytest.mark.parametrize(
    "args", [["--models", "default"], ["--depths", "0"], ["--tiny", "--models", "default-shape"]]
)
def test_what_makes_no_sense_is_refused(args: list[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(args)


# -- checks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [case_only_in_soak(0.0), 0.8])
def test_drafts_leave_tokens_as_they_are_and_a_wrong_step_is_noticed(
    hybrid: Subject, temperature: float
) -> None:
    found = exactness.check(hybrid, temperature)
    assert found["equal"]
    assert found["predicted"]["drafts_accepted"] > 50  # type: ignore[index]
    assert found["ahead"]["steps_ahead"] > 50  # type: ignore[index]
    with scripted(AcceptanceScript(0.9)):
        assert not exactness.check(hybrid, temperature)["equal"]


@pytest.mark.parametrize("model", [case_only_in_soak("tiny-dense-4b"), "tiny-4b"])
def test_rows_with_and_without_drafts_share_prefixes_and_wrong_cells_are_noticed(model: str) -> None:
    subject = random_subject(model, "f32", long_memory=True)
    check = SharedPrefixes(subject, BLOCK_SIZE, num_prompts=1)
    check.run(must_be_equal=True, orders=[Order(drafts_first=False, after=None), Order(True, after=4)])
    assert check.wrong == []
    assert check.results["drafting then plain, after 4 tokens"]["blocks_shared"] == 9
    with shared_prefixes.no_catch_up():
        check.run(must_be_equal=True, orders=[Order(drafts_first=False, after=None)])
    assert "drafts are equal" in check.wrong[0]


def test_a_random_model_with_a_short_memory_proves_nothing_about_prefixes(hybrid: Subject) -> None:
    check = SharedPrefixes(hybrid, None, num_prompts=1)
    check.run(must_be_equal=True, orders=[])
    assert any(line.startswith("control") for line in check.wrong)


def test_the_gap_of_two_tokens_is_the_difference_of_their_logits(hybrid: Subject) -> None:
    logits = hybrid.model(mx.array([[5, 6, 7]]))[0, -1]
    gap = shared_prefixes._gap(hybrid, [5, 6, 7, 8], [5, 6, 7, 9], 3)
    assert gap == pytest.approx(abs(float(logits[8] - logits[9])), abs=1e-4)


def test_the_memory_of_prompt_passes_is_compared_with_its_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wide_passes, "PASSES", ((40,), (24, 8)))
    monkeypatch.setattr(wide_passes, "NUM_TIMED", 1)
    monkeypatch.setattr(calibration, "BUDGET_S", 0.0)
    args = ["--tiny", "--models", "dense-4b", "--dtypes", "4bit", "f32", "--only", "*/wide"]
    code, found = run(tmp_path, *args)
    assert code == 0
    assert "tiny-dense-4b/f32/wide" not in found["cells"]
    cell = found["cells"]["tiny-dense-4b/4bit/wide"]
    for name in ("40", "24+8"):
        own = cell[name]
        assert own["ratio"] == own["predicted_bytes"] / own["peak_bytes"] > 0.1
        assert own["without_wait"]["peak_bytes"] > 0
    assert cell["24+8"]["predicted_bytes"] == 48 * cell["token_bytes"], "padding takes memory too"
