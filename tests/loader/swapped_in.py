"""A program that replaces torch's DataLoader with shardio's before importing the libraries that use DataLoader."""

import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data import DataLoader as TorchLoader

import shardio

torch.utils.data.DataLoader = torch.utils.data.dataloader.DataLoader = shardio.DataLoader  # type: ignore[misc]

from torch.utils.data import DataLoader  # noqa: E402
from torch.utils.data.datapipes.iter import IterableWrapper  # noqa: E402
from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402

warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata triggers a warning from torch.


class Own(DataLoader):  # type: ignore[type-arg]
    """A program's loader, which creates a torch loader only when it is iterated."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def __iter__(self) -> Any:
        return iter(self.numbers)

    def __len__(self) -> int:
        return 3


def as_lists(loader: object) -> list[list[int]]:
    return [batch.tolist() for batch in loader]  # type: ignore[attr-defined]


assert issubclass(StatefulDataLoader, shardio.DataLoader)
for num_workers in (0, 1):
    pipe = IterableWrapper(range(6))
    expected = as_lists(TorchLoader(pipe, batch_size=3, num_workers=num_workers))
    loader = DataLoader(pipe, batch_size=3, num_workers=num_workers)
    assert as_lists(loader) == as_lists(loader) == expected == [[0, 1, 2], [3, 4, 5]]

    stateful = StatefulDataLoader(range(6), batch_size=2, num_workers=num_workers)
    batches = iter(stateful)
    next(batches)
    state = stateful.state_dict()
    assert as_lists(batches) == [[2, 3], [4, 5]]
    stateful = StatefulDataLoader(range(6), batch_size=2, num_workers=num_workers)
    stateful.load_state_dict(state)
    assert as_lists(stateful) == [[2, 3], [4, 5]]
    assert len(stateful) == 3

assert list(Own([4, 5])) == [4, 5]
assert len(Own([])) == 3
bare: Any = Own([])
assert not bare.has_order
assert not bare.has_state
bare.set_epoch(1)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert bare.state_dict() == {}
assert "no state" in str(caught[0].message)
with pytest.raises(TypeError, match="did not call the constructor of shardio's DataLoader"):
    bare.stats()

packed = shardio.ShardDataset(sys.argv[1], fields="key", shuffle=True)
in_workers = DataLoader(packed, batch_size=4, num_workers=1, worker_init_fn=print)
assert sorted(key for batch in in_workers for key in batch) == sorted(packed)

epochs = list[int]()
dataset: Any = SimpleNamespace(set_epoch=epochs.append)
wrapper: Any = SimpleNamespace(wrapped=TorchLoader(dataset, sampler=[0]))
shardio.DevicePrefetcher(wrapper, "cpu").set_epoch(5)
assert epochs == [5]
sys.stdout.write("all is well\n")
