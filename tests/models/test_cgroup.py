"""The container's memory limit, read from made-up control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.models import cgroup, machine


def world(tmp_path: Path, groups: str, files: dict[str, str]) -> tuple[Path, Path]:
    """Folders that stand for /proc and /sys/fs/cgroup."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(groups)
    for name, text in files.items():
        file = tmp_path / "sys" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return tmp_path / "proc", tmp_path / "sys"


V1_NO_LIMIT = {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "5"}


@pytest.mark.parametrize(
    ("groups", "files", "free"),
    [
        pytest.param("0::/\n", {"memory.max": "1000", "memory.current": "300"}, 700, id="v2"),
        pytest.param("0::/\n", {"memory.max": "max", "memory.current": "300"}, None, id="v2 without a limit"),
        pytest.param(
            "0::/\n",
            {"memory.max": "1000", "memory.current": "900", "memory.stat": "anon 5\ninactive_file 600"},
            700,
            id="v2: pages of files that were read can be dropped",
        ),
        pytest.param(
            "0::/a/b\n",
            {
                "a/b/memory.max": "max",
                "a/b/memory.current": "1",
                "a/memory.max": "50",
                "a/memory.current": "20",
            },
            30,
            id="v2: limit of a parent",
        ),
        pytest.param(
            "4:memory:/docker/1\n3:cpu:/x\n",
            {"memory/memory.limit_in_bytes": "1000", "memory/memory.usage_in_bytes": "400"},
            600,
            id="v1, seen from inside of the container",
        ),
        pytest.param("4:memory:/\n", V1_NO_LIMIT, None, id="v1 without a limit"),
        pytest.param("0::/\n", {"memory.max": "10", "memory.current": "20"}, 0, id="over the limit"),
        pytest.param("", {}, None, id="no groups"),
    ],
)
def test_free_memory_of_a_container(
    tmp_path: Path, groups: str, files: dict[str, str], free: int | None
) -> None:
    assert cgroup.free_bytes(*world(tmp_path, groups, files)) == free


def test_no_control_groups_at_all(tmp_path: Path) -> None:
    assert cgroup.free_bytes(tmp_path, tmp_path) is None


def test_default_budget_is_within_the_limit_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "free_bytes", lambda: 200 << 20)
    assert machine.free_bytes() == 200 << 20


def test_on_apples_gpus_the_recommended_working_set_is_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    info = {"max_recommended_working_set_size": 10 << 30, "memory_size": 16 << 30}
    monkeypatch.setattr(machine, "is_cpu", lambda: False)
    monkeypatch.setattr(machine.mx, "device_info", lambda: info)
    monkeypatch.setattr(machine.mx, "get_active_memory", lambda: 4 << 30)
    assert machine.free_bytes() == 6 << 30


@pytest.mark.parametrize(("free_gib", "expected_gib"), [(50, 51), (200, 90), (0, 1)])
def test_on_cuda_what_other_processes_take_is_not_free(
    free_gib: int, expected_gib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = {"total_memory": 100 << 30, "free_memory": free_gib << 30}
    monkeypatch.setattr(machine, "is_cpu", lambda: False)
    monkeypatch.setattr(machine.mx, "device_info", lambda: info)
    monkeypatch.setattr(machine.mx, "get_active_memory", lambda: 10 << 30)
    monkeypatch.setattr(machine.mx, "get_cache_memory", lambda: 1 << 30)
    assert machine.free_bytes() == expected_gib << 30
