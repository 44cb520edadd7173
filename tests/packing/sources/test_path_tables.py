"""Tables of paths: CSV, JSON Lines and Parquet."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardio
from shardio import PackError
from shardio.packing import PackSettings, RunOptions, pack_source
from shardio.progress import WorkProgress
from tests.files import read_files
from tests.packing.test_label_files import write_csv, write_json_lines
from tests.sources import encode
from tests.tars import by_key

NUM = 14
IMAGES = [encode(seed, suffix="png" if seed % 4 == 3 else "jpg") for seed in range(NUM)]
CLASSES = ("ant", "bee", "cow")


def path_of(row: int) -> str:
    return f"photos {row % 2}/ö{row:03d}.{'PNG' if row % 4 == 3 else 'jpg'}"


def key_of(row: int) -> str:
    return path_of(row).rpartition(".")[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of images without a table."""
    for row, content in enumerate(IMAGES):
        path = tmp_path / "in" / path_of(row)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "in"


def make_rows() -> list[dict[str, Any]]:
    return [
        {"path": path_of(row), "label": CLASSES[row % 3], "caption": f"ä, {row}", "score": row / 2}
        for row in reversed(range(NUM))
    ]


def write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)


WRITERS = {"t.csv": write_csv, "t.jsonl": write_json_lines, "t.parquet": write_parquet}


def write(folder: Path, rows: Sequence[dict[str, Any]], name: str = "t.jsonl") -> Path:
    WRITERS[name](folder / name, rows)
    return folder / name


@pytest.mark.parametrize("name", WRITERS)
def test_every_row_is_packed_with_its_file(folder: Path, tmp_path: Path, name: str) -> None:
    source = write(folder, make_rows(), name)
    options: dict[str, Any] = {"max_shard_size": 12_000, "shuffle_seed": None}
    manifest = shardio.pack(source, tmp_path / "out", num_workers=1, **options)
    assert (manifest.num_samples, manifest.classes, manifest.fields) == (NUM, CLASSES, ("cls", "jpg", "json", "png"))
    assert max(path.stat().st_size for path in (tmp_path / "out").glob("*.tar")) <= 12_000
    found = by_key(*sorted((tmp_path / "out").glob("*.tar")))
    assert list(found) == [key_of(row) for row in reversed(range(NUM))]  # In the order of the table.
    for row, content in enumerate(IMAGES):
        score: Any = str(row / 2) if name == "t.csv" else row / 2
        sample = found[key_of(row)]
        assert sample["png" if row % 4 == 3 else "jpg"] == content
        assert sample["cls"] == str(row % 3).encode()
        assert json.loads(sample["json"]) == {"caption": f"ä, {row}", "score": score}
    shardio.pack(source, tmp_path / "2", num_workers=2, **options)
    assert read_files(tmp_path / "out") == read_files(tmp_path / "2")


def test_absolute_paths_and_paths_outside_the_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    rows = [
        {"image": str(folder / path_of(0))},
        {"image": f"../in/./{path_of(1)}"},
        {"image": "inner.jpg"},
        {"image": str(tmp_path / "tables" / "other.jpg")},
    ]
    for name in ("inner", "other"):
        (tmp_path / "tables" / f"{name}.jpg").write_bytes(encode(0))
    source = write(tmp_path / "tables", rows, "t.csv")
    manifest = shardio.pack(source, tmp_path / "out")
    assert manifest.fields == ("jpg",)  # No labels, and no other columns.
    where = str(folder)[1:]
    found = by_key(*(tmp_path / "out").glob("*.tar"))
    assert set(found) == {f"{where}/{key_of(0)}", f"{where}/{key_of(1)}", "inner", "other"}
    assert found[f"{where}/{key_of(1)}"]["jpg"] == IMAGES[1]


def test_a_relative_path_of_a_table(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, make_rows())
    monkeypatch.chdir(folder)
    assert shardio.pack("t.jsonl", tmp_path / "out", num_workers=2, max_shard_samples=5).num_samples == NUM


def test_keys_are_chosen(folder: Path, tmp_path: Path) -> None:
    os.link(folder / path_of(0), folder / "photos 0" / "a.b.jpg")
    rows = [{"path": path_of(0), "id": 7}, {"path": "photos 0/a.b.jpg", "id": 8}]
    with pytest.raises(PackError, match=r"row 2 has 'photos 0/a\.b\.jpg' in the column 'path', which cannot be a key"):
        shardio.pack(write(folder, rows), tmp_path / "out")
    shardio.pack(write(folder, rows), tmp_path / "renamed", rename_dots=True)
    assert set(by_key(*(tmp_path / "renamed").glob("*.tar"))) == {key_of(0), "photos 0/a_b"}
    shardio.pack(write(folder, rows), tmp_path / "numbers", key_column="id")
    assert set(by_key(*(tmp_path / "numbers").glob("*.tar"))) == {"7", "8"}
    with pytest.raises(PackError, match=r"row 1 and row 2 have the same key 'photos 0/ö000'. Name a column with"):
        shardio.pack(write(folder, [rows[0], rows[0]]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_all_files_that_cannot_be_packed_are_named(folder: Path, tmp_path: Path) -> None:
    (folder / "notes.txt").write_text("notes")
    rows = make_rows() + [{"path": path} for path in ("gone.jpg", "notes.txt", "photos 0", "https://x.org/a.jpg")]
    with pytest.raises(PackError) as caught:
        shardio.pack(write(folder, rows), tmp_path / "out")
    first, *lines, last = str(caught.value).splitlines()
    assert first == f"4 of {NUM + 4} rows of {folder}/t.jsonl name files that cannot be packed:"
    assert lines[0] == f"row {NUM + 1}: {folder}/gone.jpg does not exist"
    assert lines[1].startswith(f"row {NUM + 2}: {folder}/notes.txt is not an image (supported: jpg")
    assert lines[2].startswith(f"row {NUM + 3}: {folder}/photos 0 cannot be read: [Errno 21] Is a directory")
    assert lines[3] == f"row {NUM + 4}: https://x.org/a.jpg is a URL: download the files"
    assert last == f"Paths are relative to {folder}/, or absolute. Correct or remove these rows"
    rows = [{"path": f"gone-{number}.jpg"} for number in range(30)]
    with pytest.raises(PackError, match=r"(?s)30 of 30 rows.*gone-19\.jpg does not exist\nand 10 more"):
        shardio.pack(write(folder, rows), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_with_other_suffixes_are_recognised_by_their_content(folder: Path, tmp_path: Path) -> None:
    (folder / "a.jfif").write_bytes(IMAGES[0])
    (folder / "b").write_bytes(IMAGES[3])
    shardio.pack(write(folder, [{"path": "a.jfif"}, {"path": "b"}]), tmp_path / "out")
    assert by_key(*(tmp_path / "out").glob("*.tar")) == {"a": {"jpg": IMAGES[0]}, "b": {"png": IMAGES[3]}}


def test_columns_must_be_clear(folder: Path, tmp_path: Path) -> None:
    rows = [{"path": path_of(0), "file": path_of(1), "kind": 3}]
    with pytest.raises(PackError, match=r"several columns of .* may hold the images \(path, file\): choose one by"):
        shardio.pack(write(folder, rows), tmp_path / "out")
    shardio.pack(write(folder, rows), tmp_path / "chosen", image_column="file", label_column="kind")
    expected = {"jpg": IMAGES[1], "cls": b"3", "json": json.dumps({"path": path_of(0)}, ensure_ascii=False).encode()}
    assert by_key(*(tmp_path / "chosen").glob("*.tar")) == {key_of(1): expected}
    with pytest.raises(PackError, match=r"has the columns kind: name the one with the paths of the images by --image"):
        shardio.pack(write(folder, [{"kind": 3}]), tmp_path / "out")
    with pytest.raises(PackError, match=r"row 2 has None in the column 'path', which must be a path"):
        shardio.pack(write(folder, [{"path": path_of(0)}, {"file": path_of(1)}]), tmp_path / "out")
    with pytest.raises(PackError, match=r"row 2 of .* has no label, but others have one"):
        shardio.pack(write(folder, [{"path": path_of(0), "label": 1}, {"path": path_of(1)}]), tmp_path / "out")
    for text, message in (
        (f"path,label\n{path_of(0)},1\n{path_of(1)}\n", r"row 2 has more or fewer values than the header"),
        (f"path,label\n{path_of(0)},1,2\n", r"row 1 has more or fewer values than the header"),
        ("path,label\n", r"has no rows"),
        ('path,label\n"a.jpg,1\n', r"cannot be read as a table of paths: unexpected end of data"),
    ):
        (folder / "bad.csv").write_text(text)
        with pytest.raises(PackError, match=message):
            shardio.pack(folder / "bad.csv", tmp_path / "out")


def test_labels_and_class_names_are_given(folder: Path, tmp_path: Path) -> None:
    rows = make_rows()
    manifest = shardio.pack(write(folder, rows), tmp_path / "out", classes=["cow", "bee", "x", "ant"])
    assert manifest.classes == ("cow", "bee", "x", "ant")
    assert by_key(*(tmp_path / "out").glob("*.tar"))[key_of(0)]["cls"] == b"3"
    write_csv(tmp_path / "labels.csv", [{"file": path_of(row), "label": row} for row in range(NUM)])
    paths = [{"path": row["path"]} for row in rows]
    manifest = shardio.pack(write(folder, paths), tmp_path / "labelled", labels=tmp_path / "labels.csv")
    assert manifest.classes == ()
    assert by_key(*(tmp_path / "labelled").glob("*.tar"))[key_of(11)] == {"png": IMAGES[11], "cls": b"11"}
    with pytest.raises(PackError, match=r"classes are given, but .* has no labels"):
        shardio.pack(write(folder, paths), tmp_path / "bad", classes=["a"])
    unlabelled = [row | {"label": ""} for row in rows]
    shardio.pack(write(folder, unlabelled, "t.csv"), tmp_path / "test")
    assert not any("cls" in sample for sample in by_key(*(tmp_path / "test").glob("*.tar")).values())


def test_a_file_that_changes_during_the_pack_is_named_or_left_out(folder: Path, tmp_path: Path) -> None:
    source = write(folder, make_rows())

    class Truncate(WorkProgress):
        def start(self, total: int, num_bytes: int | None = None) -> None:
            (folder / path_of(5)).write_bytes(b"")

    settings = PackSettings(max_shard_size=1 << 20)
    with pytest.raises(PackError, match=r"photos 1/ö005\.jpg changed from \d+ to 0 bytes"):
        pack_source(source, tmp_path / "out", settings, progress=Truncate())
    (folder / path_of(5)).write_bytes(IMAGES[5])
    run = RunOptions(on_changed="skip")
    assert pack_source(source, tmp_path / "out", settings, None, run, Truncate()).manifest.num_samples == NUM - 1


def test_an_image_that_cannot_be_decoded_is_left_out_with_its_path(folder: Path, tmp_path: Path) -> None:
    (folder / path_of(5)).write_bytes(IMAGES[5][:200])
    result = pack_source(write(folder, make_rows()), tmp_path / "out", PackSettings(max_shard_size=1 << 20))
    assert [(sample.key, sample.file) for sample in result.rejected] == [(key_of(5), path_of(5))]


@pytest.mark.parametrize("name", WRITERS)
def test_rows_of_several_splits_are_refused_and_a_split_selects_rows(folder: Path, tmp_path: Path, name: str) -> None:
    """Rows of other splits need no labels and no files, and all splits number their classes in the same way."""
    splits = ["train", "val", "train", "test"]
    rows = [row | {"Subset": splits[number % 4], "mode": "test"} for number, row in enumerate(make_rows())]
    for row in rows:
        if row["Subset"] == "test":
            row["label"] = "" if name == "t.csv" else None
            (folder / row["path"]).unlink()
    rows[0]["label"] = "aardvark"  # In train alone: val's labels count it all the same.
    source = write(folder, rows, name)
    with pytest.raises(PackError, match=r"column 'Subset' of .* of the splits test, train, val\..*--source-split all"):
        shardio.pack(source, tmp_path / "out")
    for split in ("train", "val"):
        manifest = shardio.pack(source, tmp_path / split, source_split=split)
        assert manifest.classes == ("aardvark", *CLASSES)
        found = by_key(*(tmp_path / split).glob("*.tar"))
        wanted = {row["path"].rpartition(".")[0]: row["label"] for row in rows if row["Subset"] == split}
        assert {key: manifest.classes[int(sample["cls"])] for key, sample in found.items()} == wanted
    with pytest.raises(PackError, match=r"--source-split dev does not select rows of"):
        shardio.pack(source, tmp_path / "out", source_split="dev")
    (folder / rows[5]["path"]).unlink()
    with pytest.raises(PackError, match=r"1 of 4 rows of .*\nrow 6: .* does not exist"):
        shardio.pack(source, tmp_path / "out", source_split="val")


@pytest.mark.parametrize(
    ("splits", "is_refused"),
    [
        (["train", "test"], True),
        (["train2017", "", "val2017"], True),
        (["train", "train"], False),
        (["train", "bus"], False),
        (["", ""], False),
        (["a", "b"], False),
        (["0", "1"], False),
    ],
)
def test_a_column_is_one_of_splits_if_all_its_values_are(
    folder: Path, tmp_path: Path, splits: list[str], is_refused: bool
) -> None:
    rows = [row | {"x": splits[number % len(splits)]} for number, row in enumerate(make_rows())]
    source = write(folder, rows, "t.csv")
    if is_refused:
        with pytest.raises(PackError, match="the column 'x' of"):
            shardio.pack(source, tmp_path / "out")
        assert shardio.pack(source, tmp_path / "out", source_split="all").num_samples == NUM
    else:
        assert shardio.pack(source, tmp_path / "out").num_samples == NUM
        if splits[0] != "train":
            with pytest.raises(PackError, match=r"no column of .* names the splits of its rows"):
                shardio.pack(source, tmp_path / "other", source_split="train")


def test_paths_of_windows_are_refused_with_what_to_do(folder: Path, tmp_path: Path) -> None:
    rows = [row | {"path": row["path"].replace("/", "\\")} for row in make_rows()]
    with pytest.raises(PackError, match=r"does not exist: separate folders by / instead of \\"):
        shardio.pack(write(folder, rows, "t.csv"), tmp_path / "out")


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(
    ("column", "others"), [("is_train", "test"), ("is_training_image", "test"), ("isVal", "val"), ("is_test", "test")]
)
def test_flags_name_splits(folder: Path, tmp_path: Path, name: str, column: str, others: str) -> None:
    is_training = "train" in column
    rows = [row | {column: (number % 3 > 0) is is_training} for number, row in enumerate(make_rows())]
    source = write(folder, rows, name)
    with pytest.raises(PackError, match=f"the column {column!r} of .* of the splits (test, train|train, val)"):
        shardio.pack(source, tmp_path / "out")
    for split in ("train", others):
        shardio.pack(source, tmp_path / split, source_split=split)
        wanted = {row["path"].rpartition(".")[0] for n, row in enumerate(rows) if (n % 3 > 0) == (split == "train")}
        assert set(by_key(*(tmp_path / split).glob("*.tar"))) == wanted
