"""Many datasets of many shards are read with few file descriptors: one budget for the process."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from tests.processes import run_python
from tests.tars import write_tar

NUM_DATASETS, NUM_SHARDS, NUM_PER_SHARD = 4, 70, 2

SCRIPT = """
import json
import os
import resource
import sys

from torch.utils.data import ConcatDataset

import shardio


def count_open_files():
    return len(os.listdir("/proc/self/fd"))


def read_mapped(source, num_workers):
    datasets = [shardio.ShardMapDataset(source, fields=("key", "txt")) for _ in range(NUM_DATASETS)]
    loader = shardio.DataLoader(ConcatDataset(datasets), batch_size=8, shuffle=True, num_workers=num_workers)
    return [key for keys, _ in loader for key in keys]


def read_at_once(source, num_workers):
    datasets = [
        shardio.ShardDataset(source, fields="key", shuffle=True, lanes=7, seed=seed) for seed in range(NUM_DATASETS)
    ]
    loaders = [shardio.DataLoader(dataset, batch_size=8, num_workers=num_workers) for dataset in datasets]
    keys = [key for batches in zip(*loaders) for batch in batches for key in batch]
    assert num_workers or count_open_files() == before, "datasets that are not being read hold descriptors"
    return keys


if __name__ == "__main__":
    source, limit, NUM_DATASETS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    # Before anything is read, and inherited by the workers.
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    shardio.ShardDataset(source, fields="key")  # The process shares one memory with its workers for all datasets.
    before = count_open_files()
    datasets = [shardio.ShardDataset(source, fields="key") for _ in range(NUM_DATASETS)]
    datasets += [shardio.ShardMapDataset(source, fields="key") for _ in range(NUM_DATASETS)]
    assert count_open_files() == before, "datasets that were never read hold descriptors"
    keys = {
        "mapped": read_mapped(source, 0),
        "mapped, by workers": read_mapped(source, 2),
        "at once": read_at_once(source, 0),
        "at once, by workers": read_at_once(source, 1),
    }
    json.dump(keys, sys.stdout)
"""


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tars")
    for shard in range(NUM_SHARDS):
        write_tar(
            folder / f"{shard:03d}.tar", [(f"{shard:03d}-{number}.txt", b"text") for number in range(NUM_PER_SHARD)]
        )
    return folder


def test_datasets_are_read_whose_shards_together_are_more_than_the_descriptors(tars: Path, tmp_path: Path) -> None:
    (tmp_path / "read.py").write_text(SCRIPT)
    done = run_python(tmp_path / "read.py", tars, 200, NUM_DATASETS, prepare=partial(warnings.simplefilter, "error"))
    assert done.returncode == 0, done.stderr
    expected = Counter(f"{shard:03d}-{number}" for shard in range(NUM_SHARDS) for number in range(NUM_PER_SHARD))
    for name, keys in json.loads(done.stdout).items():
        assert Counter(keys) == Counter(dict.fromkeys(expected, NUM_DATASETS)), name
