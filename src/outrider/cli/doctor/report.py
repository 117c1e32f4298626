"""The report of `outrider doctor`, as text for an issue and as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal

from outrider.cli.doctor.step_times import StepTimes

Status = Literal["ok", "off", "failed", "skipped"]
MARKS: dict[Status, str] = {"ok": "ok  ", "off": "OFF ", "failed": "FAIL", "skipped": "-   "}
ADVICE = "Please open an issue with this report: how to do that is in CONTRIBUTING.md."


@dataclass(frozen=True)
class Outcome:
    """Of one check. "off": the part is switched off, and a server uses the portable form."""

    name: str
    status: Status
    detail: str = ""


@dataclass(frozen=True)
class Report:
    environment: dict[str, Any]
    device: dict[str, Any]
    memory: dict[str, int | None]  # bytes
    outcomes: tuple[Outcome, ...]
    step_times: StepTimes | None
    seconds: float

    @property
    def counts(self) -> Counter[Status]:
        return Counter(outcome.status for outcome in self.outcomes)

    @property
    def is_good(self) -> bool:
        return not (self.counts["failed"] or self.counts["off"])

    @property
    def verdict(self) -> str:
        num_run, failed, off = len(self.outcomes) - self.counts["skipped"], *self._bad()
        if failed:
            return f"NOT OK: {failed} of {num_run} checks failed. Do not trust answers on this device."
        if off:
            parts = "1 part is" if off == 1 else f"{off} parts are"
            return f"Works, but slower than it could: {parts} switched off ({num_run} checks)."
        return f"OK: all {num_run} checks passed."

    def _bad(self) -> tuple[int, int]:
        return self.counts["failed"], self.counts["off"]

    def as_json(self) -> dict[str, Any]:
        return {"verdict": self.verdict, "ok": self.is_good, **asdict(self)}

    def as_text(self) -> str:
        parts = [
            f"outrider doctor ({self.seconds:.0f} s)\n{self.verdict}",
            _listed("Machine", self._machine()),
            _listed("Memory", {name: _gigabytes(value) for name, value in self.memory.items()}),
            self._checks(),
        ]
        if self.step_times is not None:
            parts.append(_table(self.step_times))
        if not self.is_good:
            parts.append(ADVICE)
        return "\n\n".join(parts)

    def _machine(self) -> dict[str, str]:
        packages = self.environment["packages"]
        others = {name: str(value) for name, value in self.environment.items() if name != "packages"}
        device = {f"device {name}": str(value) for name, value in self.device.items()}
        versions = ", ".join(f"{name} {version}" for name, version in packages.items())
        return others | {"packages": versions} | device

    def _checks(self) -> str:
        lines = ["Checks"]
        for outcome in self.outcomes:
            if outcome.status != "skipped":
                detail = f": {outcome.detail}" if outcome.detail else ""
                lines.append(f"  {MARKS[outcome.status]}  {outcome.name}{detail}")
        skipped = dict.fromkeys(
            one.name.partition(",")[0] for one in self.outcomes if one.status == "skipped"
        )
        if skipped:
            lines.append(f"  {MARKS['skipped']}  not for this device: {', '.join(skipped)}")
        return "\n".join(lines)


def _listed(title: str, values: dict[str, str]) -> str:
    width = max(map(len, values))
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in values.items())])


def _gigabytes(num_bytes: int | None) -> str:
    return "no limit" if num_bytes is None else f"{num_bytes / 1e9:.2f} GB"


def _table(times: StepTimes) -> str:
    head = "".join(f"{width:>9}" for width in times.widths)
    lines = [f"Milliseconds of a step ({times.model}, random weights)", f"  rows x width{head}"]
    for num_rows, found in zip(times.rows, times.milliseconds, strict=True):
        lines.append(f"  {num_rows:>12}" + "".join(f"{ms:>9.2f}" for ms in found))
    return "\n".join(lines)
