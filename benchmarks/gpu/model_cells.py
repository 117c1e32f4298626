"""Cells of a model: its costs, the device's own time, the engine's loop, and mlx-lm for comparison."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx

from benchmarks.gpu.bare import BareTime, bytes_a_step, measure_bare
from benchmarks.gpu.interleaved import Arm, compare, speed_ratio
from benchmarks.gpu.loop import Load, Loop, TimedRun
from benchmarks.gpu.machine_cells import Machine
from benchmarks.gpu.mlx_lm_loop import mlx_lm_turn
from benchmarks.gpu.scripted import AcceptanceScript, scripted
from benchmarks.gpu.settings import CellResult, CellSettings, median, say
from benchmarks.gpu.weights import BITS, Subject
from benchmarks.gpu.wide_passes import WidePasses
from outrider.bench.statistics import Spread
from outrider.models.machine import outruns_host
from outrider.request import DraftDepth
from outrider.speculate import calibration
from outrider.speculate.controller import DepthController
from outrider.speculate.costs import CostTable, MeasuredCosts

LONGEST = 6000  # prompt tokens of one row beside shorter ones
BLOCKS_ACCEPT = 0.7  # of the drafts, in the cells that compare slots and blocks
BLOCKS_PARTS = 4  # parts of a round in these cells: loops take turns more often


def names_of(model: str, dtype: str, settings: CellSettings) -> list[str]:
    """The names of a model's cells. Does not load the model."""
    names = ["about", "costs", *(["wide"] if dtype in BITS else [])]
    for rows in settings.rows:
        names.append(f"bare/rows={rows}")
        names += [f"loop/rows={rows}/accept={percent}" for percent in settings.accept]
        if settings.temperature == 0:
            names.append(f"mlx-lm/rows={rows}")
            for depth in (0, *settings.depths):
                names += [f"blocks/rows={rows}/depth={depth}/longest={num}" for num in (0, LONGEST)]
    return [f"{model}/{dtype}/{name}" for name in names]


class ModelCells:
    """Cells of one loaded model."""

    def __init__(self, subject: Subject, settings: CellSettings, machine: Machine) -> None:
        self._subject = subject
        self._settings = settings
        self._machine = machine
        self._bare: dict[tuple[int, int], BareTime] = {}
        self._measured: MeasuredCosts | None = None

    def run(self, name: str) -> CellResult:
        """`name` is one of names_of()."""
        kind, *rest = name.split("/")[2:]
        values = dict(part.split("=") for part in rest)
        rows = int(values.get("rows", 0))
        if kind == "loop":
            return self._loop_cell(rows, int(values["accept"]))
        if kind == "blocks":
            return self._blocks_cell(rows, int(values["depth"]), int(values["longest"]))
        if kind in ("bare", "mlx-lm"):
            return self._bare_cell(rows) if kind == "bare" else self._mlx_lm_cell(rows)
        if kind == "wide":
            return WidePasses(self._subject).cell()
        return self._about() if kind == "about" else self._costs().as_json()

    def _about(self) -> CellResult:
        subject = self._subject
        found = {
            "parameters": subject.num_parameters,
            "bytes": subject.trunk.num_bytes,
            "bytes_a_token": subject.bytes_read(1),
            "head_bytes": subject.head_bytes,
            "projection_bytes": subject.projection_bytes,
            "active_bytes": mx.get_active_memory(),
            "head": subject.head.source,
        }
        say(
            f"{subject.name} {subject.dtype}: {found['parameters'] / 1e9:.3f} G parameters, "
            f"{found['bytes_a_token'] / 1e9:.3f} GB read a token "
            f"(projection {found['projection_bytes'] / 1e9:.3f}), head {found['head_bytes'] / 1e9:.3f} GB, "
            f"floor {1e3 * found['bytes_a_token'] / self._machine.bytes_per_s:.3f} ms"
        )
        return found

    def _costs(self) -> MeasuredCosts:
        if self._measured is None:
            trunk, loop = self._subject.trunk, Loop(self._subject)
            clock = time.process_time if mx.default_device() == mx.Device(mx.cpu) else time.perf_counter
            found = calibration.measure(
                loop.runner,
                trunk.vocab_size,
                max(self._settings.rows),
                trunk.max_context,
                loop.budget_bytes,
                clock=clock,
            )
            if found is None:
                raise RuntimeError("not even one row fits into the memory for caches")
            self._measured = found
            _tell_costs(found)
        return self._measured

    def _controller(self) -> DepthController:
        """Built as an engine on this machine builds it."""
        return DepthController(CostTable(self._costs()), few_shapes=outruns_host())

    # -- the device's own time ---------------------------------------------------------------------------

    def _bare_time(self, rows: int, depth: int) -> BareTime:
        if (rows, depth) not in self._bare:
            share = self._settings.seconds / (1 + len(self._settings.depths))
            self._bare[rows, depth] = measure_bare(self._subject, rows, depth, self._num_cells, share)
            gc.collect()  # a traced step is part of a reference cycle
            mx.clear_cache()
        return self._bare[rows, depth]

    @property
    def _num_cells(self) -> int:
        return self._settings.num_prompt + 32

    def _floor_s(self, rows: int, depth: int) -> float:
        return bytes_a_step(self._subject, rows, depth, self._num_cells) / self._machine.bytes_per_s

    def _bare_cell(self, rows: int) -> CellResult:
        found: CellResult = {}
        for depth in (0, *self._settings.depths):
            time_, floor = self._bare_time(rows, depth), self._floor_s(rows, depth)
            plain = self._bare_time(rows, 0)
            found[str(depth)] = {
                "built_ms": 1e3 * time_.built_s,
                "launched_ms": 1e3 * time_.launched_s,
                "floor_ms": 1e3 * floor,
                "cost_ratio": time_.built_s / plain.built_s,
            }
            say(
                f"  bare  rows {rows:3d} depth {depth}  {1e3 * time_.built_s:8.3f} ms "
                f"(launched one by one {1e3 * time_.launched_s:8.3f}), floor {1e3 * floor:8.3f} ms, "
                f"cost ratio {time_.built_s / plain.built_s:.3f}"
            )
        return found

    # -- the engine's loop -------------------------------------------------------------------------------

    def _loop_cell(self, rows: int, percent: int) -> CellResult:
        """All depths take turns with the same script. Each round gives one ratio to depth 0."""
        controller = self._controller()
        policies: list[DraftDepth] = [0, *self._settings.depths, "auto"]
        turns: dict[DraftDepth, list[TimedRun]] = {policy: [] for policy in policies}
        with scripted(AcceptanceScript(percent / 100)):
            loop = Loop(self._subject)  # a new one: compiled passes have the old script built in
            for number in range(
                -1, self._settings.rounds
            ):  # the first round compiles and trains auto; it is not counted
                shift = number % len(policies)
                for policy in policies[shift:] + policies[:shift]:
                    turn = loop.turn(policy, self._load(rows, len(policies)), controller)
                    if number >= 0:
                        turns[policy].append(turn)
        found: CellResult = {}
        for policy in policies:
            found[str(policy)] = self._told(rows, percent, policy, turns)
        return found

    def _load(self, rows: int, num_policies: int) -> Load:
        own = self._settings
        seconds = own.seconds / num_policies / (1 + own.rounds)
        return Load(rows, own.num_prompt, own.steps, seconds, own.temperature)

    def _told(
        self, rows: int, percent: int, policy: DraftDepth, turns: dict[DraftDepth, list[TimedRun]]
    ) -> CellResult:
        own = turns[policy]
        pairs = zip(own, turns[0], strict=True)
        ratio = Spread.of([a.tokens_per_s / b.tokens_per_s for a, b in pairs])
        assert ratio is not None
        step_s, stride = median(t.step_s for t in own), median(t.stride for t in own)
        found: CellResult = {
            "step_ms": 1e3 * step_s,
            "tokens_per_s": median(t.tokens_per_s for t in own),
            "stride": stride,
            "mean_depth": median(t.mean_depth for t in own),
            "ratio": [ratio.median, ratio.least, ratio.most],
            "host_ms": {
                name: 1e3 * median(vars(t.spent)[name] / t.steps for t in own) for name in vars(own[0].spent)
            },
            "busy_ms": 1e3 * median(t.busy_s / t.steps for t in own),
            "turns": [t.as_json() for t in own],
        }
        line = (
            f"  loop  rows {rows:3d} accept {percent}% depth {policy!s:>4}  {1e3 * step_s:8.3f} ms/step  "
            f"{found['tokens_per_s']:8.1f} tok/s  stride {stride:.2f}  ratio {ratio.text(2)}  "
            f"busy {found['busy_ms']:.3f} ms of"
        )
        line += "".join(f" {name[:-2]} {ms:.3f}" for name, ms in found["host_ms"].items())
        if policy == "auto":
            best = max(median(t.tokens_per_s for t in each) for each in turns.values())
            found["of_best"] = found["tokens_per_s"] / best
            line += f"  mean depth {found['mean_depth']:.2f}, {100 * found['of_best']:.0f}% of the best"
        else:
            found |= self._against_bare(rows, policy, step_s, ratio.median, stride)
            line += "  bare {bare_ms:.3f} ms, waits {waits_share:.1%}, floor {floor_ms:.3f} ms".format(
                **found
            )
            if policy:
                line += "  cost ratio {cost_ratio:.3f}, efficiency {efficiency:.1%}".format(**found)
        say(line)
        return found

    def _against_bare(
        self, rows: int, depth: int, step_s: float, speedup: float, stride: float
    ) -> CellResult:
        """efficiency: the speed-up over its upper bound, which is stride / cost ratio of the drafts."""
        own, plain = self._bare_time(rows, depth).built_s, self._bare_time(rows, 0).built_s
        return {
            "bare_ms": 1e3 * own,
            "floor_ms": 1e3 * self._floor_s(rows, depth),
            "waits_share": (step_s - own) / step_s,  # share of the step in which the device is idle
            "cost_ratio": own / plain,
            "efficiency": speedup / (stride / (own / plain)),
        }

    # -- slots and blocks --------------------------------------------------------------------------------

    def _blocks_cell(self, rows: int, depth: int, longest: int) -> CellResult:
        """Cells in slots, in blocks, and in blocks of 8 bits, interleaved. `longest`: of the first prompt."""
        controller = DepthController(few_shapes=outruns_host())  # depths are fixed: no costs are needed
        load = replace(self._load(rows, 3), longest_prompt=longest)
        with scripted(AcceptanceScript(BLOCKS_ACCEPT)):
            arms = {
                "slots": Arm(Loop(self._subject)),
                "8 bits": Arm(Loop(self._subject, in_blocks=True, kv_bits=8)),
                "blocks": Arm(Loop(self._subject, in_blocks=True)),
            }
            compare(arms, depth, load, controller, BLOCKS_PARTS * self._settings.rounds)
        found: CellResult = {}
        for name, arm in arms.items():
            found[name] = {"step_ms": arm.step_ms, "fast_ms": arm.fast_ms}
            line = (
                f"  blocks  rows {rows:3d} x {load.num_prompt}, longest {longest}, depth {depth}  {name:6s} "
            )
            line += f"{arm.step_ms:8.3f} ms/step"
            for other in ("slots", "blocks"):
                own = speed_ratio(arm, arms[other])
                found[name][f"to_{other}"] = [own.median, own.low, own.high]
                line += f", / {other} {own.text}"
            say(line)
        return found

    # -- mlx-lm ------------------------------------------------------------------------------------------

    def _mlx_lm_cell(self, rows: int) -> CellResult:
        """Depth 0 and mlx-lm's generator take turns."""
        controller = self._controller()
        load, loop = self._load(rows, 2), Loop(self._subject)
        arms: dict[str, Callable[[], TimedRun]] = {
            "ours": lambda: loop.turn(0, load, controller),
            "mlx_lm": lambda: mlx_lm_turn(self._subject, load),
        }
        turns: dict[str, list[TimedRun]] = {"ours": [], "mlx_lm": []}
        for number in range(-1, self._settings.rounds):  # the first round is not counted
            for name in list(arms) if number % 2 else list(reversed(arms)):
                turn = arms[name]()
                mx.clear_cache()
                if number >= 0:
                    turns[name].append(turn)
        pairs = zip(turns["ours"], turns["mlx_lm"], strict=True)
        ratio = Spread.of([a.tokens_per_s / b.tokens_per_s for a, b in pairs])
        assert ratio is not None
        paces = {name: median(t.tokens_per_s for t in each) for name, each in turns.items()}
        say(
            f"  mlx-lm  rows {rows:3d}  ours {paces['ours']:8.1f} tok/s, mlx-lm {paces['mlx_lm']:8.1f}, "
            f"ratio {ratio.text(3)}"
        )
        return {
            "tokens_per_s": paces,
            "ratio": [ratio.median, ratio.least, ratio.most],
            "turns": {name: [t.as_json() for t in each] for name, each in turns.items()},
        }


def _tell_costs(found: MeasuredCosts) -> None:
    for rows in sorted({rows for rows, _ in found.trunk_s}):
        widths = sorted(width for r, width in found.trunk_s if r == rows)
        line = "  ".join(f"{width}: {1e3 * found.trunk_s[rows, width]:.2f}" for width in widths)
        cost = found.head.get(rows)
        if cost is not None:
            parts = (1e3 * s for s in (cost.feed_s, cost.first_s, cost.each_s))
            line += "   head feed {:.2f}, first {:.2f}, each {:.2f}".format(*parts)
        say(f"  costs  rows {rows:3d}  ms by width  {line}")
