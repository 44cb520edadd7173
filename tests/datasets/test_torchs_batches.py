"""The length of torch's loader over a ShardDataset equals its number of batches, or a warning says so."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from shardio import ShardDataset


@pytest.mark.parametrize(
    ("own_size", "size", "num_workers", "drop_last", "is_right"),
    [
        (None, 4, 2, False, True),  # 11 and 10 of 21 samples: 3 + 3 batches.
        (None, 5, 2, False, True),
        (None, 4, 3, False, True),
        (None, 6, 3, False, False),
        (None, 9, 2, False, False),
        (None, 4, 2, True, False),
        (None, 10, 2, True, True),
        (None, 10, 1, False, True),
        (None, 10, 0, True, True),
        (6, 6, 3, False, True),
        (6, 6, 3, True, True),
        (5, 4, 2, False, True),
        (2, 9, 2, False, False),
    ],
)
def test_a_length_is_right_or_warned_of(
    packed: Path, own_size: int | None, size: int, num_workers: int, drop_last: bool, is_right: bool
) -> None:
    dataset = ShardDataset(packed, fields="key", batch_size=own_size)
    loader = DataLoader(dataset, batch_size=size, num_workers=num_workers, drop_last=drop_last)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        length = len(loader)
        made = len(list(loader))
    said = [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
    assert (made == length) == is_right
    assert bool(said) != is_right
    for message in said:
        assert re.search(rf"makes {made} batches.*length is {length}.*\(batch_size={size}\)", message)
        assert ("leaves out" in message) == drop_last


def test_the_datasets_own_length_is_never_warned_of(packed: Path) -> None:
    assert len(ShardDataset(packed, fields="key")) == 21
