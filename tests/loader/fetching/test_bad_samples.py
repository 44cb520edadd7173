"""``on_error`` works with any map-style dataset: the batches, the log, the count and the limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data

from shardio import DataLoader, EpochSampler, SampleError

BAD = {3, 4, 11}


class Numbers(torch.utils.data.Dataset[int]):
    """Numbers, some of which cannot be had."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        if index in BAD:
            raise OSError(f"number {index} is gone")
        return index


class SeveralNumbers(Numbers):
    """The same, several at a time."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


class NumberStream(torch.utils.data.IterableDataset[int]):
    """Numbers that come by themselves."""

    def __iter__(self) -> Any:
        return iter(range(3))


class Unsized(torch.utils.data.Dataset[int]):
    """A dataset that does not say its size."""

    def __getitem__(self, index: int) -> int:
        return index


WORKERS: list[dict[str, Any]] = [
    {},
    {"num_workers": 2},
    {"num_workers": 2, "worker_method": "thread"},
    {"num_workers": 2, "persistent_workers": True},
]


@pytest.fixture(params=[Numbers, SeveralNumbers])
def dataset(request: pytest.FixtureRequest) -> Any:
    return request.param()


@pytest.mark.parametrize("workers", WORKERS, ids=str)
@pytest.mark.parametrize("is_ordered", [False, True])
def test_bad_samples_are_left_out(dataset: Any, workers: dict[str, Any], is_ordered: bool, tmp_path: Path) -> None:
    sampler = EpochSampler(dataset, shuffle=False) if is_ordered else None
    log = tmp_path / "log"
    loader = DataLoader(dataset, 4, sampler=sampler, on_error="skip", quarantine=log, **workers)
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match=r"unreadable samples skipped.*: 3\."):
            batches = [batch.tolist() for batch in loader]
        assert batches == [[0, 1, 2], [5, 6, 7], [8, 9, 10], [12, 13, 14, 15], [16, 17, 18, 19]]
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert sorted(entry["sample"] for entry in entries) == sorted([*BAD, *BAD])
    assert {entry["error"] for entry in entries} == {
        f"sample {n} in {type(dataset).__name__}: OSError: number {n} is gone" for n in BAD
    }


@pytest.mark.parametrize("workers", WORKERS, ids=str)
@pytest.mark.parametrize("is_ordered", [False, True])
def test_bad_samples_are_replaced_by_the_same_ones(
    dataset: Any, workers: dict[str, Any], is_ordered: bool, tmp_path: Path
) -> None:
    def run(**options: Any) -> list[list[int]]:
        sampler = EpochSampler(dataset, shuffle=False) if is_ordered else None
        loader = DataLoader(dataset, 4, sampler=sampler, on_error="replace", quarantine=tmp_path / "log", **options)
        with pytest.warns(RuntimeWarning, match=r"unreadable samples replaced.*: [3-9]\."):
            return [batch.tolist() for batch in loader]

    batches = run(**workers)
    assert [len(batch) for batch in batches] == [4] * 5
    numbers = [number for batch in batches for number in batch]
    assert {index for index, number in enumerate(numbers) if number != index} == BAD
    assert not BAD & set(numbers)
    assert batches == run()


def test_single_samples_are_replaced(dataset: Any, tmp_path: Path) -> None:
    loader = DataLoader(dataset, None, on_error="replace", quarantine=tmp_path / "log")
    with pytest.warns(RuntimeWarning, match="replaced"):
        assert {index for index, number in enumerate(loader) if number != index} == BAD


def test_an_empty_batch_is_an_error(dataset: Any, tmp_path: Path) -> None:
    loader = DataLoader(dataset, batch_sampler=[[3, 4], [5, 6]], on_error="skip", quarantine=tmp_path / "log")
    batches = iter(loader)
    with pytest.raises(SampleError, match=r"all samples of a batch were skipped \(3, 4\)"):
        next(batches)
    assert next(batches).tolist() == [5, 6]


def test_errors_of_other_stages_are_raised(dataset: Any, tmp_path: Path) -> None:
    loader = DataLoader(dataset, 4, on_error="skip", on_error_in=["decode"], quarantine=tmp_path / "log")
    with pytest.raises(OSError, match="number 3 is gone"):
        list(loader)


def test_datasets_without_samples_to_choose_from_are_refused() -> None:
    with pytest.raises(
        ValueError, match="does not work with NumberStream, because an iterable dataset cannot continue"
    ):
        DataLoader(NumberStream(), 4, on_error="skip")
    with pytest.raises(ValueError, match="requires a dataset with a length; Unsized has no __len__"):
        DataLoader(Unsized(), 4, sampler=range(3), on_error="replace")
    with pytest.raises(TypeError, match=r"on_error='skip' requires integers as indices; got \['a'\]"):
        list(DataLoader(Numbers(), sampler=["a"], on_error="skip"))
