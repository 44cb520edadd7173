"""A pack that is killed, at any moment, leaves nothing that looks finished, and is gone on with by the same call."""

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

# Packs, and kills itself right before or after the n-th file is renamed into place.
SUICIDE = """
import os, pathlib, signal, sys
source, out, number, moment = sys.argv[1:]
replace, calls = pathlib.Path.replace, []
def replace_and_die(path, target):
    calls.append(target)
    if len(calls) == int(number) and moment == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    replace(path, target)
    if len(calls) == int(number) and moment == "after":
        os.kill(os.getpid(), signal.SIGKILL)
pathlib.Path.replace = replace_and_die
import shardio
shardio.pack(source, out, max_shard_samples=3, num_workers=1)
"""

NUM_RENAMES = 11
"""Of a pack into three shards: the plan's note, three tars with their indexes and notes, the manifest."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kill") / "in"
    write_images(root, classes=3, per_class=3, width=8, height=8)
    return root


@pytest.fixture(scope="module")
def undisturbed(source: Path) -> dict[str, bytes]:
    out = source.parent / "undisturbed"
    shardio.pack(source, out, max_shard_samples=3)
    return read_files(out)


def assert_only_whole_files(out: Path, undisturbed: dict[str, bytes]) -> None:
    """Whatever has a final name is what an undisturbed pack wrote, and tarfile reads it to its end."""
    for name, content in read_files(out).items():
        if not name.startswith("."):
            assert content == undisturbed[name]
    for path in out.glob("shard-*.tar"):
        assert path.read_bytes().endswith(bytes(1024))
        assert read_members(path)


@pytest.mark.parametrize("number", range(1, NUM_RENAMES + 1))
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_pack_killed_at_any_rename_is_gone_on_with(
    source: Path, undisturbed: dict[str, bytes], tmp_path: Path, number: int, moment: str
) -> None:
    out = tmp_path / "out"
    killed = subprocess.run([sys.executable, "-c", SUICIDE, source, out, str(number), moment], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert_only_whole_files(out, undisturbed)
    is_committed = (number, moment) == (NUM_RENAMES, "after")
    assert (out / "shardio.json").exists() == is_committed
    if number > 1:
        with pytest.raises(PackError, match=r"unfinished pack of other images|already holds a packed dataset"):
            shardio.pack(source, out, max_shard_samples=4)
    shardio.pack(source, out, max_shard_samples=3)
    assert read_files(out) == undisturbed


def test_the_test_above_dies_at_every_rename(source: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SUICIDE, source, tmp_path, str(NUM_RENAMES + 1), "before"], check=True)
    assert done.returncode == 0


def test_a_pack_is_not_begun_again_by_the_call_that_goes_on_with_it(source: Path, tmp_path: Path) -> None:
    """Shards that were finished stay as they are: the same file, not an equal one."""
    subprocess.run([sys.executable, "-c", SUICIDE, source, tmp_path, "7", "after"], check=False)
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
    """Killed as soon as so many of its 200 shards are there."""
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
        assert process.poll() is None, "it was through before it could be killed"
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    shardio.pack(many, whole, max_shard_samples=2)
    undisturbed = read_files(whole)
    assert len(undisturbed) == 401
    assert "shardio.json" not in read_files(out)
    assert len(list(out.glob("shard-*.tar"))) >= num_shards
    assert_only_whole_files(out, undisturbed)
    subprocess.run([*command, "--quiet"], check=True)
    assert read_files(out) == undisturbed


def test_a_pack_that_is_interrupted_leaves_only_whole_shards(many: Path, tmp_path: Path) -> None:
    """As by Ctrl-C."""
    command = [sys.executable, "-m", "shardio", "pack", str(many), str(tmp_path), "--max-shard-samples", "2", "--quiet"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while len(list(tmp_path.glob("shard-*.tar"))) < 10:
        assert process.poll() is None, "it was through before it could be interrupted"
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
