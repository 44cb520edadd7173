"""Labels from CSV, JSON Lines and Parquet files, which need no class folders."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
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


ALL = "key,label\nx/a,1\nx/b,1\ny/c,1\ny/z/d,1\n"
BAD = {
    "missing": ("key,label\nx/a,1\n", "has no label for 3 of 4 samples: x/b, y/c, y/z/d"),
    "two": (ALL + "x/a.jpg,2\n", "labels 'x/a' as 1 in row 1 and as 2 in row 5"),
    "mixed": (ALL + "q,cat\n", "both class names and integers as labels, such as 'cat' and 1"),
    "negative": (ALL + "q,-1\n", "has labels from -1 to 1"),
    "empty label": (ALL + "q,\n", "row 5 .* has the label ''"),
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
    with pytest.raises(PackError, match=r"labels\.txt is not a file of labels: pass a \.csv, \.jsonl, \.parquet file"):
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
