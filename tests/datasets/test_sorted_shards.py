"""Shards that are sorted by class, as users' shards often are, are mixed more widely than other shards."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import shardio
from shardio import EpochSampler, ShardDataset, ShardMapDataset
from shardio.order import EpochOrder, choose_settings, divide_among_ranks
from shardio.shards import is_sorted_by_class, open_table
from tests.servers.server import put_all
from tests.storage.conftest import in_memory
from tests.tars import write_tar

NUM_CLASSES, NUM_SHARDS, SHARD_SAMPLES = 12, 24, 10


def write_tars(folder: Path, labels: Sequence[int | None]) -> Path:
    folder.mkdir()
    for shard in range(NUM_SHARDS):
        members = list[tuple[str, bytes]]()
        for number in range(shard * SHARD_SAMPLES, (shard + 1) * SHARD_SAMPLES):
            label = labels[number]
            members += [(f"{number:04d}.txt", b"%d" % number)]
            members += [] if label is None else [(f"{number:04d}.cls", b"%d" % label)]
        write_tar(folder / f"{shard:02d}.tar", members)
    return folder


def sorted_labels(num_classes: int = NUM_CLASSES) -> list[int]:
    return [number * num_classes // (NUM_SHARDS * SHARD_SAMPLES) for number in range(NUM_SHARDS * SHARD_SAMPLES)]


LABELS: dict[str, tuple[Sequence[int | None], bool]] = {
    "sorted": (sorted_labels(), True),
    "two classes": (sorted_labels(2), True),
    "unequal classes": ([0] * 150 + [1] * 90, True),
    "a large class": ([0] * 190 + [1] * 30 + [2] * 20, True),
    "one class": (sorted_labels(1), False),
    "shuffled": (random.Random(0).sample(sorted_labels(), len(sorted_labels())), False),
    "in turn": ([number % NUM_CLASSES for number in range(len(sorted_labels()))], False),
    "no labels": ([None] * len(sorted_labels()), False),
    "few labels": ([label if label < 3 else None for label in sorted_labels()], True),
}


@pytest.mark.parametrize(("labels", "expected"), LABELS.values(), ids=LABELS)
def test_sorted_tars_are_found_by_their_labels(tmp_path: Path, labels: Sequence[int | None], expected: bool) -> None:
    table = open_table(write_tars(tmp_path / "tars", labels))
    assert is_sorted_by_class(table) == expected
    for dataset in (
        ShardDataset(tmp_path / "tars", fields="txt", shuffle=True),
        EpochSampler(ShardMapDataset(tmp_path / "tars", fields="txt")),
    ):
        assert (dataset.strata == 1) == expected
    assert ShardDataset(tmp_path / "tars", fields="txt", shuffle=True, strata=2).strata == 2


def test_packed_shards_are_sorted_only_if_they_were_packed_in_order(images: Path, tmp_path: Path) -> None:
    shardio.pack(images, tmp_path / "mixed", max_shard_samples=5)
    shardio.pack(images, tmp_path / "sorted", max_shard_samples=5, shuffle_seed=None)
    assert not is_sorted_by_class(open_table(tmp_path / "mixed"))
    assert is_sorted_by_class(open_table(tmp_path / "sorted"))


def test_remote_sorted_shards_cause_a_warning(tmp_path: Path) -> None:
    write_tars(tmp_path / "tars", sorted_labels())
    open_table(tmp_path / "tars")  # Creates the indexes.
    remote = str(put_all(tmp_path / "tars", in_memory()))
    tars = [f"{remote}/{shard:02d}.tar" for shard in range(NUM_SHARDS)]
    with pytest.warns(RuntimeWarning, match=r"sorted by class.*set window=240, strata=1"):
        assert ShardDataset(tars, fields="txt", shuffle=True).strata > 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ShardDataset(tars, fields="txt", shuffle=True, window=240, strata=1).strata == 1
        ShardDataset(tars, fields="txt")


def test_a_batch_of_a_rank_has_many_classes() -> None:
    sizes = np.full(1000, 1000)
    settings = choose_settings(sizes, shuffle=True, seed=0, is_sorted=True)
    ranks = divide_among_ranks(EpochOrder(sizes, settings, 0), 8, 256)
    batches = [ranks[rank][first : first + 256] for rank in (0, 5) for first in range(0, 9216, 256)]
    assert np.mean([len(np.unique(batch // 1000)) for batch in batches]) > 100
