"""Many datasets with many shards share one budget of file descriptors per process."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from tests.processes import run_python
from tests.tars import write_tar

NUM_DATASETS, NUM_SHARDS, NUM_PER_SHARD = 3, 90, 2

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

def read_in_turns(source, num_workers):
    options = {"fields": "key", "shuffle": True, "window": 2100, "strata": 1}
    datasets = [shardio.ShardDataset(source, seed=seed, **options) for seed in range(NUM_DATASETS)]
    loaders = [shardio.DataLoader(dataset, batch_size=8, num_workers=num_workers) for dataset in datasets]
    keys = [key for batches in zip(*loaders) for batch in batches for key in batch]
    assert num_workers or count_open_files() == before, "idle datasets hold descriptors"
    return keys

if __name__ == "__main__":
    source, limit, NUM_DATASETS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    # The workers inherit the limit.
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    shardio.ShardDataset(source, fields="key")  # Opens the memory that the process shares with all its workers.
    before = count_open_files()
    datasets = [shardio.ShardDataset(source, fields="key") for _ in range(NUM_DATASETS)]
    datasets += [shardio.ShardMapDataset(source, fields="key") for _ in range(NUM_DATASETS)]
    assert count_open_files() == before, "datasets that were never read hold descriptors"
    keys = {
        "by iterators in turns": [key for keys in zip(*datasets[:NUM_DATASETS]) for key in keys],
        "mapped": read_mapped(source, 0),
        "in turns": read_in_turns(source, 0),
        "mapped, by workers": read_mapped(source, 2),
        "in turns, by workers": read_in_turns(source, 1),
    }
    json.dump(keys, sys.stdout)
"""


@pytest.mark.slow
def test_datasets_with_more_shards_than_descriptors_are_read(tmp_path: Path) -> None:
    for shard in range(NUM_SHARDS):
        write_tar(tmp_path / f"{shard:03d}.tar", [(f"{shard:03d}-{i}.txt", b"text") for i in range(NUM_PER_SHARD)])
    (tmp_path / "read.py").write_text(SCRIPT)
    arguments = tmp_path / "read.py", tmp_path, 160, NUM_DATASETS
    done = run_python(*arguments, prepare=partial(warnings.simplefilter, "error"))
    assert done.returncode == 0, done.stderr
    expected = [f"{shard:03d}-{i}" for shard in range(NUM_SHARDS) for i in range(NUM_PER_SHARD)]
    for name, keys in json.loads(done.stdout).items():
        assert Counter(keys) == dict.fromkeys(expected, NUM_DATASETS), name
