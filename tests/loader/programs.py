"""Random programs that use a DataLoader: datasets, samplers and arguments. Everything can be pickled."""

from __future__ import annotations

import random
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any
from zlib import crc32

import numpy as np
import torch
from hypothesis import strategies as st
from torch.utils import data as torchs
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler, Sampler, get_worker_info

import shardio

Point = namedtuple("Point", ["x", "y"])  # Users' datasets may return named tuples.


VALUES: dict[str, Any] = {
    "int": lambda i: i,
    "float": lambda i: i / 3,
    "bool": lambda i: bool(i % 2),
    "string": lambda i: f"sample {i}",
    "bytes": lambda i: bytes([i % 256]),
    "tensor": lambda i: torch.full((3, 4), float(i)),
    "scalar tensor": lambda i: torch.tensor(i),
    "large tensor": lambda i: torch.full((3, 20, 20), i, dtype=torch.uint8),
    "transposed tensor": lambda i: torch.arange(1200).reshape(20, 60).T + i,
    "half": lambda i: torch.full((600,), i, dtype=torch.bfloat16),
    "array": lambda i: np.full((2, 2), i, np.float32),
    "large array": lambda i: np.full((30, 40), i, np.int16),
    "sliced array": lambda i: np.full((40, 40), i, np.int64)[::2, 1:],
    "scalar array": lambda i: np.float64(i),
    "tuple": lambda i: (i, str(i), torch.ones(2) * i),
    "list": lambda i: [i, torch.ones(2) * i],
    "dict": lambda i: {"a": i, "b": {"c": np.ones(3) * i}},
    "ordered dict": lambda i: OrderedDict(one=i, two=str(i)),
    "namedtuple": lambda i: Point(x=i, y=torch.ones(600) * i),
    "draws": lambda i: (i, random.random(), float(torch.rand(())), float(np.random.rand())),
}


@dataclass(frozen=True)
class Mapped(Dataset[Any]):
    size: int
    kind: str

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return VALUES[self.kind](index)


@dataclass(frozen=True)
class Fetched(Mapped):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@dataclass(frozen=True)
class Streamed(IterableDataset[Any]):
    size: int
    kind: str

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return map(VALUES[self.kind], range(first, self.size, step))


class Called(Dataset[Any]):
    """A map-style dataset that returns the results of a function of the index."""

    def __init__(self, function: Callable[[int], Any], size: int = 12) -> None:
        self.function, self.size = function, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.function(index)


class Shares(IterableDataset[Any]):
    """A stream in which ``share(worker_id, num_workers)`` returns a worker's samples."""

    def __init__(self, share: Callable[[int, int], Iterable[Any]]) -> None:
        self.share = share

    def __iter__(self) -> Iterator[Any]:
        info = shardio.get_worker_info()
        return iter(self.share(0, 1) if info is None else self.share(info.id, info.num_workers))


@dataclass
class Sized(Sampler[Any]):
    size: int

    def __len__(self) -> int:
        return self.size


class Shuffled(Sized):
    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(self.size), self.size))


class Continued(Sized):
    """A user's sampler that draws each index at random, and continues where its latest iterator stopped."""

    num_yielded = 0

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.size):
            self.num_yielded += 1
            yield (self.num_yielded + random.randrange(3)) % self.size


class Stateful(Sized):
    """A user's sampler that, when resumed from the state at an epoch's end, yields nothing instead of a new epoch."""

    num_yielded = first = 0

    def __iter__(self) -> Iterator[int]:
        first, self.first = self.first, 0
        for index in range(first, self.size):
            self.num_yielded = index + 1
            yield self.size - 1 - index

    def state_dict(self) -> dict[str, int]:
        return {"num_yielded": self.num_yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["num_yielded"]


class Buckets(Sized):
    def __len__(self) -> int:
        return len(range(0, self.size, 3))

    def __iter__(self) -> Iterator[list[int]]:
        starts = list(range(0, self.size, 3))
        np.random.shuffle(starts)
        return iter([list(range(start, min(start + 3, self.size))) for start in starts])


def as_list(samples: Any) -> Any:
    return samples


def stack_first(samples: list[Any]) -> Any:
    stacked = torch.stack([torch.full((3, 8, 8), float(crc32(str(sample).encode()) % 97)) for sample in samples])
    return {"stacked": stacked.to(memory_format=torch.channels_last), "view": stacked[1:], "samples": len(samples)}


def skip_seed(worker_id: int) -> None:
    random.seed(worker_id)


_SAMPLERS: dict[str, Any] = {
    "sequential": torchs.SequentialSampler,
    "random": RandomSampler,
    "random with a generator": lambda data: RandomSampler(data, generator=torch.Generator().manual_seed(5)),
    "random with replacement": lambda data: RandomSampler(data, replacement=True, num_samples=len(data) + 3),
    "subset": lambda data: torchs.SubsetRandomSampler(range(0, len(data), 2)),
    "weighted": lambda data: torchs.WeightedRandomSampler([1.0] * len(data), len(data)),
    "distributed": lambda data: torchs.DistributedSampler(data, num_replicas=2, rank=1),
    "user's": lambda data: Shuffled(len(data)),
    "user's that continues": lambda data: Continued(len(data)),
    "list": lambda data: list(range(len(data)))[::-1],
}


@dataclass(frozen=True)
class Program:
    dataset: Any
    arguments: dict[str, Any]
    sampler: str | None
    batches: str | None
    seeds_generator: bool

    def make(self, loader: Any, **options: Any) -> Any:
        arguments = {**self.arguments, **options}
        if self.sampler is not None:
            arguments["sampler"] = _SAMPLERS[self.sampler](self.dataset)
        if self.batches == "user's":
            arguments["batch_sampler"] = Buckets(len(self.dataset))
        elif self.batches == "torch's":
            arguments["batch_sampler"] = BatchSampler(RandomSampler(self.dataset), 4, drop_last=True)
        if self.seeds_generator:
            arguments["generator"] = torch.Generator().manual_seed(7)
        return loader(self.dataset, **arguments)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    kind, size = draw(st.sampled_from(sorted(VALUES))), draw(st.integers(1, 23))
    dataset = draw(st.sampled_from([Mapped, Fetched, Streamed]))(size, kind)
    is_iterable = isinstance(dataset, Streamed)
    arguments: dict[str, Any] = {"num_workers": draw(st.sampled_from([0, 1, 2, 3]))}
    sampler = batches = None
    if not is_iterable and draw(st.booleans()):
        batches = draw(st.sampled_from(["user's", "torch's"]))
    else:
        arguments["batch_size"] = draw(st.sampled_from([None, 1, 2, 5, 30]))
        if arguments["batch_size"] is not None:
            arguments["drop_last"] = draw(st.booleans())
        if not is_iterable:
            sampler = draw(st.sampled_from([None, *_SAMPLERS]))
            arguments["shuffle"] = draw(st.booleans()) if sampler is None else None
    if arguments.get("batch_size", 1) is not None:
        arguments["collate_fn"] = draw(st.sampled_from([None, None, as_list, stack_first]))
    if arguments["num_workers"]:
        arguments["prefetch_factor"] = draw(st.sampled_from([None, 1, 3]))
        arguments["persistent_workers"] = draw(st.booleans())
        arguments["worker_init_fn"] = draw(st.sampled_from([None, skip_seed]))
        arguments["timeout"] = draw(st.sampled_from([0, 60]))
        arguments["multiprocessing_context"] = draw(st.sampled_from([None, "fork"]))
        arguments["in_order"] = kind == "draws" or draw(st.sampled_from([True, True, False]))
    arguments["pin_memory"] = draw(st.booleans())  # Without an accelerator, both loaders warn about pin_memory.
    return Program(dataset, arguments, sampler, batches, draw(st.booleans()))


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def run(loader: Any, num_taken: int | None = None) -> list[Any]:
    """Return the batches of three epochs or their errors, and random numbers drawn after each epoch.

    Batches that may arrive in any order are sorted. The first epoch ends after ``num_taken`` batches, if given.
    """
    seen = list[Any]()
    for epoch in range(3):
        try:
            batches = list(islice(loader, None if epoch else num_taken))
        except Exception as error:  # The error is the epoch's result.
            seen.append(type(error))
            continue
        finally:
            seen.append((random.random(), float(torch.rand(())), float(np.random.rand())))
        seen.append(batches if loader.in_order else sorted(batches, key=lambda batch: repr(describe(batch))))
    return seen


def describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (type(value), value.dtype, tuple(value.shape), value.stride(), value.double().nan_to_num().tolist())
    if isinstance(value, np.ndarray):
        return (type(value), value.dtype.str, value.shape, value.strides, value.tolist())
    if isinstance(value, dict):
        return (type(value), [(key, describe(each)) for key, each in value.items()])
    if isinstance(value, list | tuple):
        return (type(value), [describe(each) for each in value])
    return (type(value), value)


WORKERS: dict[str, dict[str, Any]] = {
    "caller": {},
    "processes": {"num_workers": 2},
    "threads": {"num_workers": 2, "worker_method": "thread"},
}


def do_nothing(worker_id: int) -> None:
    """Do nothing: as ``worker_init_fn``, this makes workers call the dataset, and changes nothing else."""


CALLING: dict[str, Any] = {"worker_init_fn": do_nothing}


def keys_of(loader: Any) -> list[list[str]]:
    return [list(keys) for _, _, keys in loader]


def flatten(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch.tolist()]
