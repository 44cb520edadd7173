"""States that another loader saved: torchdata's are loaded where they can be, and all others are refused."""

from __future__ import annotations

from typing import Any

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from shardio import DataLoader, StateError
from tests.loader.fetching.programs import describe
from tests.loader.fetching.test_states import Counting, Noisy, Numbers

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create", "ignore:.* has no state_dict", "ignore:'pin_memory' argument"
)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_states_of_torchdatas_samplers_are_refused() -> None:
    loader = StatefulDataLoader(range(20), batch_size=2, shuffle=True)
    next(iter(loader))
    resumed = DataLoader(range(20), batch_size=2, shuffle=True)
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match=r"StatefulDataLoader adds them to torch's RandomSampler"):
        iter(resumed)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("dataset", [Noisy, Numbers, Counting])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 4])
def test_states_of_torchdatas_loader_can_be_loaded(dataset: Any, num_workers: int, stop: int) -> None:
    options: dict[str, Any] = {"num_workers": num_workers, "batch_size": 4}
    loader = StatefulDataLoader(dataset(), **options, snapshot_every_n_steps=3)
    iterator = iter(loader)
    for _ in range(stop):
        next(iterator)
    resumed = DataLoader(dataset(), **options)
    resumed.load_state_dict(loader.state_dict())
    assert describe(list(resumed)) == describe(list(iterator))


def test_what_is_no_state_of_a_loader_is_refused() -> None:
    with pytest.raises(StateError, match="was not saved by a loader of this kind"):
        DataLoader(range(3)).load_state_dict({"epoch": 1, "position": 4})
