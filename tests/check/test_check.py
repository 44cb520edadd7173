"""The checker finds and names what is wrong, and accepts what is right. The campaign has all faults."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset
from torch.utils.data import DataLoader as TorchLoader, Dataset

from shardio import CoverageError, DataLoader, ShardDataset
from shardio.check import Coverage, Delivery, ExpectedSamples, assert_exactly_once, make_report
from tests.check.cases import N, Shares, load, web
from tests.check.conftest import RunCheck


@pytest.fixture
def keys(packed: Path) -> list[str]:
    return list(ShardDataset(packed, fields="key"))


def fault(loader: Any, expected: Any) -> str:
    with pytest.raises(CoverageError) as caught:
        assert_exactly_once(loader, expected)
    return str(caught.value)


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
            # A fork server, the default of Python 3.14, keeps its environment.
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


def test_a_loader_with_worker_processes_is_right(packed: Path, keys: list[str]) -> None:
    assert_exactly_once(DataLoader(ShardDataset(packed, fields="key"), batch_size=4, num_workers=2), keys)


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_checking_does_not_change_a_loader(keys: list[str], persistent_workers: bool) -> None:
    loader: Any = TorchLoader(keys, 4, num_workers=2, persistent_workers=persistent_workers)  # type: ignore[arg-type]
    assert_exactly_once(loader, keys)
    assert [key for batch in loader for key in batch] == keys


@pytest.mark.parametrize(
    ("counts", "allowance", "is_right"),
    [
        ([1, 1, 1], {}, True),
        ([1, 1, 2], {}, False),
        ([1, 1, 0], {}, False),
        ([2, 1, 1], {"num_repeats": 1}, True),
        ([2, 2, 1], {"num_repeats": 1}, False),
        ([3, 1, 1], {"num_repeats": 2}, False),
        ([1, 1, 1], {"num_repeats": 1}, False),
        ([1, 1, 0], {"num_missing": 1}, True),
        ([1, 0, 0], {"num_missing": 1}, False),
        ([2, 1, 0], {"num_missing": 1}, False),
        ([3, 3, 2], {"num_repeats": 5}, True),
    ],
)
def test_exactly_what_the_remainder_policy_requires_is_allowed(
    counts: list[int], allowance: dict[str, int], is_right: bool
) -> None:
    coverage = Coverage()
    for key, count in enumerate(counts):
        for batch in range(count):
            coverage.add([key], Delivery(rank=0, worker=None, batch=batch))
    wanted = ExpectedSamples.of_keys(range(len(counts)), **allowance)
    assert make_report(coverage, wanted).is_right == is_right


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


def test_the_command_fails_without_a_dataset(tmp_path: Path, run_check: RunCheck) -> None:
    done = run_check(tmp_path)
    assert done.exit_code == 1
    assert str(done.exception).startswith(f"the directory {tmp_path} holds neither")


class Keyed(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((3,), float(index)), "id": index}


class PassesOn:
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


@pytest.mark.parametrize("is_batched", [True, False])
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "names",
    [
        ("dataset", "num_workers", "collate_fn"),
        ("dataset", "num_workers", "collate_fn", "batch_sampler"),
        ("dataset", "num_workers", "collate_fn", "batch_size"),
        ("dataset", "batch_size"),
        (),
    ],
)
def test_wrappers_with_some_attributes_of_a_loader(names: tuple[str, ...], num_workers: int, is_batched: bool) -> None:
    wrap = type("Wrapper", (PassesOn,), {name: property(attrgetter(f"_loader.{name}")) for name in names})
    options: Any = {"batch_size": 4 if is_batched else None, "num_workers": num_workers}
    key = itemgetter("id") if is_batched else lambda sample: [sample["id"]]
    assert_exactly_once(wrap(TorchLoader(Keyed(), shuffle=True, **options)), key=key, epochs=2)
    with pytest.raises(CoverageError, match=r"1 more than once.*\n  repeated: 7, delivered 4 times"):
        assert_exactly_once(wrap(TorchLoader(Keyed(), sampler=[*range(17), 7, 7, 7], **options)), key=key)
