"""The tables, the record and the plots, from fixed rounds."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from made_up import FakeTarget, a_round, answer, result
from rich.console import Console, RenderableType

from outrider.bench.answer import DraftCounts, RoundResult
from outrider.bench.environment import environment
from outrider.bench.plot import check_plot_file, draw, write_plot
from outrider.bench.record import record, write_record
from outrider.bench.report import report
from outrider.bench.rounds import Benchmark, CaseResult
from outrider.bench.settings import BenchSettings
from outrider.bench.table import tables
from outrider.bench.target import variants_of
from outrider.config import InvalidConfig
from outrider.terminal import console_for


def plain(*parts: RenderableType) -> str:
    """The text as a pipe gets it."""
    stream = io.StringIO()
    console_for(stream).print(*parts, sep="\n")
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def fixed() -> list[CaseResult]:
    drafts = DraftCounts(10, 15, (8, 2), (4, 1))

    def rounds(factor: float) -> list:
        return [
            a_round("off", 0, 10 * factor, peak_bytes=600_000_000),
            a_round("auto", 0, 15 * factor, drafts=drafts),
            a_round("auto", 1, 20 * factor, drafts=drafts),
            a_round("off", 1, 10 * factor),
        ]

    return [result(*rounds(1)), result(*rounds(2), streams=4), result(*rounds(1), temperature=0.8)]


def test_the_table() -> None:
    assert plain(*tables(fixed(), ["off", "auto"], ["off"])).splitlines()[:6] == [
        "chat (everyday questions), temperature 0",
        "streams  variant  tokens/s          / off             TTFT ms    ITL ms       stride  "
        "accepted   stopped  peak MB",
        "1        off      10.0 (10.0-10.0)  -                 500 / 500  62.5 / 62.5  -       "
        "-          2/2      600",
        "         auto     17.5 (15.0-20.0)  1.75 (1.50-2.00)  250 / 333  31.2 / 41.7  1.50    "
        "0.50 0.50  2/2      -",
        "4        off      20.0 (20.0-20.0)  -                 250 / 250  31.2 / 31.2  -       "
        "-          2/2      600",
        "         auto     35.0 (30.0-40.0)  1.75 (1.50-2.00)  125 / 167  15.6 / 20.8  1.50    "
        "0.50 0.50  2/2      -",
    ]


def test_a_terminal_gets_the_table_in_its_width() -> None:
    stream = io.StringIO()
    Console(file=stream, width=80).print(*tables(fixed(), ["off", "auto"], ["off"]))
    assert max(map(len, stream.getvalue().splitlines())) <= 80


def test_each_temperature_has_a_table_of_its_own_and_a_case_without_rounds_has_none() -> None:
    text = plain(*tables([*fixed(), result(workload="code")], ["off", "auto"], ["off"]))
    assert text.count("TTFT") == 2
    assert "temperature 0.8" in text
    assert "programs" not in text


def test_what_failed_and_what_is_no_json_is_said_beneath_the_table() -> None:
    answers = (
        answer((1.0, 1), kind="constrained", text="Sure!"),
        answer(error="the server answered 500: oh", finish_reason=None),
    )
    text = plain(*tables([result(a_round("off", 0, 10, answers=answers), workload="json")], ["off"], ["off"]))
    assert "1 stream, off: 1 of 1 answers with a JSON schema are not valid JSON" in text
    assert "1 stream, off: 1 failed: the server answered 500: oh" in text


def test_long_prompts_show_ratios_of_the_time_to_first_token() -> None:
    def ttft(variant: str, s: float) -> RoundResult:
        return a_round(variant, 0, 10, answers=(answer((s, 1)),))

    found = result(ttft("ours", 3.0), ttft("theirs", 4.0), workload="long")
    text = plain(*tables([found], ["ours", "theirs"], ["theirs"]))
    assert "1 stream, ours: TTFT / TTFT of theirs: 0.75 (0.75-0.75)" in text
    assert "theirs: TTFT" not in text


def test_mixed_rows_show_their_pace_by_kind() -> None:
    answers = tuple(answer((1.0, 1), (2.0, 1), kind=kind) for kind in ("plain", "free"))
    text = plain(
        *tables([result(a_round("off", 0, 10, answers=answers), workload="mixed")], ["off"], ["off"])
    )
    assert "ITL ms by kind of row: free 1000.0 / 1000.0, plain 1000.0 / 1000.0" in text


def test_arrivals_show_what_a_long_prompt_does_to_chats() -> None:
    chat = answer((1.0, 1), (1.5, 1), (3.5, 1), kind="free")
    late = answer((9.0, 1), (14.0, 1), kind="long")
    found = result(a_round("off", 0, 10, answers=(chat, late)), workload="arrivals")
    text = plain(*tables([found], ["off"], ["off"]))
    assert "TTFT ms by kind of row: free 1000 / 1000, long 9000 / 9000" in text
    assert "longest time without a token of a chat: 2000 ms" in text


def finished(**settings: object) -> Benchmark:
    chosen = {"workloads": ("chat", "long"), "streams": (1, 2), "rounds": 2, "requests": 1} | settings
    benchmark = Benchmark(variants_of([FakeTarget()], ("auto",)), BenchSettings(**chosen))  # type: ignore[arg-type]
    asyncio.run(benchmark.run())
    return benchmark


def test_the_report_says_whether_answers_were_the_same_but_not_where_prompts_differed() -> None:
    text = plain(report(finished(), ["off"], is_complete=True))
    assert "off and auto gave the same text in 6 of 6 answers." in text  # chat alone
    assert "the most memory in use during a round (fake: memory of make-believe)" in text
    assert not text.startswith("Interrupted")


def test_an_interrupted_report_says_so_and_an_empty_one_too() -> None:
    text = plain(report(finished(), ["off"], is_complete=False))
    assert text.startswith("Interrupted. These are the figures so far.")
    nothing = Benchmark(variants_of([FakeTarget()], ("auto",)), BenchSettings())
    assert plain(report(nothing, ["off"], is_complete=False)) == "Nothing was measured."


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


def test_the_plot_has_a_line_for_each_variant_and_a_ratio_beside_it() -> None:
    charts = draw(fixed(), ["off", "auto"], ["off"]).axes
    titles = [chart.get_title() for chart in charts]
    assert titles[:2] == ["chat, temperature 0: tokens/s", "chat, temperature 0: speed over off"]
    assert len(charts) == 4  # two temperatures: tokens/s and ratio
    names = [chart.get_legend_handles_labels()[1] for chart in charts]
    assert names == [["off", "auto"], ["auto"]] * 2
    (auto,) = charts[1].containers
    assert list(auto.lines[0].get_ydata()) == [1.75, 1.75]
    assert [label.get_text() for label in charts[0].get_xticklabels()] == ["1", "4"]


@pytest.mark.parametrize(("suffix", "start"), [(".svg", b"<?xml"), (".PNG", b"\x89PNG")])
def test_the_suffix_of_a_plot_decides_its_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, start: bytes
) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    file = tmp_path / f"p{suffix}"
    check_plot_file(file)
    write_plot(file, fixed(), ["off", "auto"], ["off"])
    assert file.read_bytes().startswith(start)


def test_names_in_a_plot_are_text(tmp_path: Path) -> None:
    name = "<a & $b$>"
    write_plot(tmp_path / "p.svg", [result(a_round(name, 0, 10))], [name], [name])
    root = ElementTree.parse(tmp_path / "p.svg").getroot()
    assert name in {text for element in root.iter() for text in element.itertext()}


def test_a_plot_without_matplotlib_is_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidConfig, match=r"ends with \.svg or \.png"):
        check_plot_file(Path("p.pdf"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InvalidConfig, match=r"matplotlib \(pip install 'outrider\[plot\]'\)"):
        check_plot_file(Path("p.png"))
