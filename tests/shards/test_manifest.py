from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from shardio.errors import FormatError
from shardio.shards import Manifest, ShardEntry, open_table, read_manifest, write_manifest
from shardio.storage import parse_location

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ENTRIES = st.builds(
    ShardEntry,
    name=st.integers(0, 999).map(lambda i: f"shard-{i:06d}.tar"),
    num_bytes=st.integers(0, 2**50),
    num_samples=st.integers(0, 2**40),
    digest=st.text("0123456789abcdef", min_size=32, max_size=32),
)
MANIFESTS = st.builds(
    Manifest,
    shards=st.lists(ENTRIES, max_size=4).map(tuple),
    fields=st.lists(TEXT, max_size=4).map(tuple),
    classes=st.lists(TEXT, max_size=4).map(tuple),
    pack=st.dictionaries(TEXT, TEXT | st.integers(0, 2**62) | st.none(), max_size=4),
)


def entry(name: str = "a.tar", num_samples: int = 3, digest: str = "00ff", num_bytes: int = 10) -> ShardEntry:
    return ShardEntry(name=name, num_bytes=num_bytes, num_samples=num_samples, digest=digest)


@given(MANIFESTS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)
def test_what_was_written_is_read(tmp_path: Path, manifest: Manifest) -> None:
    write_manifest(parse_location(tmp_path / "shardio.json"), manifest)
    assert read_manifest(parse_location(tmp_path / "shardio.json")) == manifest


def test_equal_manifests_are_equal_files(tmp_path: Path) -> None:
    write_manifest(
        parse_location(tmp_path / "a"), Manifest(shards=(entry(),), classes=("Zoë",), pack={"x": 1, "y": None})
    )
    write_manifest(
        parse_location(tmp_path / "b"), Manifest(shards=(entry(),), classes=("Zoë",), pack={"y": None, "x": 1})
    )
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_sums_are_over_all_shards() -> None:
    manifest = Manifest(shards=(entry(num_samples=3, num_bytes=5), entry(num_samples=4, num_bytes=7)))
    assert (manifest.num_samples, manifest.num_bytes, manifest.shard_sizes.tolist()) == (7, 12, [3, 4])
    assert manifest.shard_sizes.dtype == "int64"


def test_the_digest_depends_on_contents_and_their_order_only() -> None:
    first, second = entry(name="a.tar", digest="00"), entry(name="b.tar", digest="11")
    digest = Manifest(shards=(first, second)).digest
    renamed = dataclasses.replace(first, name="other.tar"), dataclasses.replace(second, name="y.tar")
    settings_changed = Manifest(shards=renamed, classes=("c",), fields=("jpg",), pack={"shuffle_seed": 9})
    assert settings_changed.digest == digest
    assert Manifest(shards=(second, first)).digest != digest
    assert Manifest(shards=(first,)).digest != digest
    assert Manifest(shards=(first, dataclasses.replace(second, digest="12"))).digest != digest
    assert Manifest(shards=(first, dataclasses.replace(second, num_samples=4))).digest != digest


def change(**values: object) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest.update(values)


def change_shard(**values: object) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest["shards"][0].update(values)


DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "newer": change(format=2),
    "format-text": change(format="1"),
    "no-format": lambda manifest: manifest.pop("format"),
    "no-shards": lambda manifest: manifest.pop("shards"),
    "shards-null": change(shards=None),
    "shards-text": change(shards="shard-000000.tar"),
    "shards-of-numbers": change(shards=[1]),
    "fields-number": change(fields=7),
    "classes-of-numbers": change(classes=[1]),
    "pack-list": change(pack=[1]),
    "shard-no-name": lambda manifest: manifest["shards"][0].pop("name"),
    "shard-name-number": change_shard(name=1),
    **{f"shard-name-{name!r}": change_shard(name=name) for name in ("", ".", "..", "../a", "/a", "a/b", "a/", "a\0b")},
    "samples-text": change_shard(num_samples="many"),
    "samples-fraction": change_shard(num_samples=1.5),
    "samples-negative": change_shard(num_samples=-3),
    "bytes-negative": change_shard(num_bytes=-3),
    "no-digest": lambda manifest: manifest["shards"][0].pop("digest"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_manifest_with_wrong_values_is_refused(tmp_path: Path, damage: Callable[[dict[str, Any]], object]) -> None:
    path = tmp_path / "shardio.json"
    write_manifest(parse_location(path), Manifest(shards=(entry(), entry(name="b.tar")), fields=("jpg",)))
    values = json.loads(path.read_bytes())
    damage(values)
    path.write_text(json.dumps(values))
    with pytest.raises(FormatError, match=r"shardio\.json"):
        read_manifest(parse_location(path))


@pytest.mark.parametrize("stop", [0, 1, 20, 100, -3])
def test_a_truncated_manifest_is_refused(tmp_path: Path, stop: int) -> None:
    path = tmp_path / "shardio.json"
    write_manifest(parse_location(path), Manifest(shards=(entry(), entry(name="b.tar")), fields=("jpg",)))
    path.write_bytes(path.read_bytes()[:stop])
    with pytest.raises(FormatError, match=r"shardio\.json cannot be read"):
        read_manifest(parse_location(path))


@pytest.mark.parametrize("content", [b"[]", b"null", b"1", b'"text"', b"\xff\xfe\xfd", b"{} {}", b"{'format': 1}"])
def test_another_file_than_a_manifest_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "shardio.json"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"shardio\.json"):
        read_manifest(parse_location(path))


def test_json_of_another_kind_is_not_called_a_version(tmp_path: Path) -> None:
    path = tmp_path / "coco.json"
    path.write_text('{"images": []}')
    with pytest.raises(FormatError, match=r"coco\.json is not a shardio manifest"):
        read_manifest(parse_location(path))


def test_an_error_names_the_damaged_part_of_a_manifest(tmp_path: Path) -> None:
    path = tmp_path / "shardio.json"
    path.write_text('{"format": 1, "shards": [{"name": "a.tar", "num_bytes": 1, "num_samples": 1}]}')
    with pytest.raises(FormatError, match=r"shards\.0\.digest: Field required"):
        read_manifest(parse_location(path))


@pytest.mark.parametrize("name", ["../a.tar", "/etc/a.tar", "", "."])
def test_a_manifest_names_no_shard_outside_its_directory(tmp_path: Path, name: str) -> None:
    path = tmp_path / "shardio.json"
    write_manifest(parse_location(path), Manifest(shards=(entry(name="a.tar"),)))
    path.write_text(path.read_text().replace('"a.tar"', json.dumps(name)))
    with pytest.raises(FormatError, match=r"shardio\.json"):
        open_table(tmp_path)
