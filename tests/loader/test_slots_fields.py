"""Fields of all kinds, in buffers or not: the batches are those of torch's own loader."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

from shardio import DataLoader, ShardDataset, ShardMapDataset
from shardio.transforms import RandomResizedCrop
from tests.buffers import assert_same, buffer_of
from tests.sources import encode
from tests.tars import write_tar

NUM_SAMPLES = 30
BATCH_SIZE = 8

Make = Callable[[np.random.Generator], Any]


def _reals(shape: tuple[int, ...], dtype: str) -> Make:
    return lambda random: random.normal(0, 100, shape).astype(dtype)


def _integers(shape: tuple[int, ...], dtype: str) -> Make:
    return lambda random: random.integers(0, 2 if dtype == "bool" else 100, shape).astype(dtype)


LARGE: dict[str, Make] = {
    "float32": _reals((3, 20, 30), "float32"),
    "float64": _reals((512,), "float64"),
    "float16": _reals((64, 33), "float16"),
    "complex64": lambda random: (random.normal(size=(30, 40)) + 1j).astype("complex64"),
    "int64": _integers((7, 11, 13), "int64"),
    "uint8": _integers((4096,), "uint8"),
    "uint16": _integers((50, 50), "uint16"),
    "bool": _integers((70, 70), "bool"),
    "fortran": lambda random: np.asfortranarray(random.normal(size=(30, 50))),
    "swapped bytes": _reals((40, 40), ">f4"),  # They arrive in native order.
}
"""Arrays of 4096 bytes or more, all of a kind alike."""

OTHER: dict[str, Make] = {
    "just too small": _integers((4095,), "uint8"),
    "scalar": _reals((), "float64"),
    "empty": _reals((0, 5), "float32"),
}
"""Arrays that are sent without a buffer."""

REFUSED: dict[str, Make] = {
    "another shape": lambda random: np.zeros((40, 40 + random.integers(0, 2))),
    "long double": _reals((40, 40), "longdouble"),
    "strings": lambda _: np.full(2000, "words"),
}
"""Arrays of which torch makes no batch."""


def write_arrays(folder: Path, make: Make) -> Path:
    """Write a tar of images, arrays and other fields of all kinds."""
    members = []
    for number in range(NUM_SAMPLES):
        array = io.BytesIO()
        np.save(array, make(np.random.default_rng(number)))
        members += [
            (f"{number}.jpg", encode(number, width=64, height=64)),
            (f"{number}.cls", str(number % 7).encode()),
            (f"{number}.json", json.dumps({"number": number, "words": [f"{number}", "größe"], "half": 0.5}).encode()),
            (f"{number}.txt", f"größe {number}".encode()),
            (f"{number}.npy", array.getvalue()),
            (f"{number}.bin", bytes([number]) * number),
        ]
    write_tar(folder / "samples.tar", members)
    return folder / "samples.tar"


def make_loaders(tar: Path, fields: Any) -> tuple[DataLoader, TorchLoader[Any]]:
    """Make the loader under test, and torch's own over the same dataset."""
    transform = RandomResizedCrop(48) if "image" in fields else None
    dataset = ShardDataset(tar, fields=fields, shuffle=True, seed=2, batch_size=BATCH_SIZE, transform=transform)
    return (
        DataLoader(dataset, batch_size=BATCH_SIZE, num_workers=1, persistent_workers=True),
        TorchLoader(dataset, batch_size=BATCH_SIZE),
    )


@pytest.mark.parametrize("name", ["complex64", "uint8", "uint16", "bool", "fortran"])  # The others are tested below.
def test_large_arrays_are_in_buffers_and_right(tmp_path: Path, name: str) -> None:
    loader, torchs = make_loaders(write_arrays(tmp_path, LARGE[name]), ("npy", "key"))
    kept = list(loader)
    assert_same(kept, list(torchs))
    buffers = {buffer_of(arrays) for arrays, _ in kept}
    assert len(buffers) == len(kept)
    assert None not in buffers
    list(loader)
    assert_same(kept, list(torchs))


@pytest.mark.parametrize("name", OTHER)
def test_other_arrays_are_not_in_buffers_and_right(tmp_path: Path, name: str) -> None:
    loader, torchs = make_loaders(write_arrays(tmp_path, OTHER[name]), ("npy", "image"))
    kept = list(loader)
    assert_same([arrays for arrays, _ in kept], [arrays for arrays, _ in torchs])
    assert {buffer_of(arrays) for arrays, _ in kept} == {None}
    assert None not in {buffer_of(images) for _, images in kept}


@pytest.mark.parametrize("name", REFUSED)
def test_arrays_that_torch_refuses_are_refused(tmp_path: Path, name: str) -> None:
    loader, torchs = make_loaders(write_arrays(tmp_path, REFUSED[name]), "npy")
    with pytest.raises((RuntimeError, TypeError, ValueError)) as expected:
        list(torchs)
    with pytest.raises(expected.type) as got:
        list(loader)
    assert str(got.value).startswith(str(expected.value))


def test_all_fields_of_a_batch_are_those_of_torchs_loader(tmp_path: Path) -> None:
    fields = ("image", "label", "key", "json", "txt", "npy", "bin", "jpg", "cls", "image")
    loader, torchs = make_loaders(write_arrays(tmp_path, LARGE["float32"]), fields)
    kept = list(loader)
    list(loader)
    assert_same(kept, list(torchs))
    for images, *others in kept:
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert buffer_of(images) == buffer_of(others[4]) == buffer_of(others[-1]) is not None
        assert images.data_ptr() != others[-1].data_ptr()


@pytest.mark.parametrize("field", ["image", "label", "key", "json", "npy"])
def test_a_bare_field_equals_that_of_torchs_loader(tmp_path: Path, field: str) -> None:
    loader, torchs = make_loaders(write_arrays(tmp_path, LARGE["float64"]), field)
    assert_same(list(loader), list(torchs))


def test_keeping_one_field_keeps_its_memory(tmp_path: Path) -> None:
    loader, torchs = make_loaders(write_arrays(tmp_path, LARGE["int64"]), ("image", "npy"))
    images = [images for images, _ in loader]
    loader.set_epoch(0)
    arrays = [arrays for _, arrays in loader]
    assert None not in map(buffer_of, [*images, *arrays])
    for _ in range(3):
        list(loader)
    assert_same([images, arrays], [[images for images, _ in torchs], [arrays for _, arrays in torchs]])


def test_arrays_of_a_map_style_dataset_are_those_of_torchs_loader(tmp_path: Path) -> None:
    dataset = ShardMapDataset(write_arrays(tmp_path, LARGE["float16"]), fields=("npy", "label", "json"))
    order: list[Any] = np.random.default_rng(1).integers(0, NUM_SAMPLES, 100).tolist()
    kept = list(DataLoader(dataset, batch_size=BATCH_SIZE, sampler=order, num_workers=1))
    assert None not in {buffer_of(arrays) for arrays, *_ in kept}
    assert_same(kept, list(TorchLoader(dataset, batch_size=BATCH_SIZE, sampler=order)))
