"""Parquet files and datasets that Hugging Face's ``datasets`` wrote, and LMDB environments."""

from __future__ import annotations

import datetime
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardio
from shardio.errors import PackError
from shardio.process import WorkProgress
from tests.packing.packs import assert_refused, pack, read_packed
from tests.processes import assert_passes_in_fresh_process
from tests.raising import assert_raises
from tests.sources import encode
from tests.tars import by_key

datasets, lmdb = pytest.importorskip("datasets"), pytest.importorskip("lmdb")
NUM = 40
IMAGES = [encode(seed, suffix="png" if seed % 5 == 4 else "jpg") for seed in range(NUM)]
NAMES = ["ant", "bee", "cow"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def dataset() -> Any:
    columns = {
        "image": [{"bytes": content, "path": f"{row}.jpg"} for row, content in enumerate(IMAGES)],
        "label": [row % 3 for row in range(NUM)],
        "caption": [f"caption {row}" for row in range(NUM)],
        "tags": [["a"] * (row % 3) for row in range(NUM)],
    }
    features = datasets.Features(
        image=datasets.Image(),
        label=datasets.ClassLabel(names=NAMES),
        caption=datasets.Value("string"),
        tags=datasets.Sequence(datasets.Value("string")),
    )
    return datasets.Dataset.from_dict(columns, features=features)


def save(dataset: Any, kind: str, folder: Path) -> Path:
    match kind:
        case "saved":
            dataset.save_to_disk(str(folder / "saved"), num_shards=2)
            return folder / "saved"
        case "file":
            dataset.to_parquet(str(folder / "all.parquet"))
            return folder / "all.parquet"
    (folder / "many" / "data").mkdir(parents=True)
    for part in range(2):
        path = folder / "many" / "data" / f"train-0000{part}-of-00002.parquet"
        dataset.shard(2, part, contiguous=True).to_parquet(str(path))
    return folder / "many" if kind == "folder" else folder / "many" / "data" / "train-*.parquet"


@pytest.mark.parametrize("kind", ["saved", "file", "folder", "pattern"])
def test_every_row_is_packed_with_its_bytes(dataset: Any, kind: str, tmp_path: Path) -> None:
    source = save(dataset, kind, tmp_path)
    manifest = shardio.pack(source, tmp_path / "out", max_shard_samples=11)
    assert (manifest.num_samples, list(manifest.classes)) == (NUM, NAMES)
    found = read_packed(tmp_path / "out")
    assert len(found) == NUM
    for row, content in enumerate(IMAGES):
        sample = found[f"{row:08d}"]
        assert json.loads(sample.pop("json")) == {"caption": f"caption {row}", "tags": ["a"] * (row % 3)}
        assert sample == {"png" if row % 5 == 4 else "jpg": content, "cls": str(row % 3).encode()}


def test_columns_are_chosen_by_name(tmp_path: Path) -> None:
    table = pa.table(
        {
            "left": IMAGES[:4],
            "right": [*IMAGES[4:7], None],
            "kind": ["bee", "ant", "bee", "ant"],
            "file": ["x/a.jpg", "x/b.jpg", "y/a.jpg", "y/b.c.jpg"],
            "when": [datetime.date(2024, 1, day) for day in range(1, 5)],
            "score": [0.5, float("nan"), None, 2.0],
        }
    )
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=2)
    options: dict[str, Any] = {"image_column": "left", "label_column": "kind", "key_column": "file", "check": False}
    manifest = shardio.pack(tmp_path / "t.parquet", tmp_path / "out", rename_dots=True, **options)
    assert list(manifest.classes) == ["ant", "bee"]
    found = read_packed(tmp_path / "out")
    assert (set(found), found["x/b"]["jpg"]) == ({"x/a", "x/b", "y/a", "y/b_c"}, IMAGES[1])
    assert (found["x/a"]["right.png"], found["y/b_c"]["right.image"]) == (IMAGES[4], b"")
    assert found["x/a"]["cls"] == b"1"
    assert json.loads(found["x/b"]["json"]) == {"when": "2024-01-02", "score": None}
    table_file = tmp_path / "t.parquet"
    assert_refused(r"several columns of .* may hold the images \(left, right\): choose one with", table_file)
    message = r"--image-column \(image_column\) names column 'picture', but the columns of .*t\.parquet are"
    assert_refused(message, table_file, image_column="picture")
    message = r"row 3 has 'y/b\.c\.jpg' in the key column, but it cannot be a key"
    assert_refused(message, table_file, image_column="left", key_column="file")
    assert_refused(r"row 0 and row 2 have the same key 'bee'", table_file, image_column="left", key_column="kind")


def test_class_names_are_given_or_absent(dataset: Any, tmp_path: Path) -> None:
    shardio.pack(save(dataset, "file", tmp_path), tmp_path / "out", classes=["cow", "x", "ant", "bee"])
    found = read_packed(tmp_path / "out")
    assert [found[f"{row:08d}"]["cls"] for row in range(3)] == [b"2", b"3", b"0"]
    rows = dataset.remove_columns("label").add_column("label", [-1] * NUM)
    shardio.pack(save(rows, "file", tmp_path), tmp_path / "test")
    assert not any("cls" in sample for sample in read_packed(tmp_path / "test").values())


def test_several_splits_are_refused_with_what_to_pack(dataset: Any, tmp_path: Path) -> None:
    datasets.DatasetDict(train=dataset, test=dataset).save_to_disk(str(tmp_path / "both"))
    assert_refused(r"holds the splits test, train: pack each, for example .*both/test", tmp_path / "both")
    source = save(dataset, "folder", tmp_path)
    dataset.to_parquet(str(source / "data" / "test-00000-of-00001.parquet"))
    assert_refused(r"files of the splits test, train\. Pack each split .*--source-split train", source)
    assert shardio.pack(source, tmp_path / "one", source_split="test").num_samples == NUM
    assert shardio.pack(source, tmp_path / "two", source_split="all").num_samples == 2 * NUM
    assert shardio.pack(tmp_path / "both", tmp_path / "three", source_split="test").num_samples == NUM
    message = r"no file of .* has the split 'val' .*: it holds the splits test, train"
    assert_refused(message, source, source_split="val")


def test_rows_of_several_splits_are_refused_and_a_split_selects_rows(dataset: Any, tmp_path: Path) -> None:
    splits = ["train" if row % 3 else "test" for row in range(NUM)]
    names = [str(dataset.features["label"].names[label]) for label in dataset["label"]]
    rows = dataset.remove_columns("label").add_column("label", names).add_column("split", splits)
    for kind in ("file", "saved"):
        source = save(rows, kind, tmp_path)
        assert_refused(r"column 'split' of .* to the splits test, train.*--source-split all", source)
        found = dict[str, str]()
        for split in ("train", "test"):
            out = tmp_path / f"{kind}-{split}"
            classes = shardio.pack(source, out, source_split=split, label_column="label").classes
            samples = by_key(*out.glob("*.tar"))
            assert set(samples) == {f"{row:08d}" for row in range(NUM) if splits[row] == split}
            found |= {key: classes[int(sample["cls"])] for key, sample in samples.items()}
        assert [found[f"{row:08d}"] for row in range(NUM)] == names
        assert shardio.pack(source, tmp_path / f"{kind}-all", source_split="all").num_samples == NUM
        assert_refused(r"--source-split val does not select rows .* has test, train", source, source_split="val")


def test_files_that_are_missing_by_their_names_are_reported(dataset: Any, tmp_path: Path) -> None:
    source = save(dataset, "folder", tmp_path)
    for number in (0, 2):
        dataset.to_parquet(str(source / "data" / f"train-{number:05d}-of-00003.parquet"))
    for path in (source / "data").glob("*.parquet"):
        if "of-00003" not in path.name:
            path.unlink()
    with pytest.warns(RuntimeWarning, match=r"lacks 1 Parquet file, such as train-00001-of-00003\.parquet"):
        shardio.pack(source, tmp_path / "out")


def test_images_that_are_files_beside_the_table_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(IMAGES[0])
    rows = datasets.Dataset.from_dict({"image": [str(tmp_path / "a.jpg")]}).cast_column("image", datasets.Image())
    rows.save_to_disk(str(tmp_path / "saved"))

    def write_path(path: str | None) -> Path:
        rows = [{"image": {"bytes": None, "path": path}}]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
        return tmp_path / "t.parquet"

    for number, source in enumerate((tmp_path / "saved", write_path(str(tmp_path / "a.jpg")))):
        shardio.pack(source, tmp_path / str(number))
        assert read_packed(tmp_path / str(number)) == {"00000000": {"jpg": IMAGES[0]}}
    assert_refused(r"holds the path .*b\.jpg instead of .*No such file", write_path(str(tmp_path / "b.jpg")))
    assert_refused("is not an image", write_path(None))


def write_lmdb(path: Path, entries: Mapping[str, bytes], *, subdir: bool = True) -> Path:
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
    entries = {f"{name_of(row)}.{'PNG' if row % 5 == 4 else 'jpg'}": content for row, content in enumerate(IMAGES)}
    entries |= {f"{name_of(row)}.txt": f"caption {row}".encode() for row in range(NUM)}
    return entries | {f"{name_of(row)}.mask.png": b"mask" for row in range(0, NUM, 2)}


@pytest.mark.parametrize("subdir", [True, False])
def test_entries_with_one_stem_are_fields_of_one_sample(tmp_path: Path, subdir: bool) -> None:
    source = write_lmdb(tmp_path / "in.lmdb", named_entries(), subdir=subdir)
    before = {path.name for path in tmp_path.rglob("*")}
    manifest = shardio.pack(source, tmp_path / "out", max_shard_samples=5, check=False, num_workers=1)
    assert manifest.num_samples == NUM
    found = read_packed(tmp_path / "out")
    for row, content in enumerate(IMAGES):
        expected = {"png" if row % 5 == 4 else "jpg": content, "txt": f"caption {row}".encode()}
        assert found[name_of(row)] == expected | ({} if row % 2 else {"mask.png": b"mask"})
    assert {path.name for path in tmp_path.rglob("*") if "out" not in path.parts} == before
    lmdb.open(str(source), subdir=subdir, readonly=True, lock=False).close()  # The pack closed the source.


def test_names_without_a_suffix_are_images(tmp_path: Path) -> None:
    source = write_lmdb(tmp_path / "in", {f"{row:04d}": content for row, content in enumerate(IMAGES)})
    lines = [f"{row:04d},class {row % 2}\n" for row in range(NUM)]
    (tmp_path / "labels.csv").write_text("".join(["key,label\n", *lines]))
    manifest = shardio.pack(source, tmp_path / "out", labels=tmp_path / "labels.csv")
    assert manifest.classes == ("class 0", "class 1")
    found = read_packed(tmp_path / "out")
    for row, content in enumerate(IMAGES):
        field = "png" if row % 5 == 4 else "jpg"
        assert found[f"{row:04d}"] == {field: content, "cls": str(row % 2).encode()}


def test_numbered_pairs_of_text_recognition_are_images_with_texts(tmp_path: Path) -> None:
    entries = {f"image-{row + 1:09d}": content for row, content in enumerate(IMAGES)}
    entries |= {f"label-{row + 1:09d}": f"wörd {row}".encode() for row in range(NUM)}
    source = write_lmdb(tmp_path / "in", entries | {"num-samples": str(NUM).encode(), "image-000000041": b"beyond"})
    result = pack(source, tmp_path / "out", max_shard_samples=5)
    assert [path.name for path in result.ignored] == ["image-000000041"]
    found = read_packed(tmp_path / "out")
    assert len(found) == NUM
    for row, content in enumerate(IMAGES):
        field = "png" if row % 5 == 4 else "jpg"
        assert found[f"{row + 1:09d}"] == {field: content, "txt": f"wörd {row}".encode()}
    write_lmdb(source, {"num-samples": b"43"})
    assert_refused(r"no entry 'image-000000042', but 'num-samples' is 43", source)


def test_pickles_are_refused_with_what_to_do(tmp_path: Path) -> None:
    """folder2lmdb writes pickles. Loading this pickle would create a file."""

    class Touch:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    entries = {f"{row}": pickle.dumps((content, 0, Touch())) for row, content in enumerate(IMAGES)}
    about = {"__keys__": pickle.dumps(list(entries)), "__len__": pickle.dumps(NUM)}
    for number, each in enumerate((entries | about, entries, about | {"a": IMAGES[0]})):
        source = write_lmdb(tmp_path / f"in{number}", each)
        assert_refused(r"is a pickle, as written by folder2lmdb.*shardio\.pack\(iterable, out\)", source)
    assert not (tmp_path / "ran").exists()


def test_other_values_are_refused_or_reported(tmp_path: Path) -> None:
    source = write_lmdb(tmp_path / "in", {"0001": b"\x08\x03\x10", "0002": b"\x08\x04"})
    assert_refused(r"the value of '0001' is not an image, and the name has no suffix", source)
    source = write_lmdb(tmp_path / "texts", {"0001.txt": b"one", "0002.txt": b"two"})
    assert_refused(r"holds no images that can be packed: .* The environment has 2 other entries such as", source)
    mixed = {"a.jpg": IMAGES[0], "b": b"junk", "c": IMAGES[1], "__meta__": b"m", "d.txt": b""}
    source = write_lmdb(tmp_path / "mixed", mixed)
    result = pack(source, tmp_path / "out")
    assert [path.name for path in result.ignored] == ["__meta__", "d.txt"]
    assert result.rejected == [("b", "mixed", "sample 1 ('b'), field 'image': is not an image")]
    assert set(read_packed(tmp_path / "out")) == {"a", "c"}


def test_dots_equal_fields_and_equal_keys_are_refused(tmp_path: Path) -> None:
    entries = {"x/a.jpg": IMAGES[0], "x/a.1.jpg": IMAGES[1], "x/b.old.jpg": IMAGES[2]}
    source = write_lmdb(tmp_path / "dots", entries)
    assert_refused(r"(?s)'x/a\.1\.jpg' has a dot in its stem.*'x/b\.old\.jpg' has a dot", source)
    shardio.pack(source, tmp_path / "out", rename_dots=True)
    found = read_packed(tmp_path / "out")
    assert found == {"x/a": {"jpg": IMAGES[0]}, "x/a_1": {"jpg": IMAGES[1]}, "x/b_old": {"jpg": IMAGES[2]}}
    twice = {"a.jpg": IMAGES[0], "a.JPG": IMAGES[1]}
    message = r"'a\.JPG' and 'a\.jpg' belong to one sample, but would become the same field"
    assert_refused(message, write_lmdb(tmp_path / "twice", twice))
    more = twice | {"a-b.jpg": IMAGES[1], "a": IMAGES[2]}
    del more["a.JPG"]
    assert_refused(r"two samples have the key 'a'", write_lmdb(tmp_path / "same", more))
    outside = write_lmdb(tmp_path / "outside", {"../a.jpg": IMAGES[0]})
    assert_refused(r"the key '\.\./a' is not a plain relative path", outside)


def test_fields_are_chosen(tmp_path: Path) -> None:
    source = write_lmdb(tmp_path / "in", {"a.wav": b"sound", "a.txt": b"text", "a.json": b"{}", "b.jpg": IMAGES[0]})
    shardio.pack(source, tmp_path / "out", fields=["wav", "txt"])
    assert read_packed(tmp_path / "out") == {"a": {"wav": b"sound", "txt": b"text"}}
    assert_refused(r"--key-column \(key_column\) does not apply to", source, key_column="x")


def test_a_damaged_environment_is_refused(tmp_path: Path) -> None:
    data = write_lmdb(tmp_path / "in", named_entries()) / "data.mdb"
    content = data.read_bytes()
    data.write_bytes(content[: len(content) // 2])
    assert_refused(r"is truncated: it has \d+ bytes, expected at least \d+", tmp_path / "in")
    data.write_bytes(b"not LMDB" * 1000)
    assert_refused(r"cannot be read by the lmdb package: .* copy or download it again", tmp_path / "in")
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
    source = write_lmdb(tmp_path / "in", named_entries())

    class Write(WorkProgress):
        def start(self, total: int, num_bytes: int | None = None) -> None:
            self.change("planned")

        def advance(self, num_done: int, num_bytes: int = 0, num_samples: int = 0) -> None:
            self.change("packed")

        def change(self, now: str) -> None:
            if now == when and not (tmp_path / "done").exists():
                (tmp_path / "done").touch()
                assert_passes_in_fresh_process(write_in_another_process, str(source))

    assert_raises(PackError, r"data\.mdb changed", pack, source, tmp_path / "out", Write(), check=False)
