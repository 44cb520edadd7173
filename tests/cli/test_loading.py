"""What a command that loads batches takes a directory for."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardio.cli.loading import has_class_folders


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["class-0/a.jpg"], True),
        (["class-0/a.jpg", "shard.tar"], False),
        (["class-0/a.jpg", "SHARD.TAR"], False),
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
