"""Hugging Face's Trainer on one rank and on two delivers every sample of two epochs once, also resumed, or fails."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from shardio import ShardDataset
from tests.frameworks.launch import check_epochs, launch, returned

SPLITTERS = {
    "dispatched": "accelerate.data_loader.DataLoaderDispatcher",
    "shared": "accelerate.data_loader.IterableDatasetShard",
    "by hand": "transformers.trainer_pt_utils.IterableDatasetShard",
}


@pytest.mark.skipif(
    torch.__version__ < "2.7", reason="torch 2.6 cannot load to cpu:0, as the Trainer does on two ranks"
)
def test_one_rank_and_two(packed: Path, tmp_path: Path) -> None:
    keys = ShardDataset(packed, fields="key")
    numbers = [int(key.removeprefix("class-").replace("/name-", "")) for key in keys]  # What the model receives.
    launch("tests.frameworks.with_transformers:run", tmp_path, packed, world_sizes=[2, 1])
    for world_size, kind in itertools.product((1, 2), ("shards", "sampled")):
        for what in ("training", "resumed"):
            check_epochs(tmp_path / str(world_size) / kind / what, numbers, world_size=world_size)
    # Its own loader splits a map-style dataset over two ranks and fills the last batches. It must not split shards.
    for name in ("map-style", "not-split"):
        check_epochs(tmp_path / "2" / name / "training", numbers, num_repeats=3)
    for rank in returned(tmp_path, 2):
        for name, splitter in SPLITTERS.items():
            assert f"{splitter} splits the samples over 2 processes" in rank[name]
            assert "Pass the framework a shardio.DataLoader" in rank[name]
    # On one rank, its own loader is correct.
    for name in ("dispatched", "shared", "map-style", "not-split"):
        check_epochs(tmp_path / "1" / name / "training", numbers, world_size=1)
    # Skipping batches without the loader's state is an error.
    for rank in (*returned(tmp_path, 1), *returned(tmp_path, 2)):
        assert "instead of using skip_first_batches()" in rank["skipped"]
