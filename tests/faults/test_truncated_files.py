"""Truncated files, systems without a writable /dev/shm, and runs whose working directory is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardio
from shardio import FormatError, SampleError, ShardWriter
from tests.raising import assert_raises
from tests.sources import write_images

NUM_SAMPLES = 32_000  # With fewer samples, the index would be kept in memory.


@pytest.fixture(scope="module")
def long_tar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    with ShardWriter(folder, max_shard_samples=NUM_SAMPLES) as writer:
        for i in range(NUM_SAMPLES):
            writer.write({"__key__": f"{i:05d}", "txt": str(i)})
    return folder / "shard-000000.tar"


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", [shardio.DataLoader, torch.utils.data.DataLoader])
@pytest.mark.parametrize(("suffix", "error"), [("", SampleError), (".idx", FormatError)])
def test_a_process_outlives_the_truncation_of_what_it_reads(
    long_tar: Path, suffix: str, error: type[Exception], kind: Any, num_workers: int
) -> None:
    path = Path(f"{long_tar}{suffix}")
    content, keys = path.read_bytes(), list[str]()
    dataset = shardio.ShardDataset(long_tar, fields=("key", "txt"), batch_size=16)

    def read() -> None:
        for batch, _ in kind(dataset, batch_size=16, num_workers=num_workers, timeout=60 * num_workers):
            keys.extend(batch)
            if len(keys) == 16:
                os.truncate(path, 1000)

    try:
        assert_raises(error, f"{path} ends at byte 1000", read)
    finally:
        path.write_bytes(content)
    assert 16 <= len(keys) < NUM_SAMPLES


WITHOUT_SHM = """
import sys
import shardio
from torch.utils.data import default_collate
packed, images = sys.argv[1:]
datasets = [shardio.ShardDataset(packed), shardio.ShardMapDataset(packed), shardio.ImageFolder(images)]
for dataset in datasets:
    sizes = [len(labels) for _, labels in shardio.DataLoader(dataset, batch_size=4, num_workers=1)]
    assert sum(sizes) == 21, sizes
    here = shardio.DataLoader(dataset, batch_size=4, collate_fn=default_collate)
    assert sum(len(labels) for _, labels in here) == 21
    try:
        loader = shardio.DataLoader(dataset, batch_size=4, num_workers=1, worker_init_fn=lambda worker_id: None)
        assert sum(len(labels) for _, labels in loader) == 21
        print("worked")
    except OSError as error:
        print(error)
"""

# Simulate a read-only /dev/shm where the test cannot mount one: raise the errors that torch and multiprocessing raise.
STAND_IN = """
import errno, multiprocessing, torch
def refuse(*args, **kwargs):
    raise OSError(errno.EROFS, "Read-only file system")
torch.UntypedStorage._share_fd_cpu_ = torch.UntypedStorage._share_filename_cpu_ = refuse
import multiprocessing.synchronize
multiprocessing.synchronize.SemLock.__init__ = refuse
"""


@pytest.mark.slow
def test_without_shared_memory_files_all_workers_work(packed: Path, images: Path) -> None:
    mounted = ["unshare", "--map-root-user", "--mount", "sh", "-c", 'mount -t tmpfs -o ro none /dev/shm && "$@"', "sh"]
    can_mount = subprocess.run([*mounted, "true"], check=False, capture_output=True).returncode == 0
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_SHM if can_mount else STAND_IN + WITHOUT_SHM]
    done = subprocess.run(
        [*(mounted if can_mount else []), *command, packed, images], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["worked"] * 3


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (shardio.ShardMapDataset, {}),
        (shardio.ShardDataset, {"num_workers": 1}),
        (shardio.ImageFolder, {"num_workers": 1}),
        # Python 3.14 would start torch's workers from a fork server, which needs the working directory.
        (shardio.ShardDataset, {"num_workers": 1, "multiprocessing_context": "fork"}),
    ],
)
def test_a_run_outlives_its_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Any], options: dict[str, Any]
) -> None:
    write_images(tmp_path / "in", classes=2, per_class=3)
    shardio.pack(tmp_path / "in", tmp_path / "out", max_shard_samples=2)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    dataset = make(Path("..") / ("in" if make is shardio.ImageFolder else "out"))
    (tmp_path / "here").rmdir()
    with pytest.raises(FileNotFoundError):
        os.getcwd()  # noqa: PTH109  # Path.cwd calls this
    assert dataset.digest == make(tmp_path / ("in" if make is shardio.ImageFolder else "out")).digest
    loader = shardio.DataLoader(dataset, batch_size=2, **options)
    labels = [label for _, labels in loader for label in labels.tolist()]
    assert sorted(labels) == [0, 0, 0, 1, 1, 1]


def test_a_folders_identity_does_not_depend_on_how_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "in", classes=2, per_class=2)
    monkeypatch.chdir(tmp_path / "in")
    names = [".", "../in", "class-0/..", f"{tmp_path}/in/", str(tmp_path / "in"), "./"]
    assert {shardio.ImageFolder(name).digest for name in names} == {"6e750f8734ecd4658aa7a56e3c5b8f33"}
