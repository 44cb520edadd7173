"""What a command that loads batches takes a directory for."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardio.cli.options import has_class_folders
from shardio.errors import FormatError


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["class-0/a.jpg"], True),
        (["notes/a.txt", "shard.tar"], False),
        (["notes/a.txt", "SHARD.TAR"], False),
        (["class-0/a.jpg", "shardio.json"], False),
        (["a.jpg", ".hidden/b.jpg"], False),
    ],
)
def test_a_directory_holds_class_folders_if_it_holds_no_shards(
    tmp_path: Path, names: list[str], expected: bool
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert has_class_folders(tmp_path) == expected


@pytest.mark.parametrize("names", [["class-0/a.jpg", "SHARD.TAR"], ["a.PNG", "shard.tar"]])
def test_a_directory_of_images_and_tars_is_refused(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(FormatError, match=f"holds both tars, such as {names[1]}, and images, such as {names[0]}"):
        has_class_folders(tmp_path)
