"""The device is the best available one, unless it is named; a named one must be available."""

from __future__ import annotations

import pytest
import torch

from shardio import DevicePrefetcher
from shardio.device import choose_device
from shardio.train import TrainConfig


@pytest.mark.parametrize(
    ("has_cuda", "has_mps", "num_ranks", "expected"),
    [
        (True, True, 1, "cuda"),
        (True, False, 2, "cuda"),
        (False, True, 1, "mps"),
        (False, True, 2, "cpu"),  # Ranks cannot share an MPS device.
        (False, False, 1, "cpu"),
    ],
)
def test_without_a_name_the_best_available_device_is_used(
    monkeypatch: pytest.MonkeyPatch, has_cuda: bool, has_mps: bool, num_ranks: int, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: has_mps)
    assert choose_device(num_ranks=num_ranks) == torch.device(expected)


def test_a_named_device_is_used() -> None:
    assert choose_device("cpu") == choose_device(torch.device("cpu")) == torch.device("cpu")
    assert choose_device("meta") == torch.device("meta")


@pytest.mark.parametrize(("name", "asked"), [("cpu", []), ("meta", []), ("mps", ["mps"]), ("cuda:0", ["cuda"])])
def test_torch_is_asked_only_about_the_named_type(monkeypatch: pytest.MonkeyPatch, name: str, asked: list[str]) -> None:
    """To ask about CUDA takes time, and may print warnings about a driver that nothing uses."""
    found = list[str]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: not found.append("cuda"))  # type: ignore[func-returns-value]
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: not found.append("mps"))  # type: ignore[func-returns-value]
    assert choose_device(name) == torch.device(name)
    assert found == asked


@pytest.mark.parametrize("name", ["cuda", "cuda:1", "mps"])
def test_a_device_that_torch_cannot_use_is_refused_everywhere(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    kind = name.partition(":")[0].upper()
    message = f"device '{name}' is not available, because torch finds no {kind} device: use 'cpu', or omit device"
    for use in (choose_device, lambda name: DevicePrefetcher([], name), lambda name: TrainConfig(device=name)):
        with pytest.raises(ValueError, match=message):
            use(name)


def test_an_unknown_device_is_refused_everywhere() -> None:
    for use in (choose_device, lambda name: DevicePrefetcher([], name), lambda name: TrainConfig(device=name)):
        with pytest.raises(
            ValueError, match="device must be one that torch knows, such as 'cuda' or 'cpu', got 'toaster'"
        ):
            use("toaster")


def test_only_one_file_chooses_a_device() -> None:
    from pathlib import Path

    import shardio

    package = Path(shardio.__file__).parent
    found = {
        path.relative_to(package).as_posix() for path in package.rglob("*.py") if "mps.is_available" in path.read_text()
    }
    assert found == {"device/choice.py"}
