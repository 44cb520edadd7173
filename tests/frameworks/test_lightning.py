"""Lightning on one rank and two: every sample of two epochs once, also resumed, and of each validation."""

from __future__ import annotations

import itertools
from pathlib import Path

from shardio import ShardDataset
from tests.frameworks.launch import check_epochs, launch


def test_one_rank_and_two(packed: Path, tmp_path: Path) -> None:
    keys = list(ShardDataset(packed, fields="key"))
    launch("tests.frameworks.with_lightning:run", tmp_path, packed, world_sizes=[2, 1])
    for world_size, kind in itertools.product((1, 2), ("shards", "sampled")):
        for what in ("training", "resumed", "validation"):
            check_epochs(tmp_path / str(world_size) / f"{kind}-{what}", keys, world_size=world_size)
