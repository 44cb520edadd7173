"""Two processes that pack into one new directory: one of them does, and the other one is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import shardio
from tests.files import read_files
from tests.sources import encode, write_images

# Packs, and waits for a line at one point: when the source is scanned, or when the lock is held.
STOPPABLE = """
import sys
import shardio
from shardio.errors import PackError
from shardio.packing import destination, packer
source, out, point = sys.argv[1:]
def stop_after(function):
    def stopped(*args, **kwargs):
        result = function(*args, **kwargs)
        print("stopped", flush=True)
        sys.stdin.readline()
        return result
    return stopped
if point == "scanned":
    packer.scan_directory = stop_after(packer.scan_directory)
else:
    destination.begin = stop_after(destination.begin)
try:
    print(shardio.pack(source, out).num_samples)
except PackError as error:
    sys.exit(f"refused: {error}")
"""


@pytest.fixture
def sources(tmp_path: Path) -> tuple[Path, Path]:
    """Two directories of different images, 2 and 3 of them."""
    write_images(tmp_path / "two", classes=1, per_class=2)
    write_images(tmp_path / "three", classes=1, per_class=2)
    (tmp_path / "three" / "class-0" / "third.jpg").write_bytes(encode(3))
    return tmp_path / "two", tmp_path / "three"


def pack_until(point: str, source: Path, out: Path) -> subprocess.Popen[str]:
    """Start a pack, and return when it has come to a point."""
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPABLE, source, out, point],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "stopped\n"
    return process


@pytest.mark.parametrize("first", [0, 1], ids=["the smaller one waits", "the larger one waits"])
def test_a_pack_that_finishes_while_another_one_scans_is_not_replaced(
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


def test_a_pack_that_comes_while_another_one_writes_is_refused(sources: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    late = pack_until("scanned", sources[1], out)
    writing = pack_until("locked", sources[0], out)
    _, message = late.communicate("\n", timeout=60)
    assert message.startswith(f"refused: another process is packing into {out}")
    with pytest.raises(shardio.PackError, match=r"holds an unfinished pack|another process is packing"):
        shardio.pack(sources[1], out)
    assert writing.communicate("\n", timeout=60)[0] == "2\n"
    assert sorted(read_files(out)) == ["shard-000000.tar", "shard-000000.tar.idx", "shardio.json"]
