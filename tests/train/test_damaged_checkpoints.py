"""Loading a damaged checkpoint, or another file, raises an error that names the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardio.errors import FormatError
from shardio.train import load_checkpoint
from shardio.train.checkpoint import PARTS, check_parts, save_checkpoint


def test_a_flipped_bit_never_changes_the_loaded_state_silently(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    save_checkpoint(path, {"model": {"weight": torch.arange(50.0)}, "times": {"train_s": 1.5}})
    content, expected = path.read_bytes(), load_checkpoint(path)
    changed, errors = list[int](), list[str]()
    for offset in range(0, len(content), 11):
        flipped = bytearray(content)
        flipped[offset] ^= 1 << offset % 8
        path.write_bytes(flipped)
        try:
            found = load_checkpoint(path)
        except FormatError as error:
            errors.append(str(error))
            continue
        if repr(found) != repr(expected):
            changed.append(offset)
    assert changed == []
    assert errors
    assert all(str(path) in error for error in errors)


def test_checksums_are_written_even_if_the_user_turned_them_off(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        save_checkpoint(tmp_path / "last.pt", {"model": {"weight": torch.ones(3)}})
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(before)
    assert load_checkpoint(tmp_path / "last.pt")["model"]["weight"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "state",
    [[1], 3, None, torch.zeros(3), {}, {"format": True}, {"format": [1]}, {"format": torch.zeros(3)}],
    ids=["list", "number", "none", "tensor", "empty", "format-true", "format-list", "format-tensor"],
)
def test_the_file_of_another_program_is_refused(tmp_path: Path, state: object) -> None:
    torch.save(state, tmp_path / "last.pt")
    with pytest.raises(FormatError, match=r"last\.pt"):
        load_checkpoint(tmp_path / "last.pt")


@pytest.mark.parametrize("name", PARTS)
def test_a_state_without_one_of_its_parts_is_refused(name: str) -> None:
    state: dict[str, Any] = {part: kind() for part, kind in PARTS.items()}
    check_parts(state, "last.pt")
    for damaged in ({**state, name: 7.5}, {part: value for part, value in state.items() if part != name}):
        with pytest.raises(FormatError, match=rf"last\.pt is not a checkpoint .* \('{name}' must be a"):
            check_parts(damaged, "last.pt")
