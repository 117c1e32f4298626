"""`outrider doctor`: what fails is in the report, in the verdict and in the exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from fresh_process import clean_environment
from outrider import fallbacks
from outrider.cli import main as cli
from outrider.cli.doctor import decoding, examination, invariance
from outrider.cli.doctor.examination import Effort, examine, num_stages
from outrider.cli.doctor.random_model import random_model
from outrider.cli.doctor.report import Outcome, Report
from outrider.cpu import extension
from outrider.models import machine
from outrider.models.kernel_checks import Check
from outrider.sampling.sampler import Sampler
from outrider.step import verify
from patience import PATIENCE_S

NO_MODELS = Effort(models=(), num_tokens=1, timed=("dense", None), rows=(1,), widths=(1, 2))


@pytest.fixture(autouse=True)
def no_fallbacks() -> Iterator[None]:
    machine.settle()  # as an engine on a CPU: passes that are traced are not compiled
    fallbacks.clear()
    yield
    fallbacks.clear()


def test_a_healthy_machine_passes(capfd: pytest.CaptureFixture[str]) -> None:
    status = cli.main(["doctor", "--quick", "--json"])
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert status == 0, found["outcomes"]
    assert found["verdict"].startswith("OK: all ")
    by_name = {one["name"]: one["status"] for one in found["outcomes"]}
    assert by_name["native extension"] == by_name["BLAS"] == "ok"
    assert by_name["delta-rule kernels"] == "skipped"
    assert found["device"]["instructions"] == extension.instructions() is not None
    assert [name for name in by_name if name.startswith("drafter invariance, hybrid, 4 bits: ")]
    assert found["step_times"]["milliseconds"][1][1] > 0
    assert found["memory"]["for_rows"] > 0
    assert found["environment"]["packages"]["mlx"]
    assert "native extension" in err  # progress


def test_without_a_compiler_the_fast_code_is_off_and_the_rest_passes(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "outrider", "doctor", "--quick"],
        env=clean_environment(OUTRIDER_CACHE=tmp_path, PATH=tmp_path),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert run.returncode == 1, run.stderr
    assert "Works, but slower than it could: 2 parts are switched off" in run.stdout
    assert "OFF   own matmul: no C compiler (cc, gcc, clang). Used instead: OpenBLAS" in run.stdout
    assert "OFF   native extension: no C++ compiler (c++, g++, clang++). Used instead: float32" in run.stdout
    assert "ok    drafter invariance" in run.stdout
    assert "FAIL" not in run.stdout
    assert "CONTRIBUTING.md" in run.stdout


# -- checks ----------------------------------------------------------------------------------------------


def outcomes_of(monkeypatch: pytest.MonkeyPatch, *checks: Check) -> Report:
    monkeypatch.setattr(examination, "all_checks", lambda: list(checks))
    told: list[str] = []
    report = examine(NO_MODELS, told.append)
    assert len(told) <= num_stages(NO_MODELS)
    return report


def switched_off() -> bool:
    fallbacks.note("quick kernels", "they are off by 2", "slow operations")
    return False


def failing() -> bool:
    raise KeyError("no such kernel")


@pytest.mark.parametrize(
    ("run", "status", "line", "verdict"),
    [
        (lambda: True, "ok", "  ok    quick kernels, large", "OK: all 2 checks passed."),
        (
            switched_off,
            "off",
            "  OFF   quick kernels, large: they are off by 2. Used instead: slow operations",
            "Works, but slower than it could: 1 part is switched off (2 checks).",
        ),
        (lambda: False, "off", "  OFF   quick kernels, large: it disagrees with the portable form", "Works,"),
        (failing, "failed", "  FAIL  quick kernels, large: KeyError: 'no such kernel'", "NOT OK: 1 of 2"),
    ],
)
def test_each_result_of_a_check_is_in_the_report(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[], bool], status: str, line: str, verdict: str
) -> None:
    for_others = Check("for other devices", lambda: False, failing)
    report = outcomes_of(monkeypatch, Check("quick kernels, large", lambda: True, run), for_others)
    assert report.outcomes[0].status == status
    assert report.outcomes[1] == Outcome("for other devices", "skipped", "not for this device")
    assert line in report.as_text().splitlines()
    assert report.verdict.startswith(verdict)
    assert report.is_good == (status == "ok")
    assert json.loads(json.dumps(report.as_json()))["ok"] == report.is_good


def test_the_instructions_of_the_native_extension_are_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "instructions", lambda: "avx2")
    lines = outcomes_of(monkeypatch).as_text().splitlines()
    assert [line.split() for line in lines if "instructions" in line] == [["device", "instructions", "avx2"]]


def test_a_model_that_cannot_run_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(examination, "all_checks", list)
    monkeypatch.setattr(examination, "random_model", broken)
    report = examine(replace(NO_MODELS, models=(("dense", 4),)), lambda _: None)
    assert [one.status for one in report.outcomes] == ["failed", "failed"]
    assert report.outcomes[0] == Outcome(
        "drafter invariance, dense, 4 bits", "failed", "RuntimeError: out of memory"
    )
    assert report.step_times is None


# -- drafter invariance ----------------------------------------------------------------------------------


def accepts_a_wrong_draft(patch: pytest.MonkeyPatch) -> None:
    count = verify.count_accepted

    def wrong(targets: mx.array, drafts: mx.array, num_drafts: mx.array, positions: mx.array) -> mx.array:
        return mx.minimum(count(targets, drafts, num_drafts, positions) + 1, num_drafts)

    patch.setattr(verify, "count_accepted", wrong)


def noise_depends_on_the_window(patch: pytest.MonkeyPatch) -> None:
    sample = Sampler.sample
    patch.setattr(
        Sampler,
        "sample",
        lambda self, logits, positions: sample(
            self, logits, mx.broadcast_to(positions[:, :1], positions.shape)
        ),
    )


def rows_are_mixed_up(patch: pytest.MonkeyPatch) -> None:
    decode = decoding.Decoder.decode
    patch.setattr(
        decoding.Decoder,
        "decode",
        lambda self, prompts, *more: [*(found := decode(self, prompts, *more))[1:], *found[:1]],
    )


def no_draft_is_accepted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verify, "count_accepted", lambda targets, drafts, num, positions: mx.zeros_like(num))


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (accepts_a_wrong_draft, "answers differ"),
        (noise_depends_on_the_window, "answers differ"),
        (rows_are_mixed_up, "answers differ"),
        (no_draft_is_accepted, "no draft was accepted"),
    ],
)
def test_a_fault_is_noticed(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None], problem: str
) -> None:
    fault(monkeypatch)
    found = list(invariance.compare(random_model("dense", None), num_tokens=6))
    assert any(problem in (one.problem or "") for one in found), found


def test_on_a_gpu_only_large_differences_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, passes of other shapes round differently."""
    model = random_model("dense", None)
    monkeypatch.setattr(invariance.machine, "is_cpu", lambda: False)
    assert [one.problem for one in invariance.compare(model, 6)] == [None] * examination.NUM_COMPARISONS
    rows_are_mixed_up(monkeypatch)
    problems = [one.problem for one in invariance.compare(model, 6)]
    assert "log-probabilities differ by" in str(problems[0])


def test_traced_and_overlapped_steps_are_compared_where_a_server_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = random_model("hybrid", None)
    monkeypatch.setattr(decoding.machine, "outruns_host", lambda: True)
    overlapped = 0
    launch = decoding.StepExecutor.launch

    def counted(self: Any, step: Any, in_front: Any = ()) -> None:
        nonlocal overlapped
        overlapped += bool(in_front)
        launch(self, step, in_front)

    monkeypatch.setattr(decoding.StepExecutor, "launch", counted)
    assert [one.problem for one in invariance.compare(model, 6)] == [None] * examination.NUM_COMPARISONS
    assert overlapped > 0
