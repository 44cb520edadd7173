"""The checker finds and names what is wrong, and accepts what is right."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset
from torch.utils.data import DataLoader as TorchLoader, Dataset, IterableDataset

from shardio import CoverageError, DataLoader, ShardDataset
from shardio.check import Coverage, Delivery, ExpectedSamples, assert_exactly_once, make_report
from tests.check.conftest import RunCheck


class IgnoresWorkers(IterableDataset[str]):
    """Delivers everything in each worker, a common mistake."""

    def __init__(self, keys: list[str]) -> None:
        self.keys = keys

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys)


@pytest.fixture
def keys(packed: Path) -> list[str]:
    return list(ShardDataset(packed, fields="key"))


def test_a_dataset_that_ignores_its_workers_is_wrong(packed: Path, keys: list[str]) -> None:
    tars = sorted(map(str, packed.glob("*.tar")))
    dataset = webdataset.WebDataset(tars, shardshuffle=False, workersplitter=None).map(itemgetter("__key__"))
    loader = TorchLoader(dataset, batch_size=4, num_workers=2)
    with pytest.raises(CoverageError) as caught:
        assert_exactly_once(loader, keys)
    message = str(caught.value)
    assert "21 samples: 0 delivered once, 21 more than once, 0 never" in message
    assert f"repeated: {keys[0]}, delivered 2 times: rank 0 worker 0 batch 0, rank 0 worker 1 batch 1" in message
    assert "each of 2 workers delivered all 21 samples: the dataset ignores get_worker_info" in message


def test_repeated_missing_and_unexpected_samples_are_counted_and_named(keys: list[str]) -> None:
    batches = [keys[:5], keys[4:20], ["stranger"]]
    with pytest.raises(CoverageError) as caught:
        assert_exactly_once(batches, keys)
    assert str(caught.value).splitlines() == [
        "21 samples: 19 delivered once, 1 more than once, 1 never, 1 unexpected",
        f"  repeated: {keys[4]}, delivered 2 times: rank 0 batch 0, rank 0 batch 1",
        "  unexpected: stranger, delivered 1 time: rank 0 batch 2",
        f"  missing: {keys[20]}",
    ]


def test_a_wrong_epoch_is_an_assertion_error() -> None:
    with pytest.raises(AssertionError):
        assert_exactly_once([["a", "a"]], ["a"])


def test_right_loaders_pass(packed: Path, keys: list[str]) -> None:
    assert_exactly_once(DataLoader(ShardDataset(packed, fields="key"), batch_size=4, num_workers=2), keys)
    assert_exactly_once(TorchLoader(ShardDataset(packed, fields="key"), batch_size=4, num_workers=3), keys)
    ranks = tuple(
        DataLoader(ShardDataset(packed, fields="key", remainder="keep", rank=rank, world_size=2), batch_size=4)
        for rank in range(2)
    )
    assert_exactly_once(ranks, keys)


def test_keys_are_found_by_index_name_or_function() -> None:
    tensors = [torch.tensor([0, 1]), torch.tensor([2])]
    assert_exactly_once([("x", batch) for batch in tensors], range(3), key=1)
    assert_exactly_once([{"id": batch} for batch in tensors], range(3), key="id")
    assert_exactly_once(tensors, range(3), key=lambda batch: batch.tolist())
    assert_exactly_once(tensors, range(3))


def test_checking_does_not_change_a_loader(keys: list[str]) -> None:
    loader: Any = TorchLoader(keys, batch_size=4, num_workers=2)  # type: ignore[arg-type]  # a list is a dataset
    assert_exactly_once(loader, keys)
    assert [key for batch in loader for key in batch] == keys
    persistent: Any = TorchLoader(keys, batch_size=4, num_workers=2, persistent_workers=True)  # type: ignore[arg-type]
    assert_exactly_once(persistent, keys)
    assert [key for batch in persistent for key in batch] == keys


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


@pytest.mark.parametrize(("policy", "num_workers"), [("pad", 1), ("mask", 0), ("keep", 0), ("drop", 0)])
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
    """Samples with an id."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((3,), float(index)), "id": index}


class PassesOn:
    """A user's wrapper of a loader."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


@pytest.mark.parametrize("is_batched", [True, False])
@pytest.mark.parametrize("num_workers", [0, 2])
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
    properties = {name: property(attrgetter(f"_loader.{name}")) for name in names}
    wrap = type("Wrapper", (PassesOn,), properties)
    options: Any = {"batch_size": 4 if is_batched else None, "num_workers": num_workers}
    key = itemgetter("id") if is_batched else lambda sample: [sample["id"]]
    assert_exactly_once(wrap(TorchLoader(Keyed(), shuffle=True, **options)), key=key, epochs=2)
    with pytest.raises(CoverageError, match=r"1 more than once.*\n  repeated: 7, delivered 4 times"):
        assert_exactly_once(wrap(TorchLoader(Keyed(), sampler=[*range(17), 7, 7, 7], **options)), key=key)
