"""A loop that catches a batch's error and requests the next batch receives the rest of the epoch from any executor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Sampler

from shardio import DataLoader, DevicePrefetcher, EpochSampler, ImageFolder, SampleError, ShardDataset, ShardMapDataset
from shardio.transforms import RandomResizedCrop
from tests.device.late_stream import prefetch_late
from tests.faults.damage import BAD, BATCH_SIZE, NUM_SAMPLES, Subject, fill_with_noise, order_of
from tests.faults.worker_processes import DEADLINE_S, Batches, batches_of, plain

EXECUTORS: dict[str, dict[str, Any]] = {
    "this process": {"num_workers": 0},
    "workers that stay": {"num_workers": 2, "persistent_workers": True},
    "called here": {"num_workers": 0, "worker_init_fn": print},
    "called in workers that stay": {"num_workers": 1, "worker_init_fn": id, "persistent_workers": True},
}


def catching(batches: Iterator[Any], errors: list[Exception]) -> Iterator[Any]:
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
    twins = zip(batches_of(subject.loader(0, clean=True)), order_of(subject.kind), strict=True)
    return [batch for batch, numbers in twins if not set(numbers) & set(subject.bad)]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_every_executor_delivers_the_rest_of_the_epoch(tmp_path: Path, executor: str) -> None:
    subject = Subject(tmp_path, "shards")
    expected = good_batches(subject)
    num_failing = NUM_SAMPLES // BATCH_SIZE - len(expected)
    assert 1 < num_failing <= len(BAD)
    loader = subject.loader(**EXECUTORS[executor])
    for _ in range(2 if "stay" in executor else 1):
        loader.set_epoch(0)
        errors: list[Exception] = []
        assert [plain(batch) for batch in catching(iter(loader), errors)] == expected
        assert [type(error) for error in errors] == [SampleError] * num_failing
        assert all(error.key and error.where for error in errors if isinstance(error, SampleError))
        assert loader.state_dict()["position"] == NUM_SAMPLES


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_failed_batch_counts_when_the_next_one_is_requested(tmp_path: Path, executor: str) -> None:
    subject = Subject(tmp_path, "map", {13: fill_with_noise})
    stop = next(place for place, numbers in enumerate(order_of("map")) if 13 in numbers)
    loader = subject.loader(**EXECUTORS[executor])
    batches = iter(loader)
    before = [plain(batch) for batch in islice(batches, stop)]
    with pytest.raises(SampleError):
        next(batches)
    assert loader.state_dict()["position"] == stop * BATCH_SIZE, "resumed with the batch that failed"
    after = plain(next(batches))
    assert loader.state_dict()["position"] == (stop + 2) * BATCH_SIZE
    resumed = subject.loader(0)
    resumed.load_state_dict(loader.state_dict())
    assert [*before, after, *batches_of(resumed)] == good_batches(subject)


@pytest.mark.parametrize(("num_workers", "place"), [(0, 0), (0, 40), (0, -1), (3, 40)])
def test_the_batch_after_an_unreadable_one_is_whole(tmp_path: Path, num_workers: int, place: int) -> None:
    """Over one of torch's samplers, with batches that are made in several chunks, also in the training process."""
    subject = Subject(tmp_path, "map", {1: fill_with_noise})
    dataset = ShardMapDataset(subject.tars, fields=("image", "key"), transform=RandomResizedCrop(48))
    good = [number % NUM_SAMPLES for number in range(80) if number % NUM_SAMPLES != 1]
    whole = list(good)
    whole[place] = 1
    iterator = iter(DataLoader(dataset, batch_sampler=[whole, good] * 2, num_workers=num_workers))
    for _ in range(2):
        with pytest.raises(SampleError, match="cannot be decoded"):
            next(iterator)
        _, keys = next(iterator)
        assert keys == tuple(dataset[number][1] for number in good)
    assert list(iterator) == []


@pytest.mark.parametrize(("num_workers", "number"), [(0, 0), (0, 1), (0, 5), (1, 0), (1, 5)])
def test_an_error_that_blames_no_sample_ends_no_epoch_wherever_it_comes(
    tmp_path: Path, num_workers: int, number: int
) -> None:
    """The first sample that is read shows how batches lie in memory. Its error is that of its batch, too."""
    Subject(tmp_path, "folder", {})
    folder = ImageFolder(tmp_path / "clean", transform=RandomResizedCrop(48))
    good = [labels.tolist() for _, labels in DataLoader(folder, batch_size=4)]
    assert len(good) == NUM_SAMPLES // 4
    folder.samples[number] = (folder.samples[number][0], 0.5)  # type: ignore[assignment]  # the test
    loader = DataLoader(folder, batch_size=4, sampler=EpochSampler(folder, shuffle=False), num_workers=num_workers)
    errors: list[Exception] = []
    assert [labels.tolist() for _, labels in catching(iter(loader), errors)] == [
        expected for at, expected in enumerate(good) if at != number // 4
    ]
    assert [type(error) for error in errors] == [TypeError]
    assert "got 0.5 for" in str(errors[0])
    assert loader.state_dict()["position"] == NUM_SAMPLES


@pytest.mark.parametrize(("num_workers", "on_error"), [(0, "replace"), (1, "raise")])
def test_an_error_says_what_caused_it(tmp_path: Path, num_workers: int, on_error: str) -> None:
    subject = Subject(tmp_path, "map", dict.fromkeys(range(NUM_SAMPLES), fill_with_noise))
    with pytest.raises(SampleError, match="cannot be decoded") as error_info:
        next(iter(subject.loader(num_workers, on_error=on_error)))
    cause: BaseException | None = error_info.value
    for _ in range(2 if on_error == "replace" else 1):  # It says so once more, of the last one that was tried.
        assert cause is not None
        cause = cause.__cause__
    if num_workers:
        assert isinstance(cause, RuntimeError)
        assert str(cause).startswith("in a worker:\nTraceback (most recent call last)")
        assert "\nValueError: it is " in str(cause), "with its own cause"
    else:
        assert isinstance(cause, ValueError)


class Failing(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(5)
        raise OSError("the list of samples is gone")


@pytest.mark.parametrize(("num_workers", "init"), [(0, None), (1, None), (0, id), (1, id)])
def test_a_samplers_error_ends_the_epoch_but_never_silently(tmp_path: Path, num_workers: int, init: Any) -> None:
    dataset = ShardMapDataset(Subject(tmp_path, "map", {}).tars, fields="key")
    iterator = iter(DataLoader(dataset, sampler=Failing(), num_workers=num_workers, worker_init_fn=init))
    assert [next(iterator) for _ in range(5)] == [[dataset[index]] for index in range(5)]
    for _ in range(3):
        with pytest.raises(OSError, match="is gone"):
            next(iterator)


class PickyError(Exception):
    def __init__(self, word: str, number: int) -> None:
        super().__init__(word, number)
        self.number = number


class Picky:
    def __init__(self, refused: list[Any]) -> None:
        self.refused = refused

    def __call__(self, value: Any) -> Any:
        keys = [key for _, key in value] if isinstance(value, list) else [int(value.astype(int).sum())]
        if set(self.refused) & set(keys):
            raise PickyError("refused", 7)
        return keys if isinstance(value, list) else value


@pytest.mark.parametrize("num_workers", [0, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("where", ["transform", "collate_fn"])
def test_errors_of_users_own_functions_lose_one_batch_each(packed: Path, num_workers: int, where: str) -> None:
    samples = list(ShardDataset(packed, fields=("image", "key"), shuffle=True))
    chosen = [samples[number] for number in (2, 3, 17)]
    transform = Picky([int(image.int().sum()) for image, _ in chosen]) if where == "transform" else None
    dataset = ShardDataset(packed, fields=("image", "key"), shuffle=True, transform=transform)
    collate = Picky([key for _, key in chosen] if where == "collate_fn" else [])
    loader = DataLoader(dataset, batch_size=4, num_workers=num_workers, collate_fn=collate)
    errors: list[Exception] = []
    batches = list(catching(iter(loader), errors))
    keys = [key for _, key in samples]
    assert batches == [keys[start : start + 4] for start in range(0, len(keys), 4) if start not in (0, 16)]
    assert [(type(error), getattr(error, "number", None)) for error in errors] == [(PickyError, 7)] * 2


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_torchs_own_loader_delivers_the_rest_too(tmp_path: Path, num_workers: int) -> None:
    subject = Subject(tmp_path, "shards")
    options: dict[str, Any] = {"shuffle": True, "batch_size": BATCH_SIZE}
    dataset = ShardDataset(
        subject.tars, fields=("key", "image", "label"), transform=lambda image: torch.zeros(1), **options
    )
    keys = list(ShardDataset(subject.tars, fields="key", **options))
    timeout = DEADLINE_S if num_workers else 0
    loader: Any = torch.utils.data.DataLoader(dataset, BATCH_SIZE, num_workers=num_workers, timeout=timeout)
    errors: list[Exception] = []
    found = [list(batch[0]) for batch in catching(iter(loader), errors)]
    bad = {subject.name(number).split(" ")[0] for number in subject.bad}
    several = [keys[at : at + BATCH_SIZE] for at in range(0, NUM_SAMPLES, BATCH_SIZE)]
    assert found == [batch for batch in several if not bad & set(batch)]
    assert len(errors) == len(several) - len(found)


@pytest.mark.parametrize("executor", ["this process", "called here"])
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
        assert [plain(batch) for batch in catching(iter(wrap(loader)), errors)] == expected
        assert len(errors) == NUM_SAMPLES // BATCH_SIZE - len(expected)
        assert loader.state_dict()["position"] == NUM_SAMPLES
