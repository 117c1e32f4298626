"""`outrider doctor`: its options, its progress and its exit status."""

from __future__ import annotations

import argparse
import faulthandler
import json

Commands = argparse._SubParsersAction  # of argparse.ArgumentParser

DESCRIPTION = """Checks this machine in about a minute: compiles every kernel, compares it with a portable
form, compares answers with drafts and without, and times steps. Prints a report that can be pasted into an
issue. Needs no model. The exit status is 0 if all checks passed and 1 if not."""


def add_doctor(commands: Commands[argparse.ArgumentParser]) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="check that everything works on this machine, and write a report",
        description=DESCRIPTION,
        allow_abbrev=False,
    )
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")
    doctor.add_argument("--quick", action="store_true", help="fewer models and step times: a few seconds")
    doctor.set_defaults(run=run_doctor)


def run_doctor(args: argparse.Namespace) -> int:
    from outrider.cli.doctor.examination import FULL, QUICK, examine, num_stages
    from outrider.progress import Progress, ProgressBar

    faulthandler.enable()  # a kernel that crashes writes the stack; the last line of progress names it
    effort, num_done = QUICK if args.quick else FULL, 0
    total, bar = num_stages(effort), ProgressBar()

    def tell(what: str) -> None:
        nonlocal num_done
        bar(Progress("Checking this machine", num_done, total, "checks", what, is_news=True))
        num_done += 1

    try:
        report = examine(effort, tell)
    finally:
        bar.close()
    print(json.dumps(report.as_json(), indent=2, default=str) if args.json else report.as_text())
    return 0 if report.is_good else 1
