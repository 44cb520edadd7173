"""The checker (with recordings, mixtures, guard and pytest plugin) names faults, and accepts correct loaders."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
import webdataset
from torch.multiprocessing.spawn import start_processes
from torch.utils.data import DataLoader as TorchLoader

import shardio
from shardio import CoverageError, DataLoader, FormatError, IdentityError, MixedDataset, ShardDataset
from shardio.check import (
    Coverage,
    CoverageRecorder,
    Delivery,
    ExpectedSamples,
    assert_exactly_once,
    check_mixture,
    guard,
    make_report,
    merge_recordings,
)
from tests.check import planted, unusual
from tests.check.cases import Case, Keyed, N, cut, load, web
from tests.check.conftest import RunCheck
from tests.loader.programs import Shares
from tests.raising import assert_raises


@pytest.fixture
def keys(packed: Path) -> list[str]:
    return list(ShardDataset(packed, fields="key"))


def fault(loader: Any, expected: Any) -> str:
    return str(assert_raises(CoverageError, None, assert_exactly_once, loader, expected))


def test_a_dataset_that_ignores_its_workers_is_wrong(packed: Path, keys: list[str]) -> None:
    message = fault(TorchLoader(web(packed, workersplitter=None), batch_size=4, num_workers=2), keys)
    assert "21 samples: 0 delivered once, 21 more than once, 0 never" in message
    assert f"repeated: {keys[0]}, delivered 2 times: rank 0 worker 0 batch 0, rank 0 worker 1 batch 1" in message
    assert "each of 2 workers delivered all 21 samples: the dataset ignores get_worker_info" in message


@pytest.mark.slow
def test_causes_in_workers_and_in_ranks_are_told_apart() -> None:
    ranks = tuple(load(Shares(lambda worker, of: range(N)), num_workers=2) for _ in range(3))
    message = fault(ranks, range(N))
    assert f"each of 2 workers of rank 0 delivered all {N} samples: the dataset ignores get_worker_info" in message
    assert f"ranks 0, 1 and 2 delivered the same {N} samples" in message
    ranks = tuple(load(Shares(lambda worker, of: range(worker, N, of)), num_workers=2) for _ in range(2))
    message = fault(ranks, range(N))
    assert f"ranks 0 and 1 delivered the same {N} samples: the loader has no DistributedSampler" in message
    assert "get_worker_info" not in message


@pytest.mark.slow
def test_a_webdataset_without_nodesplitter(packed: Path, keys: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def deliver(**options: Any) -> tuple[list[Any], ...]:
        ranks = list[list[Any]]()
        for rank in range(2):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", "2")
            # A fork server, the default in Python 3.14, would keep its first environment.
            loader: Any = TorchLoader(web(packed, **options), 4, num_workers=2, multiprocessing_context="fork")
            ranks.append([list(batch) for batch in loader])
        return tuple(ranks)

    assert "in WebDataset, no nodesplitter" in fault(deliver(nodesplitter=lambda shards: shards), keys)
    assert_exactly_once(deliver(nodesplitter=webdataset.split_by_node), keys)


def test_repeated_missing_and_unexpected_samples_are_counted_and_named(keys: list[str]) -> None:
    assert issubclass(CoverageError, AssertionError)
    assert fault([keys[:5], keys[4:20], ["stranger"]], keys).splitlines() == [
        "21 samples: 19 delivered once, 1 more than once, 1 never, 1 unexpected",
        f"  repeated: {keys[4]}, delivered 2 times: rank 0 batch 0, rank 0 batch 1",
        "  unexpected: stranger, delivered 1 time: rank 0 batch 2",
        f"  missing: {keys[20]}",
    ]


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_checking_does_not_change_a_loader(keys: list[str], persistent_workers: bool) -> None:
    loader: Any = TorchLoader(keys, 4, num_workers=2, persistent_workers=persistent_workers)  # type: ignore[arg-type]
    assert_exactly_once(loader, keys)
    assert [key for batch in loader for key in batch] == keys


@pytest.mark.parametrize(
    ("allowance", "right", "wrong"),
    [
        ({}, ["111"], ["112", "110"]),
        ({"num_repeats": 1}, ["211"], ["221", "111"]),
        ({"num_repeats": 2}, [], ["311"]),
        ({"num_missing": 1}, ["110"], ["100", "210"]),
        ({"num_repeats": 5}, ["332"], []),
    ],
)
def test_exactly_what_the_remainder_policy_requires_is_allowed(
    allowance: dict[str, int], right: list[str], wrong: list[str]
) -> None:
    """Each digit of a string is the number of times that one sample is delivered."""
    for counts in (*right, *wrong):
        coverage = Coverage()
        for key, count in enumerate(counts):
            for batch in range(int(count)):
                coverage.add([key], Delivery(rank=0, worker=None, batch=batch))
        wanted = ExpectedSamples.of_keys(range(len(counts)), **allowance)
        assert make_report(coverage, wanted).is_right == (counts in right)


@pytest.mark.parametrize(
    ("policy", "num_workers"), [("pad", 0), ("mask", 0), ("keep", 0), pytest.param("drop", 1, marks=pytest.mark.slow)]
)
def test_the_command_passes_a_dataset_under_every_policy(
    packed: Path, run_check: RunCheck, policy: str, num_workers: int
) -> None:
    options = ["--world-size", 2, "--num-workers", num_workers, "--batch-size", 4, "--remainder", policy, "--epochs", 2]
    done = run_check(packed, *options)
    assert done.exit_code == 0, done.output
    assert "epoch 1: right: 21 samples" in done.output
    assert "rank 1: " in done.output


class PassesOn:
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


@pytest.mark.parametrize("is_batched", [True, False])
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("more", [["collate_fn"], ["collate_fn", "batch_sampler"], ["collate_fn", "batch_size"], None])
def test_wrappers_with_some_attributes_of_a_loader(more: list[str] | None, num_workers: int, is_batched: bool) -> None:
    names = [] if more is None else ["dataset", "num_workers", *more]
    wrap = type("Wrapper", (PassesOn,), {name: property(attrgetter(f"_loader.{name}")) for name in names})
    options: Any = {"batch_size": 4 if is_batched else None, "num_workers": num_workers}
    key, dataset = itemgetter("id") if is_batched else lambda sample: [sample["id"]], Keyed(num_samples=20)
    assert_exactly_once(wrap(TorchLoader(dataset, shuffle=True, **options)), key=key, epochs=2)
    with pytest.raises(CoverageError, match=r"1 more than once.*\n  repeated: 7, delivered 4 times"):
        assert_exactly_once(wrap(TorchLoader(dataset, sampler=[*range(17), 7, 7, 7], **options)), key=key)


PLANTED = planted.case.cases
UNUSUAL = unusual.case.cases

# webdataset leaves files for the garbage collector to close. torchdata calls a deprecated function.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]


def named(cases: list[Case]) -> list[object]:
    names = [re.sub(r"\W+", "-", case.name) for case in cases]
    assert len(set(names)) == len(names)
    marks = [[pytest.mark.slow] * case.is_slow for case in cases]
    return [pytest.param(*each, id=name, marks=mark) for *each, name, mark in zip(cases, names, marks, strict=True)]


@pytest.mark.parametrize("case", named(PLANTED))
def test_a_fault_is_found_and_named(case: Case, packed: Path) -> None:
    verdict, message = case.judge(packed)
    assert verdict in {"wrong", "keys wanted"}
    assert case.says in message


@pytest.mark.parametrize("case", named(UNUSUAL))
def test_a_right_loader_is_accepted(case: Case, packed: Path) -> None:
    verdict, message = case.judge(packed)
    assert verdict == ("keys wanted" if case.says else "right"), message
    assert case.says in message


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


def test_the_file_of_an_earlier_run_is_kept_but_not_what_a_killed_one_left_unfinished(tmp_path: Path) -> None:
    left, others = tmp_path / ".rank-00000.cov.0123abcd.partial", tmp_path / ".rank-00001.cov.0123abcd.partial"
    for path in left, others:
        path.touch()
    (path,) = record_ranks(tmp_path, [[[["a"]]]])
    assert (left.exists(), others.exists()) == (False, True)
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
    done = run_check(tmp_path)
    assert done.exit_code == 1
    assert str(done.exception).startswith(f"the directory {tmp_path} holds neither")


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


# Mixtures.

WEB, CODE = ([f"{name}-{number}" for number in range(size)] for name, size in (("web", 70), ("code", 20)))
SOURCES = {"web": WEB, "code": CODE}
WEIGHTS = {"web": 0.7, "code": 0.3}


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_mixture_is_exact_after_each_step(world_size: int) -> None:
    ranks = [
        MixedDataset({"web": (WEB, 0.7), "code": (CODE, 0.3)}, stop=300, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    report = check_mixture(tuple(DataLoader(rank, 4) for rank in ranks), SOURCES, WEIGHTS)
    report.raise_if_wrong()
    assert report.num_delivered == 300
    assert {name: source.num_delivered for name, source in report.sources.items()} == {"web": 210, "code": 90}
    assert "code: 90 samples, 30.00% of 30.00%, 4.50 times" in str(report)


def test_a_random_mixture_outweighs() -> None:
    rng = random.Random(0)
    ways = {"web": iter(WEB * 9), "code": iter(CODE * 9)}
    keys = [next(ways[rng.choices(("web", "code"), (0.7, 0.3))[0]]) for _ in range(300)]
    report = check_mixture(cut(keys), SOURCES, WEIGHTS)
    assert [problem.partition(" by up")[0] for problem in report.problems] == [
        "web deviates from its share of 70.00%",
        "code deviates from its share of 30.00%",
    ]
    assert check_mixture(cut(keys), SOURCES, WEIGHTS, tolerance=50).problems == []


def test_repeats_losses_and_unknown_samples_are_named() -> None:
    repeats, leaves_out = "before its other samples have been delivered", "code leaves out 1 sample (code-0)"
    for keys, problems in (
        (["web-3", "code-1", "web-3"], [f"web repeats 1 sample (web-3) {repeats}"]),
        ([*CODE[1:], "code-1", *CODE], [f"code repeats 2 samples (code-1, code-1) {repeats}", leaves_out]),
        ([*CODE[1:], "code-1"], [f"code repeats 1 sample (code-1) {repeats}", leaves_out]),
        ([*CODE, *CODE[::-1], *WEB, "web-1"], []),
        (["other"], ["no source has 1 sample (other)"]),
    ):
        assert check_mixture(cut(keys), SOURCES, WEIGHTS, tolerance=1000).problems == problems
    with pytest.raises(CoverageError, match="leaves out"):
        check_mixture(cut(CODE[1:] + CODE[1:2]), SOURCES, WEIGHTS).raise_if_wrong()


def test_what_cannot_be_checked_is_refused() -> None:
    assert_raises(IdentityError, "two sources", check_mixture, [], {"web": ["a"], "code": ["a"]}, WEIGHTS)
    assert_raises(IdentityError, "no keys", check_mixture, [[1.5]], SOURCES, WEIGHTS)
    message = "the weights are for web, but the sources are web, code"
    assert_raises(ValueError, message, check_mixture, [], SOURCES, {"web": 1})
