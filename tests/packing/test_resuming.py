"""A pack that stops at any moment leaves nothing that looks finished. The same call resumes the pack and keeps its
finished shards."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio.errors import PackError
from shardio.files import find_target
from shardio.packing import JpegMode, PackOptions, executors, pack_call
from shardio.packing.folders import JOURNAL_NAME
from shardio.sample import Sample
from shardio.shards import write_shard
from shardio.storage import Location
from tests.cli.commands import run
from tests.files import files_of_at_most, flip, read_files
from tests.packing import packs
from tests.packing.packs import Change, Interrupt, assert_refused, exit_code_if_killed, pack
from tests.raising import assert_raises
from tests.sources import write_images
from tests.tars import read_members, write_tar


def test_an_option_at_its_default_leaves_packs_of_earlier_versions_resumable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PackOptions().identify(["cat"]) == (
        b"(PackSettings(max_shard_size=268435456, max_shard_samples=None, shuffle_seed=0, check=True, jpeg='copy', "
        b"convert_to=None, max_side=None, quality=None, to_srgb=False, max_pixels=None), ('cat',))"
    )
    monkeypatch.setattr(pack_call, "_ALWAYS_IDENTIFY", ("jpeg", "check"))
    assert PackOptions().identify([]) == b"(PackSettings(check=True, jpeg='copy'), ())"
    identity = b"(PackSettings(check=True, jpeg='reencode', quality=9), ())"
    assert PackOptions(jpeg="reencode", quality=9).identify([]) == identity


Files = dict[str, bytes]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kill") / "in"
    write_images(root, classes=3, per_class=3, width=8, height=8)
    return root


@pytest.fixture(scope="module")
def uninterrupted(source: Path) -> Files:
    shardio.pack(source, source.parent / "uninterrupted", max_shard_samples=3)
    return read_files(source.parent / "uninterrupted")


@pytest.fixture
def unfinished(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pack that failed before the third of its three shards. Each shard has three samples."""

    def fail_at_the_third(path: Location, samples: Iterable[Sample]) -> object:
        if path.name == "shard-000002.tar":
            raise OSError(5, "Input/output error")
        return write_shard(path, samples)

    with monkeypatch.context() as patch:
        patch.setattr(executors, "write_shard", fail_at_the_third)
        assert_refused("Input/output error", source, tmp_path / "out", max_shard_samples=3, num_workers=1)
    return tmp_path / "out"


Resume = Callable[[Path], str]


@pytest.fixture
def resume(source: Path, uninterrupted: Files) -> Resume:
    """Return a function that completes a pack on the command line, checks the files, and returns the output."""

    def complete(out: Path) -> str:
        output = run("pack", source, out, "--max-shard-samples", 3).output
        assert read_files(out) == uninterrupted
        return output

    return complete


def flip_a_bit(path: Path) -> None:
    flip(path, path.stat().st_size // 2)


def end_journal(ending: bytes, journal: Path) -> None:
    """Damage the second line, as if the run had been killed while it wrote the line."""
    first, second = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(first + (ending or second[:-9]))


DAMAGES: list[tuple[str, Callable[[Path], object], int, bool]] = [
    ("shard-000001.tar", flip_a_bit, 3, True),
    ("shard-000001.tar", Path.unlink, 3, True),
    ("shard-000001.tar.idx", flip_a_bit, 3, True),
    *((JOURNAL_NAME, partial(end_journal, end), 3, False) for end in (b"", b"}", b'{"entry": 1}\n', b"\x00\xff\n")),
    ("", Path.exists, 6, False),
]
"""A file, its damage, the number of samples that are kept, and whether a message names a damaged shard."""


@pytest.mark.parametrize(("name", "damage", "num_kept", "is_named"), DAMAGES)
def test_only_a_damaged_shard_is_packed_again(
    resume: Resume, unfinished: Path, name: str, damage: Callable[[Path], object], num_kept: int, is_named: bool
) -> None:
    kept = [f"shard-00000{number}.tar{suffix}" for number in range(num_kept // 3) for suffix in ("", ".idx")]
    inodes = [(unfinished / each).stat().st_ino for each in kept]
    damage(unfinished / name)
    output = resume(unfinished)
    again = f"packed again: {unfinished / 'shard-000001.tar'} was damaged after it was written"
    assert (output.count("packed again: "), output.count(again)) == (is_named, is_named)
    assert f"kept {num_kept} samples from an earlier run" in output
    assert [(unfinished / each).stat().st_ino for each in kept] == inodes


@pytest.mark.parametrize("name", ["shard-000000.tar", "shard-000002.tar", "no tar, shard-000002.tar", "other.tar"])
def test_a_foreign_tar_is_refused(source: Path, resume: Resume, unfinished: Path, tmp_path: Path, name: str) -> None:
    write_tar(tmp_path / "foreign.tar", [("class-7/a.jpg", b"precious")])
    is_tar, name = "no tar" not in name, name.rpartition(" ")[2]
    (unfinished / name).write_bytes((tmp_path / "foreign.tar").read_bytes() if is_tar else b"precious")
    before = read_files(unfinished)
    message = f"{name} is not a shard of the unfinished pack in .*Move it elsewhere"
    assert_refused(message, source, unfinished, max_shard_samples=3, num_workers=1)
    assert read_files(unfinished) == before
    (unfinished / name).unlink()
    resume(unfinished)


def test_a_pack_that_cannot_write_can_be_resumed(source: Path, resume: Resume, tmp_path: Path) -> None:
    message = r"shard-00000\d\.tar'\. Finished and kept 0 of 3 shards\. Fix the .*rerun the same"
    with files_of_at_most(3000):
        assert_refused(message, source, max_shard_samples=3)
    assert not list((tmp_path / "out").glob("shard-*"))
    resume(tmp_path / "out")


NUM_RENAMES = 8
"""The number of files renamed in a pack: the plan's digest, three tars, their indexes, and the manifest."""


def assert_only_whole_files(out: Path, uninterrupted: Files) -> None:
    """Assert that each file with a final name equals the uninterrupted pack's file, and that tars end properly."""
    for name, content in read_files(out).items():
        if not name.startswith("."):
            assert content == uninterrupted[name]
    for path in out.glob("shard-*.tar"):
        assert path.read_bytes().endswith(bytes(1024))
        assert read_members(path)


@pytest.mark.slow
@pytest.mark.parametrize("n", range(1, NUM_RENAMES + 2))
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_killed_pack_resumes(source: Path, uninterrupted: Files, tmp_path: Path, n: int, moment: str) -> None:
    out, options = tmp_path / "out", {"max_shard_samples": 3, "num_workers": 1}
    code = exit_code_if_killed(n, moment, shardio.pack, source, out, **options)
    assert code == (-signal.SIGKILL if n <= NUM_RENAMES else 0)
    assert_only_whole_files(out, uninterrupted)
    assert (out / "shardio.json").exists() == (n > NUM_RENAMES or (n, moment) == (NUM_RENAMES, "after"))
    if n > 1:
        message = r"unfinished pack of different images|already holds a packed dataset"
        assert_raises(PackError, message, shardio.pack, source, out, max_shard_samples=4)
    if n <= NUM_RENAMES:
        shardio.pack(source, out, max_shard_samples=3)
    assert read_files(out) == uninterrupted


@pytest.mark.slow
def test_a_pack_that_is_interrupted_or_killed_from_outside_leaves_only_whole_shards(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    write_images(source, classes=4, per_class=100, width=8, height=8)
    shardio.pack(source, tmp_path / "whole", max_shard_samples=2)
    whole = read_files(tmp_path / "whole")
    assert len(whole) == 401
    command = [sys.executable, "-m", "shardio", "pack", str(source), str(out), "--max-shard-samples", "2", "--quiet"]
    command += ["--num-workers", "2"]
    for number, num_shards in ((signal.SIGKILL, 0), (signal.SIGINT, 10), (signal.SIGKILL, 100)):
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        while not out.exists() or len(list(out.glob("shard-*.tar"))) < num_shards:
            assert process.poll() is None, "the pack ended before it was killed"
            time.sleep(0.001)
        process.send_signal(number)
        message = process.communicate()[1]
        assert process.returncode != 0 if number == signal.SIGINT else process.returncode == -number
        assert "Traceback" not in message
        assert "shardio.json" not in read_files(out)
        assert_only_whole_files(out, whole)
    subprocess.run(command, check=True)
    assert read_files(out) == whole


@pytest.mark.slow
def test_a_worker_process_that_is_suspended_ends_the_pack(
    source: Path, uninterrupted: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_worker, process_ids = executors._start_worker, list[int]()

    def start_suspended() -> executors._Worker:
        worker = start_worker()
        worker.process.send_signal(signal.SIGSTOP)
        process_ids.append(worker.process.pid)
        return worker

    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(executors, "_start_worker", start_suspended)
        patch.setattr(executors, "SILENT_S", 0.2)
        patch.setattr(executors, "LAST_CHANCE_S", 0.1)
        patch.setattr(executors, "END_WITHIN_S", 0.1)
        packing = pool.submit(shardio.pack, source, tmp_path / "out", max_shard_samples=3, num_workers=2)
        try:
            with pytest.raises(PackError, match=r"the worker process \d+ has not reported.*Rerun the same") as caught:
                packing.result(60)
        finally:
            for process_id in process_ids:
                with suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGCONT)
    assert any(f"process {process_id} " in str(caught.value) for process_id in process_ids)
    shardio.pack(source, tmp_path / "out", max_shard_samples=3, num_workers=2)
    assert read_files(tmp_path / "out") == uninterrupted


@pytest.mark.parametrize("num_workers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_after_an_error_only_whole_files_are_left(tmp_path: Path, num_workers: int) -> None:
    write_images(tmp_path / "in", classes=2, per_class=50, width=8, height=8)
    path, elsewhere = tmp_path / "in" / "class-1" / "name-030.jpg", tmp_path / "elsewhere.jpg"
    take = Change(lambda: path.rename(elsewhere))
    options: dict[str, Any] = {"num_workers": num_workers, "max_shard_samples": 5}
    assert_raises(PackError, r"name-030\.jpg is missing", pack, tmp_path / "in", tmp_path / "out", take, **options)
    assert not [each.name for each in (tmp_path / "out").iterdir() if find_target(each.name)]
    elsewhere.rename(path)
    result = pack(tmp_path / "in", tmp_path / "out", **options)
    assert result.manifest.num_samples == 100
    pack(tmp_path / "in", tmp_path / "whole", max_shard_samples=5)
    assert read_files(tmp_path / "out") == read_files(tmp_path / "whole")


MAKERS = {packs.write_folders: "tile", packs.write_table: "copy"}
SLOW = {packs.write_parquet: "tile"}
SLOW |= dict.fromkeys((packs.write_lmdb, packs.write_tars, packs.write_mds, packs.write_litdata), "copy")


@pytest.mark.parametrize(
    ("make", "jpeg"), [*MAKERS.items(), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW.items())]
)
def test_an_interrupted_pack_is_resumed_by_any_number_of_workers(
    tmp_path: Path, make: packs.Write, jpeg: JpegMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make(write_images(tmp_path / "images"), tmp_path)
    settings: dict[str, Any] = {"max_shard_size": 1 << 20, "max_shard_samples": 4, "jpeg": jpeg}
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    whole = pack(source, tmp_path / "whole", **settings)
    assert_raises(KeyboardInterrupt, None, pack, source, tmp_path / "out", Interrupt(10), **settings)
    assert len(list((tmp_path / "out").glob("*.tar"))) == 2
    before = shutil.copytree(tmp_path / "out", tmp_path / "again")
    for number, out in ((1, tmp_path / "out"), (2, Path(before))):
        resumed = pack(source, out, num_workers=number, **settings)
        assert (resumed.num_kept, resumed.jpegs) == (8, whole.jpegs)
        assert read_files(out) == read_files(tmp_path / "whole")
    pack(packs.write_folders({}, tmp_path), tmp_path / "other")  # This pack closes the source.
    gc.collect()
    assert not list((tmp_path / "temporary").iterdir())
