"""Affinity masks and control groups limit the number of processors, which only one module counts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardio import process
from shardio.process import count_processors


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="affinity masks are Linux's")
def test_the_affinity_mask_counts() -> None:
    code = (
        "import os; from shardio.process import count_processors as c;"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print(c())"
    )
    root = str(Path(process.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout == "1\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def limit(folder: str, quota: str) -> dict[str, str]:
    """Return the files of a process in the group a/b, if a folder of the hierarchy has a quota."""
    return {"proc/self/cgroup": "0::/a/b\n" if folder else "0::/\n", f"sys/fs/cgroup/{folder}cpu.max": f"{quota}\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/\n"}, 8),
        (limit("", "max 100000"), 8),
        (limit("", "200000 100000"), 2),
        (limit("", "150000 100000"), 2),
        (limit("", "10000 100000"), 1),
        (limit("", "6400000 100000"), 8),
        (limit("a/", "300000 100000"), 3),
        ({**limit("a/", "300000 100000"), **limit("a/b/", "max 100000")}, 3),
        (
            {
                "proc/self/cgroup": "3:cpuset:/\n2:cpu,cpuacct:/docker/x\n",
                "sys/fs/cgroup/cpu/docker/x/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu/docker/x/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
    ],
)
def test_the_quota_of_each_control_group_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int
) -> None:
    root, quotas = write(tmp_path, files), process._quotas
    monkeypatch.setattr(process, "_quotas", lambda _: quotas(root))
    if hasattr(os, "process_cpu_count"):
        monkeypatch.setattr(os, "process_cpu_count", lambda: 8)
    elif hasattr(os, "sched_getaffinity"):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    else:
        monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert count_processors() == expected


def test_one_module_counts_processors() -> None:
    package = Path(process.__file__).parent
    words = ("cpu_count", "sched_getaffinity")
    files = [path for folder in (package, package.parent / "benchmarks") for path in folder.rglob("*.py")]
    found = {path for path in files if any(word in path.read_text() for word in words)}
    assert found == {package / "process.py"}
