"""Lightning on one rank and on two delivers every sample of two epochs and of each validation once, also resumed."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from shardio import DataLoader, ShardDataset
from tests.frameworks.launch import check_epochs, launch


def test_one_rank_and_two(packed: Path, tmp_path: Path) -> None:
    keys = list(ShardDataset(packed, fields="key"))
    launch("tests.frameworks.with_lightning:run", tmp_path, packed, world_sizes=[2, 1])
    own = [f"number {number}" for number in range(24)]
    expected = {"shards": keys, "sampled": keys, "own": own, "in threads": own}
    for world_size, kind in itertools.product((1, 2), expected):
        for what in ("training", "resumed", "validation"):
            check_epochs(tmp_path / str(world_size) / f"{kind}-{what}", expected[kind], world_size=world_size)
    for world_size in (1, 2):
        check_epochs(tmp_path / str(world_size) / "shards-reloaded", keys, world_size=world_size)
        for rank in range(world_size):
            epochs = json.loads((tmp_path / str(world_size) / f"{rank}.json").read_text())
            dataset = ShardDataset(packed, fields="key", shuffle=True, rank=rank, world_size=world_size)
            loader = DataLoader(dataset, batch_size=4)
            assert epochs == [[key for keys in loader for key in keys] for _ in range(2)]
