"""The table, the record and the pictures, from fixed rounds."""

from __future__ import annotations

import asyncio
import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from made_up import FakeTarget, a_round, answer, measured

from outrider.bench.answer import DraftCounts
from outrider.bench.chart import nice_step
from outrider.bench.environment import environment
from outrider.bench.plot import check_plot_file, draw, write_plot
from outrider.bench.record import record, write_record
from outrider.bench.report import report
from outrider.bench.rounds import Benchmark, Measured
from outrider.bench.settings import Settings
from outrider.bench.table import table
from outrider.bench.target import arms_of
from outrider.config import InvalidConfig

SVG = "{http://www.w3.org/2000/svg}"


def fixed() -> list[Measured]:
    drafts = DraftCounts(10, 15, (8, 2), (4, 1))

    def rounds(factor: float) -> list:
        return [
            a_round("off", 0, 10 * factor, peak_bytes=600_000_000),
            a_round("auto", 0, 15 * factor, drafts=drafts),
            a_round("auto", 1, 20 * factor, drafts=drafts),
            a_round("off", 1, 10 * factor),
        ]

    return [measured(*rounds(1)), measured(*rounds(2), streams=4), measured(*rounds(1), temperature=0.8)]


def test_the_table() -> None:
    assert table(fixed(), ["off", "auto"], ["off"]).splitlines()[:6] == [
        "chat (everyday questions), temperature 0",
        "streams  arm   tokens/s          / off             first token ms  a token ms   stride  "
        "accepted by place  ended  peak MB",
        "1        off   10.0 (10.0-10.0)  -                 500 / 500       62.5 / 62.5  -       "
        "-                  2/2    600",
        "         auto  17.5 (15.0-20.0)  1.75 (1.50-2.00)  250 / 333       31.2 / 41.7  1.50    "
        "0.50 0.50          2/2    -",
        "4        off   20.0 (20.0-20.0)  -                 250 / 250       31.2 / 31.2  -       "
        "-                  2/2    600",
        "         auto  35.0 (30.0-40.0)  1.75 (1.50-2.00)  125 / 167       15.6 / 20.8  1.50    "
        "0.50 0.50          2/2    -",
    ]


def test_each_temperature_has_a_table_of_its_own_and_a_case_without_rounds_has_none() -> None:
    text = table([*fixed(), measured(workload="code")], ["off", "auto"], ["off"])
    assert text.count("tokens/s") == 2
    assert "temperature 0.8" in text
    assert "programs" not in text


def test_what_failed_and_what_is_no_json_is_said_beneath_the_table() -> None:
    answers = (
        answer((1.0, 1), kind="constrained", text="Sure!"),
        answer(error="the server says 500: oh", finish_reason=None),
    )
    text = table([measured(a_round("off", 0, 10, answers=answers), workload="json")], ["off"], ["off"])
    assert "1 stream, off: 1 of 1 answers that had to be JSON are none" in text
    assert "1 stream, off: 1 failed: the server says 500: oh" in text


def test_mixed_rows_show_their_pace_by_kind() -> None:
    answers = tuple(answer((1.0, 1), (2.0, 1), kind=kind) for kind in ("plain", "free"))
    text = table([measured(a_round("off", 0, 10, answers=answers), workload="mixed")], ["off"], ["off"])
    assert "a token ms by row: free 1000.0 / 1000.0, plain 1000.0 / 1000.0" in text


def finished(**settings: object) -> Benchmark:
    chosen = {"workloads": ("chat", "long"), "streams": (1, 2), "rounds": 2, "requests": 1} | settings
    benchmark = Benchmark(arms_of([FakeTarget()], ("auto",)), Settings(**chosen))  # type: ignore[arg-type]
    asyncio.run(benchmark.run())
    return benchmark


def test_the_report_says_whether_answers_were_the_same_but_not_where_prompts_differed() -> None:
    text = report(finished(), ["off"], is_complete=True)
    assert "off and auto gave the same text 6 times of 6." in text  # chat alone
    assert "peak: the most memory in a round (fake: that of make-believe)." in text
    assert not text.startswith("Interrupted")


def test_an_interrupted_report_says_so_and_an_empty_one_too() -> None:
    assert report(finished(), ["off"], is_complete=False).startswith("Interrupted: this is what was measured")
    nothing = Benchmark(arms_of([FakeTarget()], ("auto",)), Settings())
    assert report(nothing, ["off"], is_complete=False) == "Nothing was measured."


def test_the_record_holds_settings_machine_figures_and_every_round(tmp_path: Path) -> None:
    benchmark = finished(temperatures=(0.0, 0.8))
    write_record(tmp_path / "b.json", record(benchmark, ["off"], environment(), True))
    found = json.loads((tmp_path / "b.json").read_text())
    assert found["settings"]["streams"] == [1, 2]
    assert found["environment"]["packages"]["mlx"]
    assert found["targets"] == {"fake": {"kind": "fake", "model": "none", "memory": "make-believe"}}
    assert found["arms"][1] == {"name": "auto", "target": "fake", "depth": "auto"}
    assert len(found["cases"]) == 8
    case = found["cases"][1]
    assert (case["workload"], case["streams"], case["temperature"]) == ("chat", 2, 0.0)
    assert [one["arm"] for one in case["rounds"]] == ["off", "auto", "auto", "off"]
    assert len(case["rounds"][0]["answers"]) == 2
    assert case["rounds"][0]["answers"][0]["arrivals"][0][1] == 1
    assert case["figures"][1]["ratios"]["off"]["median"] > 0


def test_the_picture_has_a_line_an_arm_and_a_ratio_beside_it() -> None:
    root = ElementTree.fromstring(draw(fixed(), ["off", "auto"], ["off"]))
    charts = root.findall(f"{SVG}g")
    assert len(charts) == 4  # two temperatures: tokens/s, ratio
    assert [len(chart.findall(f"{SVG}polyline")) for chart in charts] == [2, 1, 2, 1]
    titles = [chart.findall(f"{SVG}text")[0].text for chart in charts]
    assert titles[:2] == ["chat, temperature 0: tokens/s", "chat, temperature 0: speed over off"]


def test_points_are_higher_where_it_is_faster_and_lie_within_the_picture() -> None:
    root = ElementTree.fromstring(draw(fixed(), ["off", "auto"], ["off"]))
    slow, fast = (
        [tuple(map(float, spot.split(","))) for spot in line.attrib["points"].split()]
        for line in root.findall(f"{SVG}g")[0].findall(f"{SVG}polyline")
    )
    assert all(high[1] < low[1] and high[0] == low[0] for high, low in zip(fast, slow, strict=True))
    assert slow[0][0] < slow[1][0]
    assert all(0 < y < 260 for _, y in (*slow, *fast))


def test_names_in_a_picture_are_escaped() -> None:
    svg = draw([measured(a_round("<a & b>", 0, 10))], ["<a & b>"], ["<a & b>"])
    assert "&lt;a &amp; b&gt;" in svg
    ElementTree.fromstring(svg)


@pytest.mark.parametrize(("top", "step"), [(1.75, 0.5), (10, 2), (47, 10), (0.09, 0.02), (100, 20), (0, 1)])
def test_steps_of_an_axis_are_round(top: float, step: float) -> None:
    assert nice_step(top) == pytest.approx(step)


def test_a_plot_is_written_as_svg(tmp_path: Path) -> None:
    check_plot_file(tmp_path / "p.svg")
    write_plot(tmp_path / "p.svg", fixed(), ["off", "auto"], ["off"])
    assert (tmp_path / "p.svg").read_text().startswith("<svg")


def test_a_png_without_its_package_is_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cairosvg", None)
    with pytest.raises(InvalidConfig, match=r"needs the package cairosvg .* ends with \.svg needs nothing"):
        check_plot_file(Path("p.png"))
    with pytest.raises(InvalidConfig, match=r"ends with \.svg or \.png"):
        check_plot_file(Path("p.pdf"))
