"""A pack that is killed at any moment leaves nothing that looks finished, and the same call resumes it."""

from __future__ import annotations

import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

import shardio
from shardio.errors import PackError
from tests.files import read_files
from tests.sources import write_images
from tests.tars import read_members

# Packs, and kills its own process right before or after the n-th file is renamed into place.
PACK_AND_DIE = """
import os, pathlib, signal, sys
source, out, n, moment = sys.argv[1:]
replace, calls = pathlib.Path.replace, []
def replace_and_die(path, target):
    calls.append(target)
    if len(calls) == int(n) and moment == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    replace(path, target)
    if len(calls) == int(n) and moment == "after":
        os.kill(os.getpid(), signal.SIGKILL)
pathlib.Path.replace = replace_and_die
import shardio
shardio.pack(source, out, max_shard_samples=3, num_workers=1)
"""

NUM_RENAMES = 11
"""Renames in a pack into three shards: the plan's digest; three tars, each with its index and record; the manifest."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kill") / "in"
    write_images(root, classes=3, per_class=3, width=8, height=8)
    return root


@pytest.fixture(scope="module")
def uninterrupted(source: Path) -> dict[str, bytes]:
    out = source.parent / "uninterrupted"
    shardio.pack(source, out, max_shard_samples=3)
    return read_files(out)


def assert_only_whole_files(out: Path, uninterrupted: dict[str, bytes]) -> None:
    """Assert that each file with a final name is as an uninterrupted pack writes it, and that tars end properly."""
    for name, content in read_files(out).items():
        if not name.startswith("."):
            assert content == uninterrupted[name]
    for path in out.glob("shard-*.tar"):
        assert path.read_bytes().endswith(bytes(1024))
        assert read_members(path)


@pytest.mark.parametrize("n", range(1, NUM_RENAMES + 1))
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_pack_killed_at_any_rename_can_be_resumed(
    source: Path, uninterrupted: dict[str, bytes], tmp_path: Path, n: int, moment: str
) -> None:
    out = tmp_path / "out"
    killed = subprocess.run([sys.executable, "-c", PACK_AND_DIE, source, out, str(n), moment], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert_only_whole_files(out, uninterrupted)
    is_committed = (n, moment) == (NUM_RENAMES, "after")
    assert (out / "shardio.json").exists() == is_committed
    if n > 1:
        with pytest.raises(PackError, match=r"unfinished pack of different images|already holds a packed dataset"):
            shardio.pack(source, out, max_shard_samples=4)
    shardio.pack(source, out, max_shard_samples=3)
    assert read_files(out) == uninterrupted


def test_the_test_above_covers_every_rename(source: Path, tmp_path: Path) -> None:
    n = str(NUM_RENAMES + 1)
    done = subprocess.run([sys.executable, "-c", PACK_AND_DIE, source, tmp_path, n, "before"], check=True)
    assert done.returncode == 0


def test_resuming_does_not_rewrite_finished_shards(source: Path, tmp_path: Path) -> None:
    """They remain the same files, not equal ones."""
    subprocess.run([sys.executable, "-c", PACK_AND_DIE, source, tmp_path, "7", "after"], check=False)
    finished = {path.name: path.stat().st_ino for path in tmp_path.glob("shard-*")}
    assert len(finished) == 4
    shardio.pack(source, tmp_path, max_shard_samples=3)
    assert {name: (tmp_path / name).stat().st_ino for name in finished} == finished


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("many") / "in"
    write_images(root, classes=4, per_class=100, width=8, height=8)
    return root


@pytest.mark.parametrize("num_shards", [0, 1, 40, 100])
def test_a_pack_killed_from_outside_leaves_only_whole_shards(many: Path, tmp_path: Path, num_shards: int) -> None:
    """The pack is killed as soon as so many of its 200 shards exist."""
    out, whole = tmp_path / "out", tmp_path / "whole"
    command = [
        sys.executable,
        "-m",
        "shardio",
        "pack",
        str(many),
        str(out),
        "--max-shard-samples",
        "2",
        "--num-workers",
        "2",
    ]
    process = subprocess.Popen([*command, "--quiet"])
    while len(list(out.glob("shard-*.tar"))) < num_shards or not out.exists():
        assert process.poll() is None, "the pack finished before it could be killed"
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    shardio.pack(many, whole, max_shard_samples=2)
    uninterrupted = read_files(whole)
    assert len(uninterrupted) == 401
    assert "shardio.json" not in read_files(out)
    assert len(list(out.glob("shard-*.tar"))) >= num_shards
    assert_only_whole_files(out, uninterrupted)
    subprocess.run([*command, "--quiet"], check=True)
    assert read_files(out) == uninterrupted


def test_a_pack_interrupted_by_ctrl_c_leaves_only_whole_shards(many: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shardio", "pack", str(many), str(tmp_path), "--max-shard-samples", "2", "--quiet"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while len(list(tmp_path.glob("shard-*.tar"))) < 10:
        assert process.poll() is None, "the pack finished before it could be interrupted"
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    message = process.communicate()[1]
    assert process.returncode != 0
    assert "Traceback" not in message
    assert not (tmp_path / "shardio.json").exists()
    for path in tmp_path.glob("shard-*.tar"):
        with tarfile.open(path) as tar:
            assert len(tar.getnames()) == 4
    assert shardio.pack(many, tmp_path, max_shard_samples=2).num_samples == 400
