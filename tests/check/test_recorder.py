"""Recordings of all ranks are judged together. The guard stops at a repeat. The pytest plugin works in any project."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from torch.multiprocessing.spawn import start_processes

import shardio
from shardio import CoverageError, FormatError
from shardio.check import CoverageRecorder, ExpectedSamples, guard, make_report, merge_recordings
from tests.check.conftest import RunCheck

pytest_plugins = ["pytester"]


def record_ranks(run: Path, ranks: list[list[list[list[Any]]]]) -> list[Path]:
    for rank, epochs in enumerate(ranks):
        with CoverageRecorder(run, rank=rank) as recorder:
            for epoch in epochs:
                assert list(recorder.watch(epoch)) == epoch
    return sorted(run.glob("*.cov"))


def test_merged_recordings_are_the_whole_epoch(tmp_path: Path, run_check: RunCheck) -> None:
    paths = record_ranks(tmp_path / "run", [[[["a", "b"]], [["c"]]], [[["c"]], [["a"], ["b"]]]])
    assert [path.name for path in paths] == ["rank-00000.cov", "rank-00001.cov"]
    merged = merge_recordings(paths)
    assert [make_report(coverage, ExpectedSamples.of_keys("abc")).is_right for coverage in merged] == [True, True]
    assert merged[1].arrays()[1].tolist() == [0, 0, 1]
    done = run_check("--merge", *paths, "--expected", 3)
    assert (done.exit_code, done.output.count("right: 3 samples: 3 delivered once")) == (0, 2)


def test_a_recorder_removes_what_a_killed_one_left_unfinished(tmp_path: Path) -> None:
    """Not what other ranks may be writing."""
    left, others = tmp_path / ".rank-00000.cov.0123abcd.partial", tmp_path / ".rank-00001.cov.0123abcd.partial"
    for path in left, others:
        path.touch()
    record_ranks(tmp_path, [[[["a"]]]])
    assert (left.exists(), others.exists()) == (False, True)


def test_a_repeat_across_ranks_is_found_and_named(tmp_path: Path, run_check: RunCheck) -> None:
    paths = record_ranks(tmp_path, [[[["a", "b"]]], [[["b", "c"]]]])
    done = run_check("--merge", *paths)
    assert done.exit_code == 1
    assert "repeated: b, delivered 2 times: rank 0 batch 0, rank 1 batch 0" in done.output


def test_a_recording_holds_what_arrived_before_a_crash(tmp_path: Path) -> None:
    recorder = CoverageRecorder(tmp_path, rank=0)
    watched = recorder.watch([[1, 2], [3], [4]])
    next(watched)
    next(watched)
    watched.close()  # type: ignore[attr-defined]  # it is a generator
    (coverage,) = merge_recordings([recorder.path])
    assert sorted(coverage.arrays()[0].tolist()) == [1, 2, 3]


def test_the_file_of_an_earlier_run_is_kept(tmp_path: Path) -> None:
    (path,) = record_ranks(tmp_path, [[[["a"]]]])
    before = path.read_bytes()
    assert record_ranks(tmp_path, [[[["b"]]]]) == [path]
    assert Path(f"{path}.old").read_bytes() == before


def test_the_command_says_what_it_cannot_judge(tmp_path: Path, run_check: RunCheck) -> None:
    (path,) = record_ranks(tmp_path / "some", [[[["a"]]]])
    output = run_check("--merge", path).output
    assert "right: 1 sample:" in output
    assert "lost samples cannot be detected: pass --expected" in output
    assert "cannot be detected" not in run_check("--merge", path, "--expected", 1).output
    (path,) = record_ranks(tmp_path / "none", [[]])
    done = run_check("--merge", path)
    assert (done.exit_code, done.output) == (1, "WRONG: no epochs were recorded\n")


def test_other_files_and_two_recordings_of_one_rank_are_errors(tmp_path: Path) -> None:
    (tmp_path / "x.cov").write_bytes(b"nothing of the kind")
    with pytest.raises(FormatError, match=r"x\.cov is not a recording"):
        merge_recordings([tmp_path / "x.cov"])
    (path,) = record_ranks(tmp_path / "run", [[[["a"]]]])
    other = tmp_path / "other.cov"
    other.write_bytes(path.read_bytes())
    with pytest.raises(FormatError, match="both recordings of rank 0"):
        merge_recordings([path, other])


def gather(rank: int, folder: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    recorder = CoverageRecorder(folder / "run")
    list(recorder.watch([["a", "b"], ["c"]] if rank == 0 else [["d"], ["e", "f"]]))
    (coverage,) = recorder.gather()
    (folder / f"{recorder.rank}.txt").write_text(str(make_report(coverage, ExpectedSamples.of_keys("abcdef"))))
    torch.distributed.destroy_process_group()


def test_ranks_gather_by_torch_distributed(tmp_path: Path) -> None:
    start_processes(gather, args=(tmp_path,), nprocs=2, start_method="fork")
    right = "6 samples: 6 delivered once, 0 more than once, 0 never, 0 unexpected"
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == [right, right]


def test_the_guard_stops_at_the_first_repeat_and_forgets_after_an_epoch(packed: Path) -> None:
    loader = guard(shardio.DataLoader(shardio.ShardDataset(packed, fields="key", shuffle=True), batch_size=4))
    assert len(loader) == 6
    for _ in range(2):
        assert sum(len(batch) for batch in loader) == 21
    assert loader.state_dict()["epoch"] == 1
    guarded = iter(guard([["a", "b"], ["c"], ["b"], ["d"]]))
    assert [next(guarded), next(guarded)] == [["a", "b"], ["c"]]
    with pytest.raises(CoverageError, match="batch 2 repeats b, which batch 0 of this epoch delivered"):
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
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*CoverageError: 3 samples: 1 delivered once, 1 more than once, 1 never*"])
