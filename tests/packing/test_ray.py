"""A pack on a Ray cluster writes the same bytes as one process. Runs on a cluster of real processes on this machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardio.errors import PackError
from shardio.packing import PackResult, PackSettings, RunOptions, pack_source
from shardio.progress import WorkProgress
from tests.files import read_files
from tests.sources import write_images

ray: Any = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster to which this process is connected."""
    context = ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield context.address_info["gcs_address"]
    ray.shutdown()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ray") / "in"
    write_images(root, classes=2, per_class=5, width=8, height=8)
    (root / "class-0" / "broken.jpg").write_bytes(b"no image")
    return root


@pytest.fixture(scope="module")
def alone(source: Path) -> dict[str, bytes]:
    """What one process writes."""
    pack(source, source.parent / "alone", engine="processes", num_workers=1)
    return read_files(source.parent / "alone")


def pack(source: Path, out: Path, **options: Any) -> PackResult:
    settings = PackSettings(max_shard_size=1 << 30, max_shard_samples=3)
    progress = options.pop("progress", None)
    return pack_source(source, out, settings, run=RunOptions(**{"engine": "ray", **options}), progress=progress)


class Missing(WorkProgress):
    """Moves a file away while the pack is planned."""

    def __init__(self, path: Path, to: Path) -> None:
        self._path, self._to = path, to

    def start(self, total: int, num_bytes: int | None = None) -> None:
        self._path.rename(self._to)


@pytest.mark.usefixtures("cluster")
def test_the_bytes_are_those_of_one_process(
    source: Path, alone: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = pack(source, Path("out"))  # Tasks run in other directories.
    assert read_files(tmp_path / "out") == alone
    assert [sample.key for sample in result.rejected] == ["class-0/broken"]


@pytest.mark.usefixtures("cluster")
def test_an_error_in_a_task_names_the_file_and_the_pack_can_be_resumed_anywhere(
    source: Path, alone: dict[str, bytes], tmp_path: Path
) -> None:
    path, elsewhere = source / "class-1" / "name-003.jpg", tmp_path / "elsewhere.jpg"
    with pytest.raises(PackError, match=r"class-1/name-003\.jpg is missing"):
        pack(source, tmp_path / "out", num_workers=1, progress=Missing(path, elsewhere))
    elsewhere.rename(path)
    pack(source, tmp_path / "out", engine="processes")
    assert read_files(tmp_path / "out") == alone


def test_the_command_packs_on_a_running_cluster(
    cluster: str, source: Path, alone: dict[str, bytes], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "shardio", "pack", str(source), "out", "--max-shard-samples", "3"]
    options = ["--max-shard-size", "1GiB", "--engine", "ray", "--address", cluster]
    subprocess.run([*command, *options], cwd=tmp_path, check=True, capture_output=True)
    assert read_files(tmp_path / "out") == alone
