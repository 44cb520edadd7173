"""LMDB environments that other tools wrote."""

from __future__ import annotations

import csv
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio.errors import PackError
from shardio.progress import WorkProgress
from tests.packing.packs import assert_refused, pack, read_packed
from tests.processes import assert_passes_in_fresh_process
from tests.raising import assert_raises
from tests.sources import encode

lmdb = pytest.importorskip("lmdb")
NUM = 12
IMAGES = [encode(seed, suffix="png" if seed % 4 == 3 else "jpg") for seed in range(NUM)]


def write(path: Path, entries: Mapping[str, bytes], *, subdir: bool = True) -> Path:
    """Write entries in two transactions, as a long conversion would."""
    environment = lmdb.open(str(path), map_size=1 << 26, subdir=subdir)
    names = list(entries)
    for part in (names[::2], names[1::2]):
        with environment.begin(write=True) as transaction:
            for name in part:
                transaction.put(name.encode(), entries[name])
    environment.close()
    return path


def name_of(row: int) -> str:
    return f"class {row % 3}/ä{row:03d}"


def named_entries() -> dict[str, bytes]:
    entries = {f"{name_of(row)}.{'PNG' if row % 4 == 3 else 'jpg'}": content for row, content in enumerate(IMAGES)}
    entries |= {f"{name_of(row)}.txt": f"caption {row}".encode() for row in range(NUM)}
    return entries | {f"{name_of(row)}.mask.png": b"mask" for row in range(0, NUM, 2)}


@pytest.mark.parametrize("subdir", [True, False])
def test_entries_with_one_stem_are_fields_of_one_sample(tmp_path: Path, subdir: bool) -> None:
    source = write(tmp_path / "in.lmdb", named_entries(), subdir=subdir)
    before = {path.name for path in tmp_path.rglob("*")}
    manifest = shardio.pack(source, tmp_path / "out", max_shard_samples=5, check=False, num_workers=1)
    assert manifest.num_samples == NUM
    found = read_packed(tmp_path / "out")
    for row, content in enumerate(IMAGES):
        expected = {"png" if row % 4 == 3 else "jpg": content, "txt": f"caption {row}".encode()}
        assert found[name_of(row)] == expected | ({} if row % 2 else {"mask.png": b"mask"})
    assert {path.name for path in tmp_path.rglob("*") if "out" not in path.parts} == before
    lmdb.open(str(source), subdir=subdir, readonly=True, lock=False).close()  # A pack leaves it closed.


def test_names_without_a_suffix_are_images(tmp_path: Path) -> None:
    source = write(tmp_path / "in", {f"{row:04d}": content for row, content in enumerate(IMAGES)})
    with (tmp_path / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("key", "label"), *((f"{row:04d}", f"class {row % 2}") for row in range(NUM))])
    manifest = shardio.pack(source, tmp_path / "out", labels=tmp_path / "labels.csv")
    assert manifest.classes == ("class 0", "class 1")
    found = read_packed(tmp_path / "out")
    for row, content in enumerate(IMAGES):
        field = "png" if row % 4 == 3 else "jpg"
        assert found[f"{row:04d}"] == {field: content, "cls": str(row % 2).encode()}


def test_numbered_pairs_of_text_recognition_are_images_with_texts(tmp_path: Path) -> None:
    entries = {f"image-{row + 1:09d}": content for row, content in enumerate(IMAGES)}
    entries |= {f"label-{row + 1:09d}": f"wörd {row}".encode() for row in range(NUM)}
    source = write(tmp_path / "in", entries | {"num-samples": str(NUM).encode(), "image-000000013": b"beyond"})
    result = pack(source, tmp_path / "out", max_shard_samples=5)
    assert [path.name for path in result.ignored] == ["image-000000013"]
    found = read_packed(tmp_path / "out")
    assert len(found) == NUM
    for row, content in enumerate(IMAGES):
        field = "png" if row % 4 == 3 else "jpg"
        assert found[f"{row + 1:09d}"] == {field: content, "txt": f"wörd {row}".encode()}
    write(source, {"num-samples": b"15"})
    assert_refused(r"no entry 'image-000000014', but 'num-samples' is 15", source)


def test_pickles_are_refused_with_what_to_do(tmp_path: Path) -> None:
    """folder2lmdb writes pickles. Loading this pickle would create a file."""

    class Touch:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    entries = {f"{row}": pickle.dumps((content, 0, Touch())) for row, content in enumerate(IMAGES)}
    about = {"__keys__": pickle.dumps(list(entries)), "__len__": pickle.dumps(NUM)}
    for number, each in enumerate((entries | about, entries, about | {"a": IMAGES[0]})):
        source = write(tmp_path / f"in{number}", each)
        assert_refused(r"is a pickle, as written by folder2lmdb.*shardio\.pack\(iterable, out\)", source)
    assert not (tmp_path / "ran").exists()


def test_other_values_are_refused_or_reported(tmp_path: Path) -> None:
    source = write(tmp_path / "in", {"0001": b"\x08\x03\x10", "0002": b"\x08\x04"})
    assert_refused(r"the value of '0001' is not an image, and the name has no suffix", source)
    source = write(tmp_path / "texts", {"0001.txt": b"one", "0002.txt": b"two"})
    assert_refused(r"holds no images that can be packed: .* It has 2 other entries such as", source)
    source = write(
        tmp_path / "mixed", {"a.jpg": IMAGES[0], "b": b"junk", "c": IMAGES[1], "__meta__": b"m", "d.txt": b""}
    )
    result = pack(source, tmp_path / "out")
    assert [path.name for path in result.ignored] == ["__meta__", "d.txt"]
    assert [(sample.key, sample.reason) for sample in result.rejected] == [
        ("b", "sample 1 ('b'), field 'image': is not an image")
    ]
    assert set(read_packed(tmp_path / "out")) == {"a", "c"}


def test_dots_equal_fields_and_equal_keys_are_refused(tmp_path: Path) -> None:
    entries = {"x/a.jpg": IMAGES[0], "x/a.1.jpg": IMAGES[1], "x/b.old.jpg": IMAGES[2]}
    source = write(tmp_path / "dots", entries)
    assert_refused(r"(?s)'x/a\.1\.jpg' has a dot in its stem.*'x/b\.old\.jpg' has a dot", source)
    shardio.pack(source, tmp_path / "out", rename_dots=True)
    found = read_packed(tmp_path / "out")
    assert found == {"x/a": {"jpg": IMAGES[0]}, "x/a_1": {"jpg": IMAGES[1]}, "x/b_old": {"jpg": IMAGES[2]}}
    for number, (entries, message) in enumerate(
        (
            (
                {"a.jpg": IMAGES[0], "a.JPG": IMAGES[1]},
                r"'a\.JPG' and 'a\.jpg' belong to one sample, and would be the same field",
            ),
            ({"a.jpg": IMAGES[0], "a-b.jpg": IMAGES[1], "a": IMAGES[2]}, r"two samples have the key 'a'"),
            ({"../a.jpg": IMAGES[0]}, r"the key '\.\./a' is not a plain relative path"),
        )
    ):
        assert_refused(message, write(tmp_path / f"bad{number}", entries))


def test_fields_are_chosen(tmp_path: Path) -> None:
    source = write(tmp_path / "in", {"a.wav": b"sound", "a.txt": b"text", "a.json": b"{}", "b.jpg": IMAGES[0]})
    shardio.pack(source, tmp_path / "out", fields=["wav", "txt"])
    assert read_packed(tmp_path / "out") == {"a": {"wav": b"sound", "txt": b"text"}}
    assert_refused(r"--key-column \(key_column\) does not apply to", source, key_column="x")


def test_a_damaged_environment_is_refused(tmp_path: Path) -> None:
    data = write(tmp_path / "in", named_entries()) / "data.mdb"
    content = data.read_bytes()
    data.write_bytes(content[: len(content) // 2])
    assert_refused(r"is truncated: it has \d+ bytes, expected at least \d+", tmp_path / "in")
    data.write_bytes(b"not LMDB" * 1000)
    assert_refused(r"cannot be read by the package lmdb: .* copy or download it again", tmp_path / "in")
    data.write_bytes(content)
    open_here = lmdb.open(str(tmp_path / "in"), readonly=True, lock=False)
    assert_refused(r"already open in this process.*Close it first", tmp_path / "in")
    open_here.close()


def write_in_another_process(source: str) -> None:
    with lmdb.open(source, map_size=1 << 26) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"new.jpg", b"new")


@pytest.mark.slow  # The other process can open the file only while it is closed in this process.
@pytest.mark.parametrize("when", ["planned", "packed"])
def test_an_environment_that_changes_during_the_pack_is_refused(tmp_path: Path, when: str) -> None:
    source = write(tmp_path / "in", named_entries())

    class Write(WorkProgress):
        def start(self, total: int, num_bytes: int | None = None) -> None:
            self.write("planned")

        def advance(self, num_done: int, num_bytes: int = 0, num_samples: int = 0) -> None:
            self.write("packed")

        def write(self, now: str) -> None:
            if now == when and not (tmp_path / "done").exists():
                (tmp_path / "done").touch()
                assert_passes_in_fresh_process(write_in_another_process, str(source))

    assert_raises(PackError, r"data\.mdb changed", pack, source, tmp_path / "out", Write(), check=False)
