"""A loop that catches a batch's error and requests the next batch receives the rest of the epoch from any executor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from shardio import DataLoader, DevicePrefetcher, EpochSampler, SampleError, ShardDataset
from tests.device.late_stream import prefetch_late
from tests.faults.damage import BAD, BATCH_SIZE, NUM_SAMPLES, Subject, fill_with_noise, order_of
from tests.faults.worker_processes import DEADLINE_S, Batches, batches_of, plain

EXECUTORS: dict[str, dict[str, Any]] = {
    "this process": {"num_workers": 0},
    "workers": {"num_workers": 1},
    "workers that stay": {"num_workers": 2, "persistent_workers": True},
    "torch here": {"num_workers": 0, "worker_init_fn": print},
    "torch's workers": {"num_workers": 1, "worker_init_fn": id},
    "torch's workers that stay": {"num_workers": 1, "worker_init_fn": id, "persistent_workers": True},
}


def catching(batches: Iterator[Any], errors: list[Exception]) -> Iterator[Any]:
    """Yield batches, and continue after each error."""
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Exception as error:
            errors.append(error)
            continue
        yield batch


def good_batches(subject: Subject) -> Batches:
    """Return those of the twin's batches that hold no damaged sample."""
    twins = batches_of(subject.loader(0, clean=True))
    return [
        batch
        for batch, numbers in zip(twins, order_of(subject.kind), strict=True)
        if not set(numbers) & set(subject.bad)
    ]


def test_every_executor_delivers_the_rest_of_the_epoch(tmp_path: Path) -> None:
    subject = Subject(tmp_path, "shards")
    expected = good_batches(subject)
    num_failing = NUM_SAMPLES // BATCH_SIZE - len(expected)
    assert 1 < num_failing <= len(BAD)
    for executor, options in EXECUTORS.items():
        loader = subject.loader(**options)
        for epoch in range(2 if "stay" in executor else 1):
            loader.set_epoch(0)
            errors: list[Exception] = []
            assert [plain(batch) for batch in catching(iter(loader), errors)] == expected, (executor, epoch)
            assert [type(error) for error in errors] == [SampleError] * num_failing, executor
            assert all(error.key and error.where for error in errors if isinstance(error, SampleError)), executor
            assert loader.state_dict()["position"] == NUM_SAMPLES, executor


def test_a_failed_batch_counts_when_the_next_one_is_requested(tmp_path: Path) -> None:
    subject = Subject(tmp_path, "map", {13: fill_with_noise})
    whole = good_batches(subject)
    stop = next(place for place, numbers in enumerate(order_of("map")) if 13 in numbers)
    for executor, options in EXECUTORS.items():
        loader = subject.loader(**options)
        batches = iter(loader)
        before = [plain(batch) for batch in islice(batches, stop)]
        with pytest.raises(SampleError):
            next(batches)
        assert loader.state_dict()["position"] == stop * BATCH_SIZE, f"{executor}: resumed with the batch that failed"
        after = plain(next(batches))
        assert loader.state_dict()["position"] == (stop + 2) * BATCH_SIZE, executor
        resumed = subject.loader(0)
        resumed.load_state_dict(loader.state_dict())
        assert [*before, after, *batches_of(resumed)] == whole, executor
        del batches


class PickyError(Exception):
    """A user's error with an attribute."""

    def __init__(self, word: str, number: int) -> None:
        super().__init__(word, number)
        self.number = number


class Picky:
    """A user's transform that refuses some images."""

    def __init__(self, refused: list[int]) -> None:
        self.refused = refused

    def __call__(self, image: Any) -> Any:
        if int(image.astype(int).sum()) in self.refused:
            raise PickyError("refused", 7)
        return image


class PickyCollate:
    """A user's collate_fn that refuses some samples."""

    def __init__(self, refused: list[str]) -> None:
        self.refused = refused

    def __call__(self, samples: list[Any]) -> list[str]:
        keys = [key for _, key in samples]
        if set(self.refused) & set(keys):
            raise PickyError("refused", 7)
        return keys


@pytest.mark.parametrize("num_workers", [0, 3])
@pytest.mark.parametrize("where", ["transform", "collate_fn"])
def test_errors_of_users_own_functions_lose_one_batch_each(packed: Path, num_workers: int, where: str) -> None:
    plain_dataset = ShardDataset(packed, fields=("image", "key"), shuffle=True)
    samples = list(plain_dataset)
    chosen = [samples[number] for number in (2, 3, 17)]
    sums = [int(image.int().sum()) for image, _ in chosen]
    transform = Picky(sums) if where == "transform" else None
    dataset = ShardDataset(packed, fields=("image", "key"), shuffle=True, transform=transform)
    refused = [key for _, key in chosen] if where == "collate_fn" else []
    loader = DataLoader(dataset, batch_size=4, num_workers=num_workers, collate_fn=PickyCollate(refused))
    errors: list[Exception] = []
    batches = list(catching(iter(loader), errors))
    keys = [key for _, key in samples]
    assert batches == [keys[start : start + 4] for start in range(0, len(keys), 4) if start not in (0, 16)]
    assert [(type(error), getattr(error, "number", None)) for error in errors] == [(PickyError, 7)] * 2


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        if index in (5, 6):
            raise PickyError("refused", index)
        return index


def test_errors_of_a_users_own_dataset_lose_one_batch_each() -> None:
    dataset = Numbers()
    order = list(EpochSampler(dataset))
    expected = [order[at : at + 3] for at in range(0, 20, 3) if not {5, 6} & set(order[at : at + 3])]
    for num_workers in (0, 2):
        loader = DataLoader(dataset, batch_size=3, sampler=EpochSampler(dataset), num_workers=num_workers)
        errors: list[Exception] = []
        assert [batch.tolist() for batch in catching(iter(loader), errors)] == expected
        assert {getattr(error, "number", None) for error in errors} <= {5, 6}
        assert len(errors) == 7 - len(expected)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchs_own_loader_delivers_the_rest_too(tmp_path: Path, num_workers: int) -> None:
    subject = Subject(tmp_path, "shards")
    dataset = ShardDataset(subject.tars, fields="key", shuffle=True, batch_size=BATCH_SIZE)
    twin = ShardDataset(subject.tars, fields="key", shuffle=True, batch_size=BATCH_SIZE)
    bad = {subject.name(number).split(" ")[0] for number in subject.bad}
    dataset = ShardDataset(
        subject.tars, fields=("key", "image", "label"), shuffle=True, batch_size=BATCH_SIZE, transform=Small()
    )
    keys = list(twin)
    loader: Any = torch.utils.data.DataLoader(
        dataset, batch_size=BATCH_SIZE, num_workers=num_workers, timeout=DEADLINE_S if num_workers else 0
    )
    errors: list[Exception] = []
    found = [list(batch[0]) for batch in catching(iter(loader), errors)]
    several = [keys[at : at + BATCH_SIZE] for at in range(0, NUM_SAMPLES, BATCH_SIZE)]
    assert found == [batch for batch in several if not bad & set(batch)]
    assert len(errors) == len(several) - len(found)


class Small:
    """A user's transform."""

    def __call__(self, image: Any) -> Any:
        return torch.from_numpy(image[:8, :8].copy())


@pytest.mark.parametrize("executor", ["this process", "torch here"])
def test_a_prefetcher_delivers_the_rest_too(tmp_path: Path, executor: str) -> None:
    subject = Subject(tmp_path, "shards")
    expected = good_batches(subject)
    wraps: list[Callable[[Any], Any]] = [
        lambda loader: DevicePrefetcher(loader, "cpu"),
        lambda loader: prefetch_late(loader, depth=1)[0],
        lambda loader: prefetch_late(loader, depth=3)[0],
    ]
    for wrap in wraps:
        loader = subject.loader(**EXECUTORS[executor])
        errors: list[Exception] = []
        batches = iter(wrap(loader))
        assert [plain(batch) for batch in catching(batches, errors)] == expected
        assert len(errors) == NUM_SAMPLES // BATCH_SIZE - len(expected)
        assert loader.state_dict()["position"] == NUM_SAMPLES
