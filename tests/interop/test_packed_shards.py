"""Shards packed by shardio: every tar tool reads each sample byte for byte."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import shardio
from shardio.reading import SampleReader
from shardio.shards import open_table
from tests.sources import encode, write_images
from tests.tars import Samples, extract_with_gnu_tar, read_members, read_with_webdataset

NAMES = [
    "plain",
    "with space",
    "n" * 96,
    "n" * 97,
    "n" * 101,
    "m" * 200,
    "schön",
    "日本語の写真",
    "ü" * 100,
    "emoji-🙂",
    "-dash",
    "it's",
    "a=b",
    "100%",
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders with ordinary names and with names that do not fit into a plain header."""
    root = tmp_path_factory.mktemp("source")
    write_images(root, classes=2, per_class=5)
    for folder in "class-0", "Klasse äöü", "deep/" + "er/" * 40 + "x":
        (root / folder).mkdir(parents=True, exist_ok=True)
        for i, name in enumerate(NAMES):
            (root / folder / f"{name}.PNG").write_bytes(encode(i, suffix="png"))
            (root / folder / f"{name}.json").write_text(f'{{"name": "{name}"}}')
    return root


@pytest.fixture(scope="module")
def shards(source: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    out = tmp_path_factory.mktemp("shards")
    shardio.pack(source, out, max_shard_samples=13)
    return sorted(out.glob("*.tar"))


@pytest.fixture(scope="module")
def expected(source: Path) -> dict[str, dict[str, bytes]]:
    """The fields of each key, from the files themselves."""
    classes = sorted(path.name for path in source.iterdir())
    samples: dict[str, dict[str, bytes]] = {}
    for path in source.rglob("*.*"):
        if path.is_file():
            key, class_name = str(path.relative_to(source).with_suffix("")), path.relative_to(source).parts[0]
            fields = samples.setdefault(key, {"cls": str(classes.index(class_name)).encode()})
            fields[path.suffix[1:].lower()] = path.read_bytes()
    return samples


def test_webdataset_reads_every_sample(shards: list[Path], expected: dict[str, dict[str, bytes]]) -> None:
    samples = read_with_webdataset(*shards)
    assert len(samples) == len(expected)
    assert dict(samples) == expected


def test_tarfile_reads_every_member(shards: list[Path], expected: dict[str, dict[str, bytes]]) -> None:
    members = [member for path in shards for member in read_members(path)]
    names = {f"{key}.{field}": content for key, fields in expected.items() for field, content in fields.items()}
    assert len(members) == len(names)
    assert dict(members) == names


def test_gnu_tar_unpacks_every_member(
    shards: list[Path], expected: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    if shutil.which("tar") is None:
        pytest.skip("there is no tar on this system")
    unpacked: dict[str, bytes] = {}
    for path in shards:
        unpacked |= extract_with_gnu_tar(path, tmp_path / path.stem)
    names = {f"{key}.{field}": content for key, fields in expected.items() for field, content in fields.items()}
    assert unpacked == names


def test_shardio_and_webdataset_read_the_same_samples_in_the_same_order(shards: list[Path]) -> None:
    table = open_table(shards[0].parent)
    reader = SampleReader(table)
    read = reader.read(np.arange(table.manifest.num_samples), table.manifest.fields)
    reader.close()
    samples: Samples = [(sample.key, dict(sample.fields)) for sample in read]
    assert samples == read_with_webdataset(*shards)


def test_a_samples_members_are_adjacent_and_sorted(shards: list[Path]) -> None:
    for path in shards:
        names = [name for name, _ in read_members(path)]
        keys = [str(Path(name).with_suffix("")) for name in names]
        starts = [key for i, key in enumerate(keys) if i == 0 or keys[i - 1] != key]
        assert len(starts) == len(set(keys))
        fields = [[name for name in names if str(Path(name).with_suffix("")) == key] for key in starts]
        assert all(members == sorted(members) for members in fields)


def test_the_label_is_the_class_index_in_ascii_digits(tmp_path: Path) -> None:
    write_images(tmp_path / "in", classes=11, per_class=1)
    manifest = shardio.pack(tmp_path / "in", tmp_path / "out")
    assert manifest.classes == tuple(sorted(f"class-{i}" for i in range(11)))
    labels = {Path(n).parent.name: c for n, c in read_members(tmp_path / "out/shard-000000.tar") if n.endswith(".cls")}
    assert labels == {name: b"%d" % i for i, name in enumerate(sorted(f"class-{i}" for i in range(11)))}
