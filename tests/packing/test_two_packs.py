"""Two processes that pack into the same new directory: one succeeds, the other one is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import shardio
from tests.files import read_files
from tests.sources import encode, write_images

# Packs, and waits for a line of input at one point: after the scan, or while it holds the lock.
PACK_AND_WAIT = """
import sys
import shardio
from shardio.errors import PackError
from shardio.packing import packer
source, out, point = sys.argv[1:]
def wait_after(function):
    def call_and_wait(*args, **kwargs):
        result = function(*args, **kwargs)
        print("waiting", flush=True)
        sys.stdin.readline()
        return result
    return call_and_wait
if point == "scanned":
    packer.scan_source = wait_after(packer.scan_source)
else:
    packer._write_shards = wait_after(packer._write_shards)
try:
    print(shardio.pack(source, out).num_samples)
except PackError as error:
    sys.exit(f"refused: {error}")
"""


@pytest.fixture
def sources(tmp_path: Path) -> tuple[Path, Path]:
    """Two directories of different images: one has 2, the other has 3."""
    write_images(tmp_path / "two", classes=1, per_class=2)
    write_images(tmp_path / "three", classes=1, per_class=2)
    (tmp_path / "three" / "class-0" / "third.jpg").write_bytes(encode(3))
    return tmp_path / "two", tmp_path / "three"


def pack_until(point: str, source: Path, out: Path) -> subprocess.Popen[str]:
    """Start a pack, and return when it has reached a point."""
    process = subprocess.Popen(
        [sys.executable, "-c", PACK_AND_WAIT, source, out, point],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    return process


@pytest.mark.parametrize("first", [0, 1], ids=["the smaller one waits", "the larger one waits"])
def test_a_pack_that_finishes_while_another_one_scans_is_not_overwritten(
    sources: tuple[Path, Path], tmp_path: Path, first: int
) -> None:
    out = tmp_path / "out"
    waiting = pack_until("scanned", sources[first], out)
    manifest = shardio.pack(sources[1 - first], out)
    packed = read_files(out)
    _, message = waiting.communicate("\n", timeout=60)
    assert waiting.returncode == 1
    assert message.startswith(f"refused: {out} already holds a packed dataset")
    assert read_files(out) == packed
    assert len(shardio.ShardDataset(out)) == manifest.num_samples


def test_a_pack_that_starts_writing_while_another_one_writes_is_refused(
    sources: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    late = pack_until("scanned", sources[1], out)
    writing = pack_until("locked", sources[0], out)
    _, message = late.communicate("\n", timeout=60)
    assert message.startswith(f"refused: another process is writing to {out}")
    with pytest.raises(shardio.PackError, match=r"holds an unfinished pack|another process is writing"):
        shardio.pack(sources[1], out)
    assert writing.communicate("\n", timeout=60)[0] == "2\n"
    assert sorted(read_files(out)) == ["shard-000000.tar", "shard-000000.tar.idx", "shardio.json"]
