"""Datasets with unreadable samples, and an undamaged twin of each dataset."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import DataLoader, EpochSampler, ImageFolder, ShardDataset, ShardMapDataset
from shardio.order import EpochOrder, choose_settings
from tests.faults.worker_processes import CROP, DEADLINE_S, Kind
from tests.sources import encode
from tests.tars import write_tar

NUM_SAMPLES, SHARD_SIZE, BATCH_SIZE = 40, 10, 4

GOOD = [encode(number, width=64, height=64) for number in range(NUM_SAMPLES)]

Damage = Callable[[bytes], bytes | None]


def cut_off(content: bytes) -> bytes:
    return content[: content.index(b"\xff\xda") + 20]


def fill_with_noise(content: bytes) -> bytes:
    return np.random.default_rng(len(content)).bytes(len(content))


def empty(content: bytes) -> bytes:
    return b""


def remove(content: bytes) -> None:
    """Leave out an image file, or, in a tar, the sample's label."""


BAD: dict[int, Damage] = {5: cut_off, 13: fill_with_noise, 14: empty, 31: remove}


def key_of(number: int) -> str:
    return f"class-{number % 2}/{number:03d}"


def write_shards(folder: Path, bad: dict[int, Damage]) -> list[Path]:
    folder.mkdir()
    tars = []
    for first in range(0, NUM_SAMPLES, SHARD_SIZE):
        members = []
        for number in range(first, first + SHARD_SIZE):
            damage = bad.get(number, bytes)
            content, key = damage(GOOD[number]), key_of(number)
            members.append((f"{key}.jpg", GOOD[number] if content is None else content))
            members += [] if content is None else [(f"{key}.cls", b"%d" % (number % 2))]
        tars.append(folder / f"shard-{first:06d}.tar")
        write_tar(tars[-1], members)
    return tars


def order_of(kind: Kind) -> list[list[int]]:
    sizes = [NUM_SAMPLES] if kind == "folder" else [SHARD_SIZE] * (NUM_SAMPLES // SHARD_SIZE)
    settings = choose_settings(np.array(sizes), shuffle=True, seed=0)
    order = EpochOrder(np.array(sizes), settings, 0).samples_at(np.arange(NUM_SAMPLES)).tolist()
    return [order[first : first + BATCH_SIZE] for first in range(0, NUM_SAMPLES, BATCH_SIZE)]


def warns_of_bad_samples(num_bad: int | None = None, epoch: int = 0) -> Any:
    number = r"\d+" if num_bad is None else num_bad
    said = rf"unreadable samples (replaced|skipped) in epoch {epoch}: {number}\. "
    return pytest.warns(RuntimeWarning, match=said)


class Subject:
    """A dataset of one kind with damaged samples, and its undamaged twin.

    A sample has the same number in both datasets.
    """

    def __init__(self, folder: Path, kind: Kind, bad: dict[int, Damage] | None = None) -> None:
        self.folder, self.kind = folder, kind
        self.bad = BAD if bad is None else bad
        self.quarantine = folder / "quarantine.jsonl"
        if kind != "folder":
            self.tars = write_shards(folder / "damaged", self.bad)
            self._clean_tars = write_shards(folder / "clean", {})
            return
        for place, damages in (("damaged", self.bad), ("clean", dict[int, Damage]())):
            for number in range(NUM_SAMPLES):
                path = folder / place / "class" / f"{number:03d}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(damages.get(number, bytes)(GOOD[number]) or b"")
        self._folder = ImageFolder(folder / "damaged", transform=CROP)
        for number, damage in self.bad.items():
            if damage is remove:
                (folder / "damaged" / "class" / f"{number:03d}.jpg").unlink()

    def loader(self, num_workers: int, *, clean: bool = False, batch_size: int = BATCH_SIZE, **options: Any) -> Any:
        timeout = DEADLINE_S if num_workers else 0
        options = {"quarantine": self.quarantine, **options}
        options |= {"batch_size": batch_size, "num_workers": num_workers, "timeout": timeout}
        of_order = {name: options.pop(name) for name in ("remainder", "rank", "world_size") if name in options}
        if self.kind == "folder":
            folder = ImageFolder(self.folder / "clean", transform=CROP) if clean else self._folder
            return DataLoader(folder, sampler=EpochSampler(folder), **options)
        tars, fields = self._clean_tars if clean else self.tars, ("image", "label", "key")
        if self.kind == "shards":
            return DataLoader(ShardDataset(tars, fields=fields, shuffle=True, transform=CROP, **of_order), **options)
        mapped = ShardMapDataset(tars, fields=fields, transform=CROP)
        return DataLoader(mapped, sampler=EpochSampler(mapped), **options)

    def name(self, number: int) -> str:
        if self.kind == "folder":
            return f"{number:03d}.jpg"
        return f"{key_of(number)} in {self.tars[number // SHARD_SIZE]} at byte "

    def entries(self) -> list[dict[str, Any]]:
        lines = self.quarantine.read_text().splitlines() if self.quarantine.exists() else []
        return sorted(map(json.loads, lines), key=lambda entry: int(entry["sample"]))
