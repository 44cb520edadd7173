"""Recordings of all ranks, judged together; loaders of scripts, in real processes; the guard; the plugin."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
import typer
from torch.multiprocessing.spawn import start_processes

import shardio
from shardio import CoverageError, FormatError, IdentityError
from shardio.check import CoverageRecorder, Expected, guard, make_report, merge_recordings
from shardio.check.processes import run_rank
from shardio.cli.check import check

pytest_plugins = ["pytester"]


def record_ranks(run: Path, ranks: list[list[list[list[Any]]]]) -> list[Path]:
    """Write the recording of each rank, given each rank's epochs of batches."""
    for rank, epochs in enumerate(ranks):
        with CoverageRecorder(run, rank=rank) as recorder:
            for epoch in epochs:
                assert list(recorder.watch(epoch)) == epoch
    return sorted(run.glob("*.cov"))


def run_check(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardio", "check", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)


def test_merged_recordings_are_the_whole_epoch(tmp_path: Path) -> None:
    paths = record_ranks(tmp_path / "run", [[[["a", "b"]], [["c"]]], [[["c"]], [["a"], ["b"]]]])
    assert [path.name for path in paths] == ["rank-00000.cov", "rank-00001.cov"]
    merged = merge_recordings(paths)
    assert [make_report(coverage, Expected.of_keys("abc")).is_right for coverage in merged] == [True, True]
    assert merged[1].arrays()[1].tolist() == [0, 0, 1]
    done = run_check("--merge", *paths, "--expected", 3)
    assert (done.returncode, done.stdout.count("right: 3 samples: 3 came once")) == (0, 2)


def test_a_repeat_across_ranks_is_found_and_named(tmp_path: Path) -> None:
    paths = record_ranks(tmp_path, [[[["a", "b"]]], [[["b", "c"]]]])
    done = run_check("--merge", *paths)
    assert done.returncode == 1
    assert "repeated: b came 2 times: rank 0 batch 0, rank 1 batch 0" in done.stdout


def test_what_was_received_before_a_crash_is_there(tmp_path: Path) -> None:
    recorder = CoverageRecorder(tmp_path, rank=0)
    watched = recorder.watch([[1, 2], [3], [4]])
    next(watched)
    next(watched)
    watched.close()  # type: ignore[attr-defined]  # it is a generator
    (coverage,) = merge_recordings([recorder.path])
    assert sorted(coverage.arrays()[0].tolist()) == [1, 2, 3]


def test_a_former_runs_file_is_kept_aside(tmp_path: Path) -> None:
    (path,) = record_ranks(tmp_path, [[[["a"]]]])
    before = path.read_bytes()
    assert record_ranks(tmp_path, [[[["b"]]]]) == [path]
    assert Path(f"{path}.old").read_bytes() == before


def test_the_command_says_what_it_cannot_judge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = record_ranks(tmp_path / "some", [[[["a"]]]])
    check([str(path)], merge=True)
    assert "right: 1 samples" in (said := capsys.readouterr().out)
    assert "lost samples cannot be detected: pass --expected" in said
    check([str(path)], merge=True, expected="1")
    assert "cannot be detected" not in capsys.readouterr().out
    (path,) = record_ranks(tmp_path / "none", [[]])
    with pytest.raises(typer.Exit):
        check([str(path)], merge=True)
    assert capsys.readouterr().out == "WRONG: no epochs were recorded\n"


def test_a_function_that_returns_no_loader_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script.py").write_text("def make(): pass")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(IdentityError, match=r"script\.py:make returned a NoneType: return a loader"):
        run_rank(f"{tmp_path / 'script.py'}:make", str(tmp_path), 1, None)


def test_files_that_are_no_recordings_or_of_one_rank_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.cov").write_bytes(b"nothing of the kind")
    with pytest.raises(FormatError, match=r"x\.cov is not a recording"):
        merge_recordings([tmp_path / "x.cov"])
    (path,) = record_ranks(tmp_path / "run", [[[["a"]]]])
    other = tmp_path / "other.cov"
    other.write_bytes(path.read_bytes())
    with pytest.raises(FormatError, match="both recordings of rank 0"):
        merge_recordings([path, other])


def gather(rank: int, rendezvous: str, queue: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    recorder = CoverageRecorder(Path(rendezvous).parent / "run")
    list(recorder.watch([["a", "b"], ["c"]] if rank == 0 else [["d"], ["e", "f"]]))
    (coverage,) = recorder.gather()
    queue.put((recorder.rank, str(make_report(coverage, Expected.of_keys("abcdef")))))
    torch.distributed.destroy_process_group()


def test_ranks_gather_by_torch_distributed(tmp_path: Path) -> None:
    manager = torch.multiprocessing.get_context("spawn").Manager()
    queue = manager.Queue()
    start_processes(gather, args=(str(tmp_path / "rendezvous"), queue), nprocs=2)
    right = "6 samples: 6 came once, 0 more than once, 0 never, 0 unexpected"
    assert sorted(queue.get() for _ in range(2)) == [(0, right), (1, right)]
    manager.shutdown()


SCRIPT = """
import sys
import threading
import torch.distributed
from torch.utils.data import DataLoader, DistributedSampler

def unsplit():
    return DataLoader(list(range(60)), batch_size=8, shuffle=True, num_workers=1)

def split():
    threading.Thread(target=threading.Event().wait).start()  # It never ends.
    torch.distributed.init_process_group("gloo")
    dataset = [{"id": i, "half": i // 2} for i in range(60)]
    return DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset), num_workers=1)

def failing():
    raise RuntimeError("no data today")

def failing_alone():
    torch.distributed.init_process_group("gloo")
    if torch.distributed.get_rank() == 1:
        raise RuntimeError("no data on this rank")
    torch.distributed.barrier()

def noisy():
    torch.distributed.init_process_group("gloo")
    for rank in range(2):
        if torch.distributed.get_rank() == rank:
            sys.stderr.write("x" * 200_000)
            sys.stderr.flush()
        torch.distributed.barrier()
    return DataLoader(list(range(torch.distributed.get_rank(), 60, 2)), batch_size=8)

class Augmented:
    def __len__(self):
        return 60

    def __getitem__(self, number):
        return torch.rand(3) + number

class Twice(DataLoader):
    def __iter__(self):
        yield from super().__iter__()
        yield from super().__iter__()

def twice():
    return Twice(Augmented(), batch_size=8)

def augmented():
    return DataLoader(Augmented(), batch_size=8)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "loaders.py"
    path.write_text(SCRIPT)
    return path


def test_a_scripts_loader_is_judged_in_real_ranks_also_where_it_leaves_a_thread_behind(script: Path) -> None:
    done = run_check(f"{script}:split", "--world-size", 3, "--epochs", 2, "--expected", 60, "--key", "id")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "epoch 1: right: 60 samples: 60 came once" in done.stdout
    assert "rank 2 worker 0: 20 samples" in done.stdout


def test_a_scripts_loader_without_a_split_is_caught(script: Path) -> None:
    done = run_check(f"{script}:unsplit", "--world-size", 2, "--expected", 60)
    assert done.returncode == 1
    assert "ranks 0 and 1 delivered the same 60 samples: no DistributedSampler" in done.stdout


def test_a_failure_ends_ranks_that_wait_in_a_collective(script: Path) -> None:
    done = run_check(f"{script}:failing_alone", "--world-size", 2)
    assert done.returncode == 1
    assert re.match(r"error: rank 1 of .*:failing_alone failed:\n", done.stderr)
    assert "RuntimeError: no data on this rank" in done.stderr


def test_ranks_may_write_more_than_a_pipe_holds(script: Path) -> None:
    done = run_check(f"{script}:noisy", "--world-size", 2, "--expected", 60)
    assert (done.returncode, "right: 60 samples: 60 came once" in done.stdout) == (0, True), done.stderr


def test_a_scripts_augmented_images_are_counted_and_not_known_by_content(script: Path) -> None:
    twice = run_check(f"{script}:twice", "--expected", 60)
    assert twice.returncode == 1
    assert "WRONG: 60 samples: 120 came once, 0 more than once, 0 never, 60 unexpected" in twice.stdout
    once = run_check(f"{script}:augmented", "--expected", 60)
    assert once.returncode == 1
    assert "is not the same each time: sample 0 differs when it is read again. Give key=" in once.stderr


OURS = """
import shardio

def make(map_style=False, drop_last=False, key="key", **options):
    if not map_style:
        dataset = shardio.ShardDataset({packed!r}, fields=key, shuffle=True, **options)
        return shardio.DataLoader(dataset, batch_size=4, num_workers=1, drop_last=drop_last)
    dataset = shardio.ShardMapDataset({packed!r}, fields=key)
    sampler = shardio.EpochSampler(dataset, **options)
    return shardio.DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=1, drop_last=drop_last)

def chosen():
    return make({options})
"""


PADDED = "20 came once, 1 more than once (1 repeat, 1 by the remainder policy), 0 never"
DROPPED = "16 came once, 0 more than once, 5 never (5 left out by the remainder policy)"
ALL = "21 came once, 0 more than once, 0 never"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", PADDED),
        ("map_style=True, key=('label', 'key')", PADDED),
        ("remainder='keep'", ALL),
        ("remainder='mask'", ALL),
        ("remainder='mask', map_style=True, key=('label', 'key')", ALL),
        ("remainder='drop', key=('label', 'key')", DROPPED),
        ("drop_last=True, map_style=True", DROPPED),
    ],
)
def test_a_scripts_loader_of_ours_is_judged_by_its_own_remainder(
    packed: Path, tmp_path: Path, options: str, words: str
) -> None:
    """Of 21 samples and 2 ranks with batches of 4, with the keys to compare with and without anything."""
    more = ("--expected", packed, "--key", 1) if "label" in options else ()
    (tmp_path / "ours.py").write_text(OURS.format(packed=str(packed), options=options))
    done = run_check(f"{tmp_path / 'ours.py'}:chosen", "--world-size", 2, *more)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"epoch 0: right: 21 samples: {words}, 0 unexpected" in done.stdout


def test_repeats_beyond_the_remainder_are_wrong(packed: Path, tmp_path: Path) -> None:
    """A loader that every rank takes for its own alone is not right because its policy pads."""
    (tmp_path / "ours.py").write_text(OURS.format(packed=str(packed), options="rank=0, world_size=2"))
    done = run_check(f"{tmp_path / 'ours.py'}:chosen", "--world-size", 2)
    assert done.returncode == 1
    assert "ranks 0 and 1 delivered the same 11 samples" in done.stdout


def test_a_script_that_fails_is_told_with_its_own_words(script: Path) -> None:
    done = run_check(f"{script}:failing", "--world-size", 2)
    assert done.returncode == 1
    assert re.search(r"error: rank [01] of .*:failing failed:", done.stderr)
    assert "RuntimeError: no data today" in done.stderr
    assert "has no function 'nothing'" in run_check(f"{script}:nothing").stderr
    assert "there is no script" in run_check("nowhere.py:make").stderr


def test_the_guard_stops_at_the_first_repeat_and_forgets_after_an_epoch(packed: Path) -> None:
    loader = guard(shardio.DataLoader(shardio.ShardDataset(packed, fields="key", shuffle=True), batch_size=4))
    assert len(loader) == 6
    for _ in range(2):
        assert sum(len(batch) for batch in loader) == 21
    assert loader.state_dict()["epoch"] == 1
    guarded = iter(guard([["a", "b"], ["c"], ["b"], ["d"]]))
    assert [next(guarded), next(guarded)] == [["a", "b"], ["c"]]
    with pytest.raises(CoverageError, match="batch 2 repeats b, which came in batch 0 of this epoch"):
        next(guarded)
    with pytest.raises(CoverageError, match="batch 0 repeats a"):
        list(guard([["a", "a"]]))


def test_the_plugin_gives_every_project_the_fixture(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        def test_right(assert_exactly_once):
            assert_exactly_once([[1, 2], [3]], expected=[1, 2, 3])

        def test_wrong(assert_exactly_once):
            assert_exactly_once([[1, 2], [2]], expected=[1, 2, 3])
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*CoverageError: 3 samples: 1 came once, 1 more than once, 1 never*"])
