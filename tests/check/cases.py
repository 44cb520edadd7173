"""The building blocks of the checker's campaign: cases, verdicts and loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from types import FunctionType
from typing import Any, Literal

import torch
import webdataset
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import shardio
from shardio import CoverageError, FormatError, ShardDataset
from shardio.check import Coverage, assert_exactly_once, find_frozen_orders, judge, merge_recordings, record
from shardio.check.report import ExpectedSamples
from shardio.errors import IdentityError

N = 96
B = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A loader and the checker's expected verdict: part of the message, or "" for a correct loader.

    ``ask`` runs the checker on a packed dataset. It returns normally if the checker finds no fault.
    """

    name: str
    ask: Callable[[Path], object]
    says: str = ""
    is_slow: bool = False

    def judge(self, packed: Path) -> tuple[Literal["right", "wrong", "keys wanted"], str]:
        try:
            self.ask(packed)
        except IdentityError as error:
            return "keys wanted", str(error)
        except (CoverageError, FormatError) as error:
            return "wrong", str(error)
        return "right", ""


class Registry:
    def __init__(self) -> None:
        self.cases: list[Case] = []

    def __call__(self, name: str, says: str = "", *, slow: bool = False) -> Callable[[Callable[[Path], object]], None]:
        return lambda ask: self.cases.append(Case(name=name, ask=ask, says=says, is_slow=slow))

    def once(
        self, name: str, says: str, loader: Any, expected: Any = range(N), *, slow: bool = False, **options: Any
    ) -> None:
        """Register a check that runs in this process, on a given loader or on one that a given function makes."""

        def ask(packed: Path) -> None:
            assert_exactly_once(loader() if isinstance(loader, FunctionType) else loader, expected, **options)

        self(name, says, slow=slow)(ask)


def cut(keys: Sequence[Any], size: int = B) -> list[list[Any]]:
    return [list(keys[start : start + size]) for start in range(0, len(keys), size)]


def check_ranks(
    loaders: Sequence[Iterable[Any]],
    expected: ExpectedSamples,
    *,
    epochs: int = 1,
    key: Any = None,
    set_epoch: Callable[[int], object] | None = None,
) -> None:
    """Check as ``shardio check script.py:function`` does, allowing for each loader's own remainder policy."""
    found = []
    for epoch in range(epochs):
        if set_epoch is not None:
            set_epoch(epoch)
        coverage = Coverage()
        for rank, loader in enumerate(loaders):
            record(loader, coverage, rank=rank, key=key, world_size=len(loaders))
        found.append(coverage)
    raise_verdict(found, expected)


def raise_verdict(found: list[Coverage], expected: ExpectedSamples) -> None:
    for report in judge(found, expected):
        report.raise_if_wrong()
    if causes := find_frozen_orders(found):
        raise CoverageError("\n".join(causes))


def merge(directory: Path, expected: ExpectedSamples | None = None) -> None:
    raise_verdict(merge_recordings(sorted(directory.glob("*.cov"))), expected or ExpectedSamples())


def ours(packed: Path, world_size: int = 2, **options: Any) -> list[shardio.DataLoader]:
    options = {"shuffle": True, "fields": "key", **options}
    ranks = [{"rank": rank, "world_size": world_size, **options} for rank in range(world_size)]
    return [shardio.DataLoader(ShardDataset(packed, **rank), batch_size=4) for rank in ranks]


def all_of(packed: Path) -> ExpectedSamples:
    dataset = ShardDataset(packed, fields="key", rank=0, world_size=1)
    return replace(ExpectedSamples.of_keys(dataset), digest=dataset.digest)


class Tampered:
    """A wrapper that has a loader's attributes, and passes the loader's batches through a function."""

    def __init__(self, loader: Any, change: Callable[[list[Any]], Iterable[Any]]) -> None:
        self.loader, self.change = loader, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.change(list(self.loader)))


class Images(Dataset[torch.Tensor]):
    def __init__(self, noise: float = 0.0, num_samples: int = N) -> None:
        self.noise, self.num_samples = noise, num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.full((3, 4, 4), float(number)) + self.noise * torch.rand(1)


class Flipped(Images):
    def __getitem__(self, number: int) -> torch.Tensor:
        image = torch.arange(48.0).reshape(3, 4, 4) + number
        return image.flip(2) if torch.rand(1) < 0.5 else image


class Keyed(Images):
    def __getitem__(self, number: int) -> Any:
        return {"image": super().__getitem__(number), "id": number}


def load(dataset: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, **{"batch_size": B, **options})


def split(dataset: Any, world_size: int = 2, **options: Any) -> list[Any]:
    return [DistributedSampler(dataset, world_size, rank, **options) for rank in range(world_size)]


def by(samplers: Sequence[Any], **options: Any) -> tuple[DataLoader[Any], ...]:
    return tuple(load(sampler.dataset, sampler=sampler, **options) for sampler in samplers)


def web(packed: Path, **options: Any) -> Any:
    tars = sorted(map(str, packed.glob("*.tar")))
    return webdataset.WebDataset(tars, **{"shardshuffle": False, **options}).map(itemgetter("__key__"))
