"""Accelerate, Trainer and Lightning on two ranks deliver each sample of a mixture's sources once per source epoch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from shardio import ShardDataset, ShardWriter
from tests.frameworks.collation import number_of
from tests.frameworks.launch import check_epochs, launch, returned
from tests.frameworks.mixtures import MAKERS, STOP, Own


@pytest.fixture
def keys(packed: Path) -> list[str]:
    """The keys of the samples of both sources, which are the same in all mixtures."""
    more = packed.with_name(f"{packed.name}-more")
    own = [key for _, key in map(Own().__getitem__, range(len(Own())))]
    with ShardWriter(more, max_shard_samples=4) as writer:
        for key in own:
            writer.write({"__key__": key, "cls": 0})
    return [*ShardDataset(packed, fields="key"), *own]


@pytest.mark.slow
@pytest.mark.skipif(
    torch.__version__ < "2.7", reason="torch 2.6 cannot load to cpu:0, as the Trainer does on two ranks"
)
def test_mixtures_on_two_ranks(packed: Path, tmp_path: Path, keys: list[str]) -> None:
    launch("tests.frameworks.with_mixtures:run", tmp_path, packed)
    for kind in MAKERS:
        # With stop="all-once", the epochs of the sources are those of the mixture.
        check_epochs(tmp_path / "2" / "accelerate" / kind, keys)
        for what in ("training", "resumed", "validation"):
            check_epochs(tmp_path / "2" / "lightning" / f"{kind}-{what}", keys)
        for what in ("training", "resumed"):
            check_epochs(tmp_path / "2" / "trainer" / kind / what, list(map(number_of, keys)))
        # With another stop, they are not: no sample is delivered again before all others of its source.
        counts = Counter(key for rank in returned(tmp_path, 2) for key in rank[kind])
        assert counts.total() == 2 * STOP
        for is_own, share in ((False, 2), (True, 1)):
            own = [counts[key] for key in keys if key.startswith("own") == is_own]
            assert sum(own) == 2 * STOP * share // 3
            assert set(own) <= {sum(own) // len(own), -(-sum(own) // len(own))}
