"""Datasets that MosaicML Streaming's ``MDSWriter`` wrote."""

from __future__ import annotations

import gc
import gzip
import io
import json
import shutil
import sys
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import shardio
from shardio import PackError
from tests.files import read_files
from tests.packing.sources.mds_datasets import streaming, write, write_simple
from tests.sources import encode
from tests.tars import by_key

NUM = 30
COLUMNS = {
    "image": "jpeg",
    "class": "int",
    "caption": "str",
    "depth": "png",
    "raw": "bytes",
    "pixels": "pil",
    "array": "ndarray",
    "fixed": "ndarray:float32:2,2",
    "score": "float32",
    "price": "str_decimal",
    "meta": "json",
    "views": "list[png]",
    "frames": "jpeg_array",
}


def make_pixels(seed: int, mode: str = "RGB") -> Image.Image:
    return Image.open(io.BytesIO(encode(seed, suffix="png"))).convert(mode)


def make_sample(seed: int) -> dict[str, Any]:
    return {
        "image": encode(seed),
        "class": seed % 3,
        "caption": f"caption {seed}",
        "depth": encode(seed, suffix="png"),
        "raw": encode(seed, suffix="webp") if seed % 2 else b"\0 sound",
        "pixels": make_pixels(seed),
        "array": np.arange(seed + 1),
        "fixed": np.full((2, 2), seed, np.float32),
        "score": seed / 2,
        "price": Decimal("1.10"),
        "meta": {"box": [seed, 2], "name": None},
        "views": [make_pixels(seed + i) for i in range(seed % 3)],
        "frames": [encode(seed), encode(seed + 1)],
    }


def read_packed(folder: Path) -> dict[str, dict[str, bytes]]:
    return by_key(*sorted(folder.glob("*.tar")))


def read_pixels(content: bytes) -> tuple[str | None, str, bytes]:
    """Return the format, the mode and the pixels of an image."""
    image = Image.open(io.BytesIO(content))
    return image.format, image.mode, image.tobytes()


@pytest.mark.parametrize("compression", [None, "zstd", "gz:1"])
def test_every_sample_is_packed_with_its_bytes(compression: str | None, tmp_path: Path) -> None:
    source = write(tmp_path / "mds", COLUMNS, map(make_sample, range(NUM)), compression=compression)
    assert len(list(source.glob("*.mds*"))) > 3
    before = read_files(source)
    assert shardio.pack(source, tmp_path / "out", max_shard_samples=11, num_workers=1).num_samples == NUM
    assert read_files(source) == before
    found = read_packed(tmp_path / "out")
    assert len(found) == NUM
    for seed in range(NUM):
        sample, expected = found[f"{seed:08d}"], make_sample(seed)
        assert sample.pop("jpg") == expected["image"]
        assert sample.pop("cls") == str(seed % 3).encode()
        assert sample.pop("depth.png") == expected["depth"]
        assert sample.pop("raw.webp" if seed % 2 else "raw.bin") == expected["raw"]
        assert read_pixels(sample.pop("pixels.png")) == ("PNG", "RGB", expected["pixels"].tobytes())
        for name in "array", "fixed":
            array = np.load(io.BytesIO(sample.pop(f"{name}.npy")))
            assert array.dtype == expected[name].dtype
            np.testing.assert_array_equal(array, expected[name])
        for i, view in enumerate(expected["views"]):
            assert read_pixels(sample.pop(f"views.{i}.png")) == ("PNG", "RGB", view.tobytes())
        assert [sample.pop(f"frames.{i}.jpg") for i in range(2)] == expected["frames"]
        columns = {"caption": f"caption {seed}", "meta": expected["meta"], "price": "1.10", "score": seed / 2}
        assert json.loads(sample.pop("json")) == columns
        assert not sample


def test_worker_processes_write_the_same_bytes_and_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    source = write_simple(tmp_path / "mds", compression="zstd")
    options: dict[str, Any] = {"max_shard_samples": 4}
    shardio.pack(source, tmp_path / "1", num_workers=1, **options)
    shardio.pack(source, tmp_path / "2", num_workers=2, **options)
    assert read_files(tmp_path / "1") == read_files(tmp_path / "2")
    shardio.pack(write_simple(tmp_path / "other"), tmp_path / "3", num_workers=1)  # It closes the first one.
    gc.collect()
    assert not list((tmp_path / "temporary").iterdir())


def test_the_disk_must_hold_the_decompressed_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_simple(tmp_path / "mds", compression="zstd")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 0, 100))
    with pytest.raises(PackError, match=r"only 100 bytes of free space: set the environment variable TMPDIR"):
        shardio.pack(source, tmp_path / "out")


def test_shards_that_a_loader_decompressed_are_read_in_place(tmp_path: Path) -> None:
    """StreamingDataset writes them beside the compressed ones."""
    source = write_simple(tmp_path / "mds", compression="gz")
    shardio.pack(source, tmp_path / "expected", num_workers=1)
    for number in range(2):
        content = gzip.decompress((source / f"shard.0000{number}.mds.gz").read_bytes())
        (source / f"shard.0000{number}.mds").write_bytes(
            content[: -number or None]
        )  # Writing the second was cut short.
    (source / "shard.00000.mds.gz").unlink()
    shardio.pack(source, tmp_path / "out", num_workers=1)
    assert read_files(tmp_path / "out") == read_files(tmp_path / "expected")


@pytest.mark.parametrize(
    ("mode", "name"),
    [("1", "PNG"), ("L", "PNG"), ("LA", "PNG"), ("RGBA", "PNG"), ("I;16", "PNG"), ("I", "TIFF"), ("CMYK", "TIFF")],
)
def test_raw_pixels_are_stored_without_loss(mode: str, name: str, tmp_path: Path) -> None:
    image = make_pixels(1, "I" if mode == "I;16" else mode)
    if mode == "I;16":
        image = Image.fromarray(np.arange(12 * 256, dtype=np.uint16).reshape(12, -1) * 21)
    source = write(tmp_path / "mds", {"x": "pil", "y": "int8"}, [{"x": image, "y": 5}])
    shardio.pack(source, tmp_path / "out", num_workers=1, check=False)
    sample = read_packed(tmp_path / "out")["00000000"]
    assert read_pixels(sample["png" if name == "PNG" else "tif"]) == (name, mode, image.tobytes())
    assert sample["cls"] == b"5"


def test_labels_and_keys_come_from_columns_or_a_file(tmp_path: Path) -> None:
    names = ["bee", "ant", "bee", "cow"]
    samples = [{"a": encode(i), "b": encode(9 + i), "kind": name, "file": f"x/{i}.jpg"} for i, name in enumerate(names)]
    columns = {"a": "bytes", "b": "bytes", "kind": "str", "file": "str"}
    source = write(tmp_path / "mds", columns, samples)
    with pytest.raises(PackError, match=r"several columns of .* may hold the images \(a, b\)"):
        shardio.pack(source, tmp_path / "out")
    options: dict[str, Any] = {"image_column": "b", "key_column": "file", "label_column": "kind", "num_workers": 1}
    assert shardio.pack(source, tmp_path / "out", **options).classes == ("ant", "bee", "cow")
    found = read_packed(tmp_path / "out")
    assert found["x/3"] == {"jpg": encode(12), "a.jpg": encode(3), "cls": b"2"}
    (tmp_path / "labels.csv").write_text("key,label\n" + "".join(f"{i:08d},{i + 5}\n" for i in range(4)))
    shardio.pack(source, tmp_path / "2", labels=tmp_path / "labels.csv", image_column="a", num_workers=1)
    assert read_packed(tmp_path / "2")["00000003"]["cls"] == b"8"


def test_pickles_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "mds", {"image": "jpeg", "extra": "pkl"}, [{"image": encode(1), "extra": {1, 2}}])
    with pytest.raises(PackError, match=r"the column 'extra' of .* holds pickles, which can run any code"):
        shardio.pack(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_shards_in_other_formats_are_refused(tmp_path: Path) -> None:
    with streaming.JSONWriter(out=str(tmp_path / "json"), columns={"text": "str"}) as writer:
        writer.write({"text": "x"})
    index = json.loads((tmp_path / "json" / "index.json").read_text())
    index["shards"][0]["column_encodings"] = ["str"]
    (tmp_path / "json" / "index.json").write_text(json.dumps(index))
    with pytest.raises(PackError, match=r"shard 0 in .*index\.json has the format 'json', version 2: only MDS"):
        shardio.pack(tmp_path / "json", tmp_path / "out")


def test_several_splits_are_refused_with_what_to_pack(tmp_path: Path) -> None:
    for name in "train", "val":
        write_simple(tmp_path / "mds" / name, 2)
    with pytest.raises(PackError, match=r"holds the splits train, val: pack each one, such as .*mds/train"):
        shardio.pack(tmp_path / "mds", tmp_path / "out")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Streaming does not close files.
def test_merged_datasets_are_packed(tmp_path: Path) -> None:
    for name in "a", "b":
        write_simple(tmp_path / "mds" / name, 5, compression="zstd" if name == "b" else None)
    streaming.base.util.merge_index(str(tmp_path / "mds"))
    assert shardio.pack(tmp_path / "mds", tmp_path / "out", num_workers=1).num_samples == 10
    found = read_packed(tmp_path / "out")
    assert [found[f"{row:08d}"]["jpg"] for row in range(10)] == [encode(seed) for seed in (*range(5), *range(5))]


def test_an_image_that_cannot_be_decoded_is_left_out_with_its_place(tmp_path: Path) -> None:
    samples = [{"image": encode(i)[: 200 if i == 7 else None], "label": 0} for i in range(12)]
    source = write(tmp_path / "mds", {"image": "jpeg", "label": "int"}, samples, size_limit=1 << 12)
    assert shardio.pack(source, tmp_path / "out", num_workers=1).num_samples == 11
    (line,) = (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()
    assert json.loads(line)["reason"].startswith("sample 3 of shard.00001.mds, field 'jpg': cannot be decoded")


def test_columns_that_differ_only_in_case_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "mds", {"a": "bytes", "A": "bytes"}, [{"a": b"1", "A": b"2"}])
    with pytest.raises(PackError, match=r"differ only in case \(A, a\)"):
        shardio.pack(source, tmp_path / "out", image_column="a")


def test_a_column_whose_name_cannot_be_a_field_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "mds", {"image": "jpeg", "a/b": "bytes"}, [{"image": encode(1), "a/b": encode(2)}])
    with pytest.raises(
        PackError, match=r"sample 0 of shard.00000.mds .* the field name 'a/b\.jpg' .* contains a slash"
    ):
        shardio.pack(source, tmp_path / "out", num_workers=1)


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_simple(tmp_path / "mds", 1)
    monkeypatch.setitem(sys.modules, "streaming.base.format", None)
    with pytest.raises(PackError, match=r"mosaicml-streaming .*: install it with --no-deps, as docs/packing"):
        shardio.pack(source, tmp_path / "out")
