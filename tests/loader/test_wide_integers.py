"""Integers that do not fit in 64 bits: an error that names the sample, and never another number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardio import DataLoader, SampleError, ShardDataset
from tests.tars import write_tar


def write(folder: Path, numbers: list[int]) -> Path:
    """Write samples that hold numbers as their class, and deep in their JSON."""
    members = []
    for place, number in enumerate(numbers):
        content = json.dumps({"parts": [{"number": number}], "x": 0.1234567890123456789}).encode()
        members += [(f"{place}.cls", b"%d" % number), (f"{place}.json", content)]
    write_tar(folder / "a.tar", members)
    return folder / "a.tar"


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 2**64, 10**100])
@pytest.mark.parametrize("field", ["cls", "label", "json"])
def test_the_error_names_the_sample(tmp_path: Path, field: str, number: int) -> None:
    loader = DataLoader(ShardDataset(write(tmp_path, [0, 2**63 - 1, number]), fields=field), batch_size=3)
    named = "json" if field == "json" else "cls"
    with pytest.raises(SampleError, match=rf"field '{named}' of sample 2 in .*a\.tar.*(64 bits|64-bit)") as raised:
        next(iter(loader))
    assert str(number)[:40] in str(raised.value)
    assert raised.value.key == "2"


def test_values_of_64_bits_are_unchanged(tmp_path: Path) -> None:
    numbers = [0, 2**63 - 1, -(2**63)]
    for field in ("cls", "json"):
        (batch,) = DataLoader(ShardDataset(write(tmp_path, numbers), fields=field), batch_size=3)
        assert (batch if field == "cls" else batch["parts"][0]["number"]).tolist() == numbers


def test_a_collate_fn_without_tensors_receives_wide_integers(tmp_path: Path) -> None:
    content = json.dumps({"hash": 2**64 - 1}).encode()
    write_tar(tmp_path / "a.tar", [("0.json", content)])
    dataset = ShardDataset(tmp_path / "a.tar", fields="json")
    assert list(DataLoader(dataset, collate_fn=list)) == [[{"hash": 2**64 - 1}]]
    with pytest.raises(
        ValueError, match=rf"sample 0 of a batch holds the integer {2**64 - 1}, which does not fit in 64 bits"
    ):
        list(DataLoader(dataset, worker_init_fn=print))
