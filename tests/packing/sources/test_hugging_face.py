"""Parquet files and saved datasets that Hugging Face's ``datasets`` wrote."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import shardio
from shardio.errors import PackError
from tests.packing.packs import assert_refused, read_packed
from tests.sources import encode
from tests.tars import by_key

datasets = pytest.importorskip("datasets")
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
    assert_refused(
        r"several columns of .* may hold the images \(left, right\): choose one with", tmp_path / "t.parquet"
    )
    with pytest.raises(
        PackError, match=r"has no column 'picture', which --image-column \(image_column\) names: it has"
    ):
        shardio.pack(tmp_path / "t.parquet", tmp_path / "other", image_column="picture")
    with pytest.raises(PackError, match=r"row 3 has 'y/b\.c\.jpg' in the key column, which cannot be a key"):
        shardio.pack(tmp_path / "t.parquet", tmp_path / "other", image_column="left", key_column="file")
    with pytest.raises(PackError, match=r"row 0 and row 2 have the same key 'bee'"):
        shardio.pack(tmp_path / "t.parquet", tmp_path / "other", image_column="left", key_column="kind")
    assert not (tmp_path / "other").exists()


def test_class_names_are_given_or_absent(dataset: Any, tmp_path: Path) -> None:
    shardio.pack(save(dataset, "file", tmp_path), tmp_path / "out", classes=["cow", "x", "ant", "bee"])
    found = read_packed(tmp_path / "out")
    assert [found[f"{row:08d}"]["cls"] for row in range(3)] == [b"2", b"3", b"0"]
    rows = dataset.remove_columns("label").add_column("label", [-1] * NUM)
    shardio.pack(save(rows, "file", tmp_path), tmp_path / "test")
    assert not any("cls" in sample for sample in read_packed(tmp_path / "test").values())


def test_several_splits_are_refused_with_what_to_pack(dataset: Any, tmp_path: Path) -> None:
    datasets.DatasetDict(train=dataset, test=dataset).save_to_disk(str(tmp_path / "both"))
    assert_refused(r"holds the splits test, train: pack each one, such as .*both/test", tmp_path / "both")
    source = save(dataset, "folder", tmp_path)
    dataset.to_parquet(str(source / "data" / "test-00000-of-00001.parquet"))
    assert_refused(r"files of the splits test, train\. Pack each split .*--source-split train", source)
    assert shardio.pack(source, tmp_path / "one", source_split="test").num_samples == NUM
    assert shardio.pack(source, tmp_path / "two", source_split="all").num_samples == 2 * NUM
    assert shardio.pack(tmp_path / "both", tmp_path / "three", source_split="test").num_samples == NUM
    with pytest.raises(PackError, match=r"no file of .* has the split 'val' .*: it holds the splits test, train"):
        shardio.pack(source, tmp_path / "out", source_split="val")


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
    array = np.zeros((8, 8, 3), np.uint8)
    Image.fromarray(array).save(tmp_path / "a.png")
    rows = datasets.Dataset.from_dict({"image": [str(tmp_path / "a.png")]}).cast_column("image", datasets.Image())
    rows.save_to_disk(str(tmp_path / "saved"))
    shardio.pack(tmp_path / "saved", tmp_path / "out")
    found = read_packed(tmp_path / "out")
    assert found["00000000"] == {"png": (tmp_path / "a.png").read_bytes()}


def test_contents_that_are_missing_in_all_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(IMAGES[0])
    for path, match in (("b.jpg", r"b\.jpg, which .* names .*No such file"), (None, "is not an image")):
        named = None if path is None else str(tmp_path / path)
        pq.write_table(pa.Table.from_pylist([{"image": {"bytes": None, "path": named}}]), tmp_path / "t.parquet")
        assert_refused(match, tmp_path / "t.parquet")
    rows = [{"image": {"bytes": None, "path": str(tmp_path / "a.jpg")}}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    shardio.pack(tmp_path / "t.parquet", tmp_path / "out")
    assert read_packed(tmp_path / "out") == {"00000000": {"jpg": IMAGES[0]}}
