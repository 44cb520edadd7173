"""A dataset is read from any store, and by nothing but its store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardio.errors import FormatError
from shardio.reading import SampleReader
from shardio.sample import Sample
from shardio.shards import MANIFEST_NAME, Manifest, open_table, write_manifest, write_shard
from shardio.storage import Location
from tests.tars import write_tar

SAMPLES = [Sample(key=f"ü/{i}", fields={"cls": b"%d" % i, "jpg": bytes([i]) * 1000 * i}, origin="") for i in range(40)]


@pytest.fixture
def store(root: Location, monkeypatch: pytest.MonkeyPatch) -> Location:
    """A folder of a store; names are looked up in it."""
    monkeypatch.setattr("shardio.shards.sources.parse_location", lambda name, access: root / str(name))
    return root


def read_all(source: str | list[str | Path]) -> list[tuple[str, dict[str, bytes]]]:
    table = open_table(source)
    samples = SampleReader(table).read(np.arange(table.manifest.num_samples), ["cls", "jpg"])
    return [(sample.key, dict(sample.fields)) for sample in samples]


EXPECTED = [(sample.key, dict(sample.fields)) for sample in SAMPLES]


def test_a_packed_dataset_is_read_from_any_store(store: Location) -> None:
    shards = [write_shard(store / "data" / f"shard-{i:06d}.tar", SAMPLES[i * 20 : i * 20 + 20])[0] for i in range(2)]
    write_manifest(store / "data" / MANIFEST_NAME, Manifest(shards=tuple(shards), fields=("cls", "jpg")))
    assert read_all("data") == read_all(f"data/{MANIFEST_NAME}") == EXPECTED
    assert read_all("data/shard-{000000..000001}.tar") == EXPECTED
    (store / "data" / MANIFEST_NAME).remove()
    with pytest.raises(FormatError, match=r"data holds shards .*\(2, .* but no shardio\.json"):
        open_table("data")


def test_tars_of_other_tools_are_indexed_in_any_store(store: Location, tmp_path: Path) -> None:
    members = [(f"{key}.{field}", content) for key, fields in EXPECTED for field, content in fields.items()]
    write_tar(tmp_path / "x", members)
    for _ in range(2):  # The second time, the index is there.
        with (store / "data" / "a.tar").write_whole() as file:
            file.write((tmp_path / "x").read_bytes())
        assert read_all("data") == read_all(["data/a.tar"]) == EXPECTED
    assert (store / "data").list() == ["a.tar", "a.tar.idx"]


@pytest.mark.filterwarnings("ignore:the members of some samples")
def test_members_that_are_not_adjacent_are_gathered_in_any_store(store: Location, tmp_path: Path) -> None:
    write_tar(
        tmp_path / "x", [(f"{key}.{field}", fields[field]) for field in ("jpg", "cls") for key, fields in EXPECTED]
    )
    with (store / "a.tar").write_whole() as file:
        file.write((tmp_path / "x").read_bytes())
    for _ in range(2):  # The second time, the index is there.
        assert read_all("a.tar") == EXPECTED


def test_a_tar_that_is_named_twice_is_refused_in_any_store(store: Location) -> None:
    write_shard(store / "a.tar", SAMPLES[:2])
    with pytest.raises(FormatError, match=r"a\.tar is named twice"):
        open_table(["a.tar", "a.tar"])
