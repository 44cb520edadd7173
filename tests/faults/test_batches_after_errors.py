"""After a batch that fails, an iterator over one of torch's samplers delivers the next one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils.data import Sampler

from shardio import DataLoader, EpochSampler, ImageFolder, SampleError, ShardMapDataset
from shardio.transforms import RandomResizedCrop
from tests.faults.damage import NUM_SAMPLES, Subject, fill_with_noise

BATCH_SIZE = 80
"""Made in several chunks, also in the training process."""


@pytest.mark.parametrize(("num_workers", "place"), [(0, 0), (0, 40), (0, -1), (3, 40)])
def test_the_batch_after_an_unreadable_one_is_whole(tmp_path: Path, num_workers: int, place: int) -> None:
    subject = Subject(tmp_path, "map", {1: fill_with_noise})
    dataset = ShardMapDataset(subject.tars, fields=("image", "key"), transform=RandomResizedCrop(48))
    good = [number % NUM_SAMPLES for number in range(BATCH_SIZE) if number % NUM_SAMPLES != 1]
    whole = list(good)
    whole[place] = 1
    batches = [whole, good, whole, good]
    iterator = iter(DataLoader(dataset, batch_sampler=batches, num_workers=num_workers))
    for _ in range(2):
        with pytest.raises(SampleError, match="cannot be decoded"):
            next(iterator)
        _, keys = next(iterator)
        assert keys == tuple(dataset[number][1] for number in good)
    assert list(iterator) == []


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("number", [0, 1, 5])
def test_an_error_that_blames_no_sample_ends_no_epoch_wherever_it_comes(
    tmp_path: Path, num_workers: int, number: int
) -> None:
    """The first sample that is read shows how batches lie in memory. Its error is that of its batch, too."""
    Subject(tmp_path, "folder", {})
    folder = ImageFolder(tmp_path / "clean", transform=RandomResizedCrop(48))
    good = [labels.tolist() for _, labels in DataLoader(folder, batch_size=4)]
    assert len(good) == NUM_SAMPLES // 4
    folder.samples[number] = (folder.samples[number][0], 0.5)  # type: ignore[assignment]  # the test
    sampler = EpochSampler(folder, shuffle=False)
    loader = DataLoader(folder, batch_size=4, sampler=sampler, num_workers=num_workers)
    batches = iter(loader)
    for at, expected in enumerate(good):
        if at == number // 4:
            with pytest.raises(TypeError, match=r"got 0\.5 for"):
                next(batches)
        else:
            assert next(batches)[1].tolist() == expected
    assert list(batches) == []
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
    """A sampler that fails in the middle of the epoch."""

    def __iter__(self) -> Iterator[int]:
        yield from range(5)
        raise OSError("the list of samples is gone")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_samplers_error_ends_the_epoch_but_never_silently(tmp_path: Path, num_workers: int) -> None:
    subject = Subject(tmp_path, "map", {})
    dataset = ShardMapDataset(subject.tars, fields="key")
    iterator = iter(
        DataLoader(dataset, sampler=Failing(), num_workers=num_workers, worker_init_fn=lambda worker_id: None)
    )
    assert [next(iterator) for _ in range(5)] == [[dataset[index]] for index in range(5)]
    for _ in range(3):
        with pytest.raises(OSError, match="is gone"):
            next(iterator)
