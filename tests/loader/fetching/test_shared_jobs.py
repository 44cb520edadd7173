"""Workers that are not forked share one pickle of the dataset, whose buffers are not copied."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import re
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

from shardio import DataLoader, ImageFolder, SharedList
from shardio.loader.fetching.fetchers import FetchJob
from shardio.loader.fetching.worker_process import SharedJob
from tests.loader.fetching.programs import as_list
from tests.processes import forkserver_context

NUM_BYTES = 100 << 20


class Large(torch.utils.data.Dataset[Any]):
    """A dataset with an array, a shared tensor, a lock and a value that all workers share."""

    def __init__(self) -> None:
        self.array = np.arange(NUM_BYTES // 8)
        self.names = SharedList([(f"name {number}", number) for number in range(1000)])
        self.tensor = torch.zeros(10).share_memory_()
        self.value = multiprocessing.get_context("spawn").Value("i", 0)
        self.frozen = np.arange(1000)
        self.frozen.flags.writeable = False
        self.num_pickled = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        self.array[index] = -index  # A copy of that page is this worker's.
        with self.value.get_lock():
            self.value.value += 1
        self.tensor[index % 10] += 1
        return self.names[index], int(self.array[index + 1000]), _read_copied_bytes(), self.frozen.flags.writeable

    def __getstate__(self) -> dict[str, Any]:
        self.num_pickled += 1
        return self.__dict__


def _read_copied_bytes() -> int:
    """Return how much of the job's memory this process has copies of; -1 if it has not mapped any."""
    parts = Path("/proc/self/smaps").read_text().split("VmFlags")
    mapped = [part for part in parts if "memfd:shardio" in part]
    return sum(1024 * int(re.findall(r"Private_Dirty: +(\d+) kB", part)[0]) for part in mapped) if mapped else -1


def test_a_dataset_is_pickled_once_and_its_arrays_are_not_copied() -> None:
    dataset = Large()
    context = forkserver_context()
    loader = DataLoader(dataset, 2, num_workers=2, multiprocessing_context=context, collate_fn=as_list)
    received = [sample for batch in loader for sample in batch]
    assert [sample[:2] for sample in received] == [((f"name {n}", n), n + 1000) for n in range(12)]
    assert not any(is_writable for *_, is_writable in received)
    assert dataset.num_pickled == 1
    assert dataset.array[:12].tolist() == list(range(12))
    assert dataset.value.value == 12
    assert int(dataset.tensor.sum()) == 12
    assert all(0 < num_bytes < NUM_BYTES // 100 for *_, num_bytes, _ in received)


class Seeding:
    """A dataset whose module seeds the generators when it is imported."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return float(torch.rand(()))

    def __reduce__(self) -> Any:
        return _seed, ()


def _seed() -> Seeding:
    torch.manual_seed(0)
    return Seeding()


def test_workers_have_torchs_seeds_whatever_the_dataset_seeds_on_import() -> None:
    def draw(loader: Any) -> Any:
        generator = torch.Generator().manual_seed(1)
        options = {"num_workers": 2, "multiprocessing_context": forkserver_context(), "generator": generator}
        return torch.cat(list(loader(Seeding(), **options))).tolist()

    drawn = draw(DataLoader)
    assert drawn == draw(torch.utils.data.DataLoader)
    assert len(set(drawn)) == 4


class Holder:
    """Holds a value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def get(self) -> Any:
        return self.value


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (lambda: 3, "dataset.value"),
        ([1, {"a": (2, threading.Lock())}], "dataset.value[1]['a'][1]"),
        (partial(Holder, Holder(threading.Lock())), "dataset.value.args[0].value"),
        (Holder(Holder(threading.Lock())).get, "dataset.value.__self__.value.value"),
    ],
    ids=["lambda", "nested", "partial", "method"],
)
def test_the_error_names_the_attribute_that_cannot_be_pickled(value: Any, path: str) -> None:
    job = FetchJob(
        dataset=Holder(value),
        is_iterable=False,
        is_batched=True,
        batch_size=1,
        drop_last=False,
        collate_fn=as_list,
        worker_init_fn=None,
        num_workers=1,
    )
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)) as caught:
        SharedJob(job)
    assert f"({path} cannot be pickled, but worker processes that are not forked receive" in str(caught.value)
    assert "worker_method='thread' or multiprocessing_context='fork'" in str(caught.value)


def test_a_loader_whose_dataset_cannot_be_sent_leaves_no_process() -> None:
    before = set(multiprocessing.active_children())
    loader = DataLoader([threading.Lock()], num_workers=2, multiprocessing_context="spawn")
    with pytest.raises(TypeError, match=r"dataset\[0\] cannot be pickled"):
        iter(loader)
    gc.collect()
    assert set(multiprocessing.active_children()) == before


class Unwilling:
    """Something that cannot be loaded by another process."""

    def __len__(self) -> int:
        return 4

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise ImportError("no such module here")


def test_a_worker_that_cannot_load_the_dataset_says_so() -> None:
    with pytest.raises(ImportError, match="no such module here") as caught:
        next(iter(DataLoader(Unwilling(), num_workers=1, multiprocessing_context=forkserver_context())))
    assert "while loading the dataset in a worker process" in caught.value.__notes__


def test_a_directory_is_a_list_in_a_few_arrays(images: Path) -> None:
    folder = ImageFolder(images)
    assert isinstance(folder.samples, SharedList)
    assert folder.targets == [label for _, label in folder.samples]
