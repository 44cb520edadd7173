"""Tables of labels, for images without class folders, and tables of paths, in CSV, JSON Lines and Parquet files."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardio
from shardio.errors import PackError
from shardio.packing import PackOptions, PackSource, packer
from shardio.packing.sources.source import SOURCES, Evidence, SourceScan
from tests.cli.commands import run
from tests.files import read_files
from tests.packing.packs import Change, assert_refused, pack, read_packed, write_files
from tests.raising import assert_raises
from tests.sources import encode

Rows = Sequence[dict[str, Any]]


def write_csv(path: Path, rows: Rows) -> None:
    with path.open("w", newline="", encoding="utf-8-sig") as file:  # Spreadsheets write a byte order mark.
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_json_lines(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_parquet(path: Path, rows: Rows) -> None:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)


WRITERS: dict[str, Callable[[Path, Rows], None]]
WRITERS = {"t.csv": write_csv, "t.jsonl": write_json_lines, "t.parquet": write_parquet}


def write_table(folder: Path, rows: Rows, name: str = "t.jsonl") -> Path:
    WRITERS[name](folder / name, rows)
    return folder / name


def test_the_first_kind_that_recognizes_a_file_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Encoded(PackSource):
        """A JSON Lines file with images in base64."""

        what = "a table of encoded images"
        takes = ("label_column",)

        def find(self, src: Path) -> Evidence | None:
            return Evidence(src) if src.suffix == ".jsonl" else None

        def scan(self, src: Path, options: PackOptions) -> SourceScan:
            raise PackError("it is encoded")

    monkeypatch.setitem(sys.modules, "shardio.packing.sources.encoded", SimpleNamespace(Encoded=Encoded))
    sources: dict[Any, str] = {"encoded": "encoded:Encoded", **SOURCES}
    monkeypatch.setattr(packer, "SOURCES", sources)
    table = write_table(tmp_path, [{"image": "aGFsbG8="}])
    assert_refused("it is encoded", table)
    assert_refused("does not exist", table, source_kind="table")
    assert_refused("does not exist", table, image_column="image")  # This option applies only to tables of paths.


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Images in folders that are not classes."""
    names = ("x/a.jpg", "x/b.JPG", "y/c.jpg", "y/z/d.jpg")
    return write_files(tmp_path / "in", {name: encode(i) for i, name in enumerate(names)})


def labels_of(out: Path) -> dict[str, bytes]:
    return {key: fields["cls"] for key, fields in read_packed(out).items()}


@pytest.mark.parametrize("name", WRITERS)
def test_labels_are_class_names_in_sorted_order_or_integers(source: Path, tmp_path: Path, name: str) -> None:
    found = {"x/a": "dog", "x/b.JPG": "cat", "y/c.jpg": "dog", "y/z/d": "bee, wild", "elsewhere": "emu"}
    table = write_table(tmp_path, [{"image": key, "label": label, "n": 1} for key, label in found.items()], name)
    manifest = shardio.pack(source, tmp_path / "1", labels=table, key_column="image", label_column="label")
    assert manifest.classes == ("bee, wild", "cat", "dog", "emu")
    assert labels_of(tmp_path / "1") == {"x/a": b"2", "x/b": b"1", "y/c": b"2", "y/z/d": b"0"}
    rows = [{"id": key, "class": i * 7} for i, key in enumerate(("x/a", "x/b", "y/c", "y/z/d"))]
    table = write_table(tmp_path, rows, name)
    assert shardio.pack(source, tmp_path / "2", labels=table).classes == ()
    assert labels_of(tmp_path / "2") == {"x/a": b"0", "x/b": b"7", "y/c": b"14", "y/z/d": b"21"}


def test_the_labels_are_part_of_what_a_pack_is(source: Path, tmp_path: Path) -> None:
    rows = [{"id": key, "label": key[0]} for key in ("x/a", "x/b", "y/c", "y/z/d")]
    digests = {
        shardio.pack(source, tmp_path / f"{name}-out", labels=write_table(tmp_path, rows, name)).digest
        for name in WRITERS
    }
    assert len(digests) == 1
    run("pack", source, tmp_path / "cli", "--labels", tmp_path / "t.csv", "--quiet")
    assert shardio.ShardDataset(tmp_path / "cli").table.manifest.digest in digests
    shardio.pack(source, tmp_path / "other", labels=tmp_path / "t.csv", classes=["y", "w", "x"])
    assert labels_of(tmp_path / "other") == {"x/a": b"2", "x/b": b"2", "y/c": b"0", "y/z/d": b"0"}


# Forms in which programs write integers. pandas turns integers into floats if a column has contained missing values.
FORMS: dict[str, tuple[str, Callable[[int], Any]]] = {
    "floats in CSV": ("t.csv", "{}.0".format),
    "spaces in CSV": ("t.csv", " {} ".format),
    "numpy.savetxt": ("t.csv", "{:.18e}".format),
    "floats in JSON": ("t.jsonl", float),
    "text in JSON": ("t.jsonl", "{}.0".format),
    "floats in Parquet": ("t.parquet", float),
    "decimals in Parquet": ("t.parquet", Decimal),
    "text in Parquet": ("t.parquet", " {}".format),
}


@pytest.mark.parametrize(("name", "form"), FORMS.values(), ids=FORMS)
def test_integers_are_labels_in_every_form(source: Path, tmp_path: Path, name: str, form: Callable[[int], Any]) -> None:
    labels = {"x/a.jpg": 1, "x/b.JPG": 2, "y/c.jpg": 10, "y/z/d.jpg": 3}
    rows = [{"file": file, "label": form(label)} for file, label in labels.items()]
    calls: list[dict[str, Any]]
    calls = [{"src": source, "labels": write_table(tmp_path, rows, name)}, {"src": write_table(source, rows, name)}]
    for number, call in enumerate(calls):
        assert shardio.pack(**call, dst=tmp_path / f"out-{number}").classes == ()
        shardio.pack(**call, dst=tmp_path / f"named-{number}", classes=[f"class {label}" for label in range(11)])
        for out in (f"out-{number}", f"named-{number}"):
            assert labels_of(tmp_path / out) == {"x/a": b"1", "x/b": b"2", "y/c": b"10", "y/z/d": b"3"}


@pytest.mark.parametrize("name", WRITERS)
def test_a_missing_label_is_refused_in_every_kind_of_table(source: Path, tmp_path: Path, name: str) -> None:
    values: Any = {"t.csv": ["1", " "], "t.jsonl": [1.0, None], "t.parquet": [1.0, float("nan")]}[name]
    rows = [{"file": file, "label": label} for file, label in zip(("x/a.jpg", "x/b.JPG"), values, strict=True)]
    for src, labels in ((source, write_table(tmp_path, rows, name)), (write_table(source, rows, name), None)):
        assert_refused(r"row 2 of .* has no label", src, labels=labels)
    rows = [{"file": "x/a.jpg", "label": values[1]}, {"file": "x/b.JPG", "label": -1.0}]
    assert shardio.pack(write_table(source, rows, name), tmp_path / "unlabeled").fields == ("jpg",)


ALL = "key,label\nx/a,1\nx/b,1\ny/c,1\ny/z/d,1\n"


def test_numbers_that_may_be_names_of_other_classes_are_refused(source: Path, tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text(ALL)
    message = "has the label 1, but the class '1' has the label 0: omit --classes"
    assert_refused(message, source, labels=table, classes=["1", "10", "2"])
    shardio.pack(source, tmp_path / "out", labels=table, classes=["0", "1", "2"])
    assert set(labels_of(tmp_path / "out").values()) == {b"1"}
    table.write_text("file, label\nx/a, cat\nx/b,cat\ny/c,big dog \ny/z/d,cat\n")
    columns: dict[str, Any] = {"label_column": "label", "key_column": "file"}
    assert shardio.pack(source, tmp_path / "spaces", labels=table, **columns).classes == ("big dog", "cat")


def test_values_of_csv_have_any_size(source: Path, tmp_path: Path) -> None:
    """Packing does not change Python's process-wide limit of 131,072 characters per CSV value."""
    limit, caption = csv.field_size_limit(), "a" * 300_000
    rows = [{"file": "x/a.jpg", "caption": caption}, {"file": "y/c.jpg", "caption": "b"}]
    shardio.pack(write_table(source, rows, "t.csv"), tmp_path / "out")
    assert json.loads(read_packed(tmp_path / "out")["x/a"]["json"]) == {"caption": caption}
    assert csv.field_size_limit() == limit


BAD = {
    "missing": ("key,label\nx/a,1\n", "has no label for 3 of 4 samples: x/b, y/c, y/z/d"),
    "two": (ALL + "x/a.jpg,2\n", "labels 'x/a' as 1 in row 1 and as 2 in row 5"),
    "mixed": (ALL + "q,cat\n", "both class names and integers as labels, such as 'cat' and 1"),
    "negative": (ALL + "q,-1\n", "has labels from -1 to 1"),
    "empty label": (ALL + "q,\n", "row 5 .* has no label: remove the row, or add the label"),
    "NaN": (ALL.replace("1\n", "1.0\n") + "q,nan\n", "both class names and integers as labels, such as 'nan' and 1"),
    "a fraction": (ALL + "q,1.5\n", "row 5 has the label '1.5', which is not an integer below 2"),
    "too large": (ALL + "q,1.0e400\n", "row 5 has the label '1.0e400', which is not an integer below 2"),
    "two columns with a name": ("key, label,label\nx/a,1,2\n", "two columns have the name 'label'"),
    "columns": ("a,b,c\n1,2,3\n", "has the columns a, b, c: specify the columns of images"),
    "no rows": ("key,label\n", "has no rows"),
    "quotes": ('key,label\n"x/a,1\n', "cannot be read as a label file"),
    "not UTF-8": ("key,label\nx/a,\udcff\n", "cannot be read as a label file"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_bad_files_of_labels_are_refused(source: Path, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert str(path) in assert_refused(message, source, labels=path)


def test_other_mistakes_are_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(ALL)
    (tmp_path / "cp1252.csv").write_text("key,label\nx/a,ä\n", encoding="cp1252")
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"labels": "t.txt"}, r"t\.txt is not a label file: pass a \.csv, \.tsv, \.jsonl, \.parq"),
        ({"labels": None, "key_column": "key"}, r"--key-column \(key_column\) does not apply to .*: omit it"),
        ({"key_column": "name", "label_column": "label"}, r"row 1 of .* has no 'name'"),
        ({"classes": ["only"]}, r"labels from 1 to 1: they must be at least 0 and below 1, the number of classes"),
        ({"labels": tmp_path / "cp1252.csv"}, r"it is not in UTF-8 \(.*byte 0xe4.*\): save it in UTF-8"),
    ]
    for options, message in mistakes:
        assert_refused(message, source, **{"labels": tmp_path / "t.csv"} | options)
    (source / "x" / "a.cls").write_text("3")
    message = r"x/a\.cls is a label, but .*t\.csv already defines one: remove the file"
    assert_refused(message, source, labels=tmp_path / "t.csv")


def test_images_that_a_column_assigns_to_several_splits_are_not_merged_without_a_word(tmp_path: Path) -> None:
    source = write_files(tmp_path / "in", {f"{number}.jpg": encode(number) for number in range(4)})
    rows = [{"file": f"{n}.jpg", "label": n, "split": ("train", "test")[n % 2]} for n in range(8)]
    columns = {"key_column": "file", "label_column": "label"}
    options: dict[str, Any] = {"labels": write_table(tmp_path, rows, "t.csv"), **columns}
    assert_refused(r"column 'split' of .*t\.csv .* to the splits test, train, but .* one dataset", source, **options)
    assert shardio.pack(source, tmp_path / "all", source_split="all", **options).num_samples == 4
    for number in (1, 3):
        (source / f"{number}.jpg").unlink()
    assert shardio.pack(source, tmp_path / "out", **options).num_samples == 2


ENCODINGS = ("utf-8", "utf-8-sig", "utf-16")


@pytest.mark.parametrize(
    ("name", "delimiter", "encoding"),
    [(f"t.{kind}", sign, code) for kind in ("csv", "tsv") for sign, code in zip(",;\t", ENCODINGS, strict=True)]
    + [("t.csv", ";", "utf-16")],
)
def test_spreadsheets_are_read(source: Path, tmp_path: Path, name: str, delimiter: str, encoding: str) -> None:
    rows = [("key", "label"), *((key, f"ä, b; c\t{key[-1]}") for key in ("x/a", "x/b", "y/c", "y/z/d"))]
    with (tmp_path / name).open("w", newline="", encoding=encoding) as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    manifest = shardio.pack(source, tmp_path / "out", labels=tmp_path / name)
    assert manifest.classes == tuple(label for _, label in rows[1:])
    assert labels_of(tmp_path / "out") == {key: b"%d" % number for number, (key, _) in enumerate(rows[1:])}


NUM = 14
IMAGES = [encode(seed, suffix="png" if seed % 4 == 3 else "jpg") for seed in range(NUM)]
CLASSES = ("ant", "bee", "cow")


def path_of(row: int) -> str:
    return f"photos {row % 2}/ö{row:03d}.{'PNG' if row % 4 == 3 else 'jpg'}"


def key_of(row: int) -> str:
    return path_of(row).rpartition(".")[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_files(tmp_path / "in", {path_of(row): content for row, content in enumerate(IMAGES)})


def make_rows() -> list[dict[str, Any]]:
    rows = reversed(range(NUM))
    return [{"path": path_of(n), "label": CLASSES[n % 3], "caption": f"ä, {n}", "score": n / 2} for n in rows]


@pytest.mark.parametrize("name", WRITERS)
def test_rows_are_packed(folder: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_table(folder, make_rows(), name)
    options: dict[str, Any] = {"max_shard_size": 12_000, "shuffle_seed": None}
    manifest = shardio.pack(source, tmp_path / "out", num_workers=1, **options)
    assert (manifest.num_samples, manifest.classes, manifest.fields) == (NUM, CLASSES, ("cls", "jpg", "json", "png"))
    assert max(path.stat().st_size for path in (tmp_path / "out").glob("*.tar")) <= 12_000
    found = read_packed(tmp_path / "out")
    assert list(found) == [key_of(row) for row in reversed(range(NUM))]  # Samples are in the order of the table.
    for row, content in enumerate(IMAGES):
        score: Any = str(row / 2) if name == "t.csv" else row / 2
        sample = found[key_of(row)]
        assert (sample["png" if row % 4 == 3 else "jpg"], sample["cls"]) == (content, str(row % 3).encode())
        assert json.loads(sample["json"]) == {"caption": f"ä, {row}", "score": score}
    if name == "t.jsonl":  # A relative path works too.
        monkeypatch.chdir(folder)
        shardio.pack(name, tmp_path / "2", num_workers=2, **options)
        assert read_files(tmp_path / "out") == read_files(tmp_path / "2")


def test_absolute_paths_and_paths_outside_the_folder(folder: Path, tmp_path: Path) -> None:
    tables = write_files(tmp_path / "tables", {"inner.jpg": encode(0), "other.jpg": encode(0)})
    paths = [folder / path_of(0), f"../in/./{path_of(1)}", "inner.jpg", tables / "other.jpg"]
    manifest = shardio.pack(write_table(tables, [{"image": str(path)} for path in paths], "t.csv"), tmp_path / "out")
    assert manifest.fields == ("jpg",)  # The table has no labels and no other columns.
    found, where = read_packed(tmp_path / "out"), str(folder)[1:]
    assert set(found) == {f"{where}/{key_of(0)}", f"{where}/{key_of(1)}", "inner", "other"}
    assert found[f"{where}/{key_of(1)}"]["jpg"] == IMAGES[1]


def test_keys_are_chosen_and_files_are_recognized_by_their_content(folder: Path, tmp_path: Path) -> None:
    write_files(folder, {"a.jfif": IMAGES[0], "b": IMAGES[3]})
    shardio.pack(write_table(folder, [{"path": "a.jfif"}, {"path": "b"}]), tmp_path / "out")
    assert read_packed(tmp_path / "out") == {"a": {"jpg": IMAGES[0]}, "b": {"png": IMAGES[3]}}
    os.link(folder / path_of(0), folder / "photos 0" / "a.b.jpg")
    rows = [{"path": path_of(0), "id": 7}, {"path": "photos 0/a.b.jpg", "id": 8}]
    source = write_table(folder, rows)
    assert_refused(r"row 2 has 'photos 0/a\.b\.jpg' in the column 'path', but it cannot be a key", source)
    shardio.pack(source, tmp_path / "renamed", rename_dots=True)
    assert set(read_packed(tmp_path / "renamed")) == {key_of(0), "photos 0/a_b"}
    shardio.pack(source, tmp_path / "numbers", key_column="id")
    assert set(read_packed(tmp_path / "numbers")) == {"7", "8"}
    message = r"row 1 and row 2 have the same key 'photos 0/ö000'. Specify another column"
    assert_refused(message, write_table(folder, [rows[0], rows[0]]))


def test_all_files_that_cannot_be_packed_are_named(folder: Path) -> None:
    (folder / "notes.txt").write_text("notes")
    rows = make_rows() + [{"path": path} for path in ("gone.jpg", "notes.txt", "photos 0", "https://x.org/a.jpg")]
    first, *lines, last = assert_refused("cannot be packed", write_table(folder, rows)).splitlines()
    assert first == f"4 of {NUM + 4} rows of {folder}/t.jsonl cannot be packed:"
    starts = [
        f"{folder}/gone.jpg does not exist",
        f"{folder}/notes.txt is not an image (supported: jpg",
        f"{folder}/photos 0 cannot be read: [Errno 21] Is a directory",
        "https://x.org/a.jpg is a URL: download the files",
    ]
    assert len(lines) == len(starts)
    for number, (line, start) in enumerate(zip(lines, starts, strict=True)):
        assert line.startswith(f"row {NUM + 1 + number}: {start}")
    assert last == f"Paths are relative to {folder}/, or absolute. Correct or remove these rows"
    rows = [{"path": f"gone-{number}.jpg"} for number in range(30)]
    assert_refused(r"(?s)30 of 30 rows.*gone-19\.jpg does not exist\nand 10 more", write_table(folder, rows))
    rows = [row | {"path": row["path"].replace("/", "\\")} for row in make_rows()]
    assert_refused(r"does not exist: separate folders with / instead of \\", write_table(folder, rows))


P0, P1 = {"path": path_of(0)}, {"path": path_of(1)}
UNCLEAR: list[tuple[list[dict[str, Any]] | str, str]] = [
    ([{"kind": 3}], r"has the columns kind: specify the column of image paths with --image"),
    ([P0, {"file": path_of(1)}], r"row 2 has None in the column 'path', which must hold paths"),
    ([P0 | {"label": 1}, P1], r"row 2 of .* has no label, but others have one"),
    (f"path,label\n{path_of(0)},1\n{path_of(1)}\n", r"row 2 has more or fewer values than the header"),
    (f"path,label\n{path_of(0)},1,2\n", r"row 1 has more or fewer values than the header"),
    ("path,label\n", r"has no rows"),
    ('path,label\n"a.jpg,1\n', r"cannot be read as a table of paths: unexpected end of data"),
]


def test_columns_must_be_clear(folder: Path, tmp_path: Path) -> None:
    source = write_table(folder, [{"path": path_of(0), "file": path_of(1), "kind": 3}])
    assert_refused(r"several columns of .* may hold the images \(path, file\): choose one with", source)
    shardio.pack(source, tmp_path / "chosen", image_column="file", label_column="kind")
    expected = {"jpg": IMAGES[1], "cls": b"3", "json": json.dumps({"path": path_of(0)}, ensure_ascii=False).encode()}
    assert read_packed(tmp_path / "chosen") == {key_of(1): expected}
    for rows, message in UNCLEAR:
        if isinstance(rows, str):
            (folder / "bad.csv").write_text(rows)
        assert_refused(message, folder / "bad.csv" if isinstance(rows, str) else write_table(folder, rows))


def test_labels_and_class_names_are_given(folder: Path, tmp_path: Path) -> None:
    rows = make_rows()
    manifest = shardio.pack(write_table(folder, rows), tmp_path / "out", classes=["cow", "bee", "x", "ant"])
    assert manifest.classes == ("cow", "bee", "x", "ant")
    assert read_packed(tmp_path / "out")[key_of(0)]["cls"] == b"3"
    labels = write_table(tmp_path, [{"file": path_of(row), "label": row} for row in range(NUM)], "t.csv")
    paths = [{"path": row["path"]} for row in rows]
    assert shardio.pack(write_table(folder, paths), tmp_path / "labeled", labels=labels).classes == ()
    assert read_packed(tmp_path / "labeled")[key_of(11)] == {"png": IMAGES[11], "cls": b"11"}
    assert_refused(r"classes are given, but .* has no labels", write_table(folder, paths), classes=["a"])
    shardio.pack(write_table(folder, [row | {"label": ""} for row in rows], "t.csv"), tmp_path / "test")
    assert not any("cls" in sample for sample in read_packed(tmp_path / "test").values())


def test_a_file_that_is_damaged_or_changes_is_left_out_or_named(folder: Path, tmp_path: Path) -> None:
    source, path = write_table(folder, make_rows()), folder / path_of(5)
    truncate = Change(lambda: path.write_bytes(b""))
    message = r"photos 1/ö005\.jpg changed from \d+ to 0 bytes"
    assert_raises(PackError, message, pack, source, tmp_path / "out", truncate)
    path.write_bytes(IMAGES[5])
    assert pack(source, tmp_path / "out", truncate, on_changed="skip").manifest.num_samples == NUM - 1
    path.write_bytes(IMAGES[5][:200])
    rejected = pack(source, tmp_path / "decodable").rejected
    assert [(sample.key, sample.file) for sample in rejected] == [(key_of(5), path_of(5))]


@pytest.mark.parametrize("name", WRITERS)
def test_rows_of_several_splits_are_refused_and_a_split_selects_rows(folder: Path, tmp_path: Path, name: str) -> None:
    splits = ["train", "val", "train", "test"]
    rows = [row | {"Subset": splits[number % 4], "mode": "test"} for number, row in enumerate(make_rows())]
    for row in rows:
        if row["Subset"] == "test":
            row["label"] = "" if name == "t.csv" else None
            (folder / row["path"]).unlink()
    rows[0]["label"] = "aardvark"  # Only train has this class, but the numbering of val's labels includes it.
    source = write_table(folder, rows, name)
    assert_refused(r"column 'Subset' of .* to the splits test, train, val\..*--source-split all", source)
    for split in ("train", "val"):
        manifest = shardio.pack(source, tmp_path / split, source_split=split)
        assert manifest.classes == ("aardvark", *CLASSES)
        found = {key: manifest.classes[int(sample["cls"])] for key, sample in read_packed(tmp_path / split).items()}
        assert found == {row["path"].rpartition(".")[0]: row["label"] for row in rows if row["Subset"] == split}
    assert_refused(r"--source-split dev does not select rows of", source, source_split="dev")
    (folder / rows[5]["path"]).unlink()
    assert_refused(r"1 of 4 rows of .*\nrow 6: .* does not exist", source, source_split="val")


SPLITS = [["train", "test"], ["train2017", "", "val2017"]]


@pytest.mark.parametrize("splits", [*SPLITS, ["train", "train"], ["train", "bus"], ["", ""], ["a", "b"], ["0", "1"]])
def test_values_tell_a_column_of_splits(folder: Path, tmp_path: Path, splits: list[str]) -> None:
    rows = [row | {"x": splits[number % len(splits)]} for number, row in enumerate(make_rows())]
    source = write_table(folder, rows, "t.csv")
    if splits in SPLITS:
        assert_refused("the column 'x' of", source)
    elif splits[0] != "train":
        assert_refused(r"no column of .* names the splits of its rows", source, source_split="train")
    assert shardio.pack(source, tmp_path / "out", source_split="all" if splits in SPLITS else None).num_samples == NUM


@pytest.mark.parametrize(
    ("name", "column", "others"),
    [
        *((name, "is_train", "test") for name in WRITERS),
        *(("t.csv", "is_training_image", "test"), ("t.jsonl", "isVal", "val"), ("t.parquet", "is_test", "test")),
    ],
)
def test_flags_name_splits(folder: Path, tmp_path: Path, name: str, column: str, others: str) -> None:
    is_training = "train" in column
    rows = [row | {column: (number % 3 > 0) is is_training} for number, row in enumerate(make_rows())]
    source = write_table(folder, rows, name)
    assert_refused(f"the column {column!r} of .* to the splits (test, train|train, val)", source)
    for split in ("train", others):
        shardio.pack(source, tmp_path / split, source_split=split)
        wanted = {row["path"].rpartition(".")[0] for n, row in enumerate(rows) if (n % 3 > 0) == (split == "train")}
        assert set(read_packed(tmp_path / split)) == wanted
