from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: the models are small, and tests may run in parallel."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write no reports, because drawing them takes longer than these runs."""
    monkeypatch.setattr("shardio.train.callbacks.write_report", lambda directory, config: None)
