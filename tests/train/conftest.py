from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Compute in one thread: these models are small, and tests run side by side."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw nothing: where there are many runs, pictures take longer than they do."""
    monkeypatch.setattr("shardio.train.report.write_report", lambda directory, config: None)
