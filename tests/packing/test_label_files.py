"""Labels from CSV, JSON Lines and Parquet files, which need no class folders."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

import shardio
from shardio.cli.main import app
from shardio.errors import PackError
from tests.sources import encode
from tests.tars import read_with_webdataset

Rows = Sequence[dict[str, Any]]


def write_csv(path: Path, rows: Rows) -> None:
    with path.open("w", newline="", encoding="utf-8-sig") as file:  # Spreadsheets write a byte order mark.
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_json_lines(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_parquet(path: Path, rows: Rows) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)


WRITERS: dict[str, Callable[[Path, Rows], None]] = {
    "labels.csv": write_csv,
    "labels.jsonl": write_json_lines,
    "labels.parquet": write_parquet,
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Images in folders that are not classes."""
    for i, name in enumerate(("x/a.jpg", "x/b.JPG", "y/c.jpg", "y/z/d.jpg")):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(encode(i))
    return tmp_path / "in"


def labels_of(out: Path) -> dict[str, bytes]:
    return {key: fields["cls"] for path in out.glob("*.tar") for key, fields in read_with_webdataset(path)}


@pytest.mark.parametrize("name", WRITERS)
def test_class_names_are_numbered_in_sorted_order(source: Path, tmp_path: Path, name: str) -> None:
    """Images are named by keys and by paths; rows for other images are allowed."""
    found = {"x/a": "dog", "x/b.JPG": "cat", "y/c.jpg": "dog", "y/z/d": "bee, wild", "elsewhere": "emu"}
    WRITERS[name](tmp_path / name, [{"image": image, "label": label, "n": 1} for image, label in found.items()])
    manifest = shardio.pack(source, tmp_path / "out", labels=tmp_path / name, key_column="image", label_column="label")
    assert manifest.classes == ("bee, wild", "cat", "dog", "emu")
    assert labels_of(tmp_path / "out") == {"x/a": b"2", "x/b": b"1", "y/c": b"2", "y/z/d": b"0"}


@pytest.mark.parametrize("name", WRITERS)
def test_integers_are_labels_by_themselves_and_two_columns_need_no_names(
    source: Path, tmp_path: Path, name: str
) -> None:
    WRITERS[name](
        tmp_path / name, [{"id": key, "class": i * 7} for i, key in enumerate(("x/a", "x/b", "y/c", "y/z/d"))]
    )
    manifest = shardio.pack(source, tmp_path / "out", labels=tmp_path / name)
    assert manifest.classes == ()
    assert labels_of(tmp_path / "out") == {"x/a": b"0", "x/b": b"7", "y/c": b"14", "y/z/d": b"21"}


def test_the_labels_are_part_of_what_a_pack_is(source: Path, tmp_path: Path) -> None:
    """The same labels from another kind of file give the same bytes; other classes give other labels."""
    rows = [{"id": key, "label": key[0]} for key in ("x/a", "x/b", "y/c", "y/z/d")]
    digests = set()
    for name, write in WRITERS.items():
        write(tmp_path / name, rows)
        digests.add(shardio.pack(source, tmp_path / f"{name}-out", labels=tmp_path / name).digest)
    assert len(digests) == 1
    run = CliRunner().invoke(
        app, ["pack", str(source), str(tmp_path / "cli"), "--labels", str(tmp_path / "labels.csv"), "--quiet"]
    )
    assert run.exit_code == 0, run.output
    assert shardio.ShardDataset(tmp_path / "cli").table.manifest.digest in digests
    shardio.pack(source, tmp_path / "other", labels=tmp_path / "labels.csv", classes=["y", "w", "x"])
    assert labels_of(tmp_path / "other") == {"x/a": b"2", "x/b": b"2", "y/c": b"0", "y/z/d": b"0"}


# How programs write integers. pandas makes floats of them once a column has held a missing value.
FORMS: dict[str, tuple[str, Callable[[int], Any]]] = {
    "floats in CSV": ("labels.csv", "{}.0".format),
    "spaces in CSV": ("labels.csv", " {} ".format),
    "numpy.savetxt": ("labels.csv", "{:.18e}".format),
    "floats in JSON": ("labels.jsonl", float),
    "text in JSON": ("labels.jsonl", "{}.0".format),
    "floats in Parquet": ("labels.parquet", float),
    "decimals in Parquet": ("labels.parquet", Decimal),
    "text in Parquet": ("labels.parquet", " {}".format),
}


@pytest.mark.parametrize(("name", "form"), FORMS.values(), ids=FORMS)
def test_integers_are_labels_in_every_form(source: Path, tmp_path: Path, name: str, form: Callable[[int], Any]) -> None:
    """In files of labels, and in tables of paths. As text, 10 would come before 2."""
    labels = {"x/a.jpg": 1, "x/b.JPG": 2, "y/c.jpg": 10, "y/z/d.jpg": 3}
    for path in (tmp_path / name, source / name):
        WRITERS[name](path, [{"file": file, "label": form(label)} for file, label in labels.items()])
    calls: list[dict[str, Any]] = [{"src": source, "labels": tmp_path / name}, {"src": source / name}]
    for number, call in enumerate(calls):
        manifest = shardio.pack(**call, dst=tmp_path / f"out-{number}")
        assert manifest.classes == ()
        assert labels_of(tmp_path / f"out-{number}") == {"x/a": b"1", "x/b": b"2", "y/c": b"10", "y/z/d": b"3"}
        shardio.pack(**call, dst=tmp_path / f"named-{number}", classes=[f"class {label}" for label in range(11)])
        assert labels_of(tmp_path / f"named-{number}") == labels_of(tmp_path / f"out-{number}")


def test_class_names_have_no_spaces_around_them(source: Path, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("file, label\nx/a, cat\nx/b,cat\ny/c,big dog \ny/z/d,cat\n")
    manifest = shardio.pack(
        source, tmp_path / "out", labels=tmp_path / "labels.csv", label_column="label", key_column="file"
    )
    assert manifest.classes == ("big dog", "cat")


@pytest.mark.parametrize("name", WRITERS)
def test_a_missing_label_is_refused_in_every_kind_of_table(source: Path, tmp_path: Path, name: str) -> None:
    values = ["1", " "] if name.endswith(".csv") else [1.0, None] if name.endswith(".jsonl") else [1.0, float("nan")]
    rows = [{"file": file, "label": label} for file, label in zip(("x/a.jpg", "x/b.JPG"), values, strict=True)]
    for path in (tmp_path / name, source / name):
        WRITERS[name](path, rows)
    with pytest.raises(PackError, match=r"row 2 of .* has no label"):
        shardio.pack(source, tmp_path / "out", labels=tmp_path / name)
    with pytest.raises(PackError, match=r"row 2 of .* has no label"):
        shardio.pack(source / name, tmp_path / "out")
    WRITERS[name](source / name, [{"file": "x/a.jpg", "label": values[1]}, {"file": "x/b.JPG", "label": -1.0}])
    assert shardio.pack(source / name, tmp_path / "unlabelled").fields == ("jpg",)


def test_numbers_that_may_be_names_of_other_classes_are_refused(source: Path, tmp_path: Path) -> None:
    """Class 1 of a model whose class names are numbers, sorted as text, is not the class called 1."""
    (tmp_path / "labels.csv").write_text(ALL)
    with pytest.raises(PackError, match="has the label 1, but the class '1' has the label 0: omit --classes"):
        shardio.pack(source, tmp_path / "out", labels=tmp_path / "labels.csv", classes=["1", "10", "2"])
    shardio.pack(source, tmp_path / "out", labels=tmp_path / "labels.csv", classes=["0", "1", "2"])
    assert set(labels_of(tmp_path / "out").values()) == {b"1"}


def test_values_of_csv_have_any_size(source: Path, tmp_path: Path) -> None:
    """Python's own limit is 131,072 characters. It is the process's, and stays as it was."""
    limit, caption = csv.field_size_limit(), "a" * 300_000
    write_csv(source / "t.csv", [{"file": "x/a.jpg", "caption": caption}, {"file": "y/c.jpg", "caption": "b"}])
    shardio.pack(source / "t.csv", tmp_path / "out")
    (tar,) = (tmp_path / "out").glob("*.tar")
    assert json.loads(dict(read_with_webdataset(tar))["x/a"]["json"]) == {"caption": caption}
    assert csv.field_size_limit() == limit


ALL = "key,label\nx/a,1\nx/b,1\ny/c,1\ny/z/d,1\n"
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
    "columns": ("a,b,c\n1,2,3\n", "has the columns a, b, c: name the one with the images"),
    "no rows": ("key,label\n", "has no rows"),
    "quotes": ('key,label\n"x/a,1\n', "cannot be read as a file of labels"),
    "not UTF-8": ("key,label\nx/a,\udcff\n", "cannot be read as a file of labels"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_bad_files_of_labels_are_refused_and_nothing_is_written(
    source: Path, tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "labels.csv"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(PackError, match=message) as caught:
        shardio.pack(source, tmp_path / "out", labels=path)
    assert str(path) in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_other_mistakes_are_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text(ALL)
    with pytest.raises(PackError, match=r"labels\.txt is not a file of labels: pass a \.csv, \.tsv, \.jsonl, \.parq"):
        shardio.pack(source, tmp_path / "out", labels=tmp_path / "labels.txt")
    with pytest.raises(PackError, match=r"--key-column \(key_column\) does not apply to .*: omit it"):
        shardio.pack(source, tmp_path / "out", key_column="key")
    with pytest.raises(PackError, match=r"row 1 of .* has no 'name'"):
        shardio.pack(source, tmp_path / "out", labels=tmp_path / "labels.csv", key_column="name", label_column="label")
    with pytest.raises(
        PackError, match=r"labels from 1 to 1: they must be at least 0 and below 1, the number of classes"
    ):
        shardio.pack(source, tmp_path / "out", labels=tmp_path / "labels.csv", classes=["only"])
    (source / "x" / "a.cls").write_text("3")
    with pytest.raises(PackError, match=r"x/a\.cls is a label, but .*labels\.csv already defines one: remove the file"):
        shardio.pack(source, tmp_path / "out", labels=tmp_path / "labels.csv")


def test_images_that_a_column_assigns_to_several_splits_are_not_merged_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(4):
        (tmp_path / "in" / f"{number}.jpg").write_bytes(encode(number))
    rows = [{"file": f"{n}.jpg", "label": n, "split": ("train", "test")[n % 2]} for n in range(8)]
    write_csv(tmp_path / "t.csv", rows)
    columns: dict[str, Any] = {"key_column": "file", "label_column": "label"}
    with pytest.raises(PackError, match=r"column 'split' of .*t\.csv .* of the splits test, train, but .* one dataset"):
        shardio.pack(tmp_path / "in", tmp_path / "out", labels=tmp_path / "t.csv", **columns)
    manifest = shardio.pack(tmp_path / "in", tmp_path / "all", labels=tmp_path / "t.csv", source_split="all", **columns)
    assert manifest.num_samples == 4
    for number in (1, 3):
        (tmp_path / "in" / f"{number}.jpg").unlink()
    assert shardio.pack(tmp_path / "in", tmp_path / "out", labels=tmp_path / "t.csv", **columns).num_samples == 2


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("name", ["t.csv", "t.tsv"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_tables_of_spreadsheets_are_read(
    source: Path, tmp_path: Path, encoding: str, name: str, delimiter: str
) -> None:
    rows = [("key", "label"), *((key, f"ä, b; c\t{key[-1]}") for key in ("x/a", "x/b", "y/c", "y/z/d"))]
    with (tmp_path / name).open("w", newline="", encoding=encoding) as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    manifest = shardio.pack(source, tmp_path / "out", labels=tmp_path / name)
    assert manifest.classes == tuple(label for _, label in rows[1:])
    assert labels_of(tmp_path / "out") == {key: b"%d" % number for number, (key, _) in enumerate(rows[1:])}


def test_a_table_in_another_encoding_says_what_to_do(source: Path, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("key,label\nx/a,ä\n", encoding="cp1252")
    with pytest.raises(PackError, match=r"it is not in UTF-8 \(.*byte 0xe4.*\): save it in UTF-8"):
        shardio.pack(source, tmp_path / "out", labels=tmp_path / "t.csv")
