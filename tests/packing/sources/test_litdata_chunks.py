"""Chunks that LitData's writer, which ``litdata.optimize`` uses, wrote."""

from __future__ import annotations

import gc
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import shardio
from shardio import PackError
from tests.files import read_files
from tests.packing.sources.changes import assert_change_is_refused
from tests.sources import encode
from tests.tars import by_key

litdata = pytest.importorskip("litdata")

NUM = 20
COMPRESSIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "batch": {"compression": "zstd", "compression_level": "batch"},
    "chunk": {"compression": "zstd", "compression_level": "chunk"},
    "sample": {"compression": "zstd", "compression_level": "sample"},
}


def write(folder: Path, samples: Iterable[Any], **options: Any) -> Path:
    """Write a dataset with several chunks."""
    from litdata.streaming.writer import BinaryWriter

    folder.mkdir(parents=True)
    writer = BinaryWriter(str(folder), **({"chunk_size": 7} | options))
    for number, sample in enumerate(samples):
        writer[number] = sample
    writer.done()
    writer.merge(1)
    return folder


def write_simple(folder: Path, num: int = 12, **options: Any) -> Path:
    return write(folder, ((encode(seed), seed % 3) for seed in range(num)), **({"chunk_size": 3} | options))


def make_pixels(seed: int) -> Image.Image:
    return Image.open(io.BytesIO(encode(seed, suffix="png"))).copy()


def make_sample(seed: int, folder: Path) -> dict[str, Any]:
    import torch

    (folder / "notes.json").write_text('{"q":  1}')
    return {
        "image": litdata.Jpeg(bytes=encode(seed)),
        "label": seed % 3,
        "depth": litdata.Image(bytes=encode(seed, suffix="png"), path="x.png"),
        "raw": encode(seed, suffix="webp") if seed % 2 else b"\0 sound",
        "pixels": make_pixels(seed),
        "notes": litdata.File(path=str(folder / "notes.json")),
        "frames": litdata.JpegArray(images=[litdata.Jpeg(bytes=encode(seed + i)) for i in range(2)]),
        "array": np.arange(6).reshape(2, 3) + seed,
        "vector": torch.arange(3) + seed,
        "matrix": torch.full((2, 2), seed / 2),
        "caption": f"caption {seed}",
        "good": True,
        "score": seed / 2,
        "meta": {"camera": seed, "boxes": [1, 2.5], "thumb": encode(seed + 50)},
        "pair": [seed, "x"],
    }


def read_packed(folder: Path) -> dict[str, dict[str, bytes]]:
    return by_key(*sorted(folder.glob("*.tar")))


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_every_sample_is_packed_with_its_bytes(compression: str, tmp_path: Path) -> None:
    samples = [make_sample(seed, tmp_path) for seed in range(NUM)]
    source = write(tmp_path / "lit", samples, **COMPRESSIONS[compression])
    assert len(list(source.glob("*.bin"))) == 3
    before = read_files(source)
    assert shardio.pack(source, tmp_path / "out", max_shard_samples=9, num_workers=1).num_samples == NUM
    assert read_files(source) == before
    found = read_packed(tmp_path / "out")
    assert len(found) == NUM
    for seed, expected in enumerate(samples):
        sample = found[f"{seed:08d}"]
        assert sample.pop("jpg") == encode(seed)
        assert sample.pop("cls") == str(seed % 3).encode()
        assert sample.pop("depth.png") == encode(seed, suffix="png")
        assert sample.pop("raw.webp" if seed % 2 else "raw.bin") == expected["raw"]
        assert Image.open(io.BytesIO(sample.pop("pixels.png"))).tobytes() == expected["pixels"].tobytes()
        assert sample.pop("notes.json") == b'{"q":  1}'
        assert [sample.pop(f"frames.{i}.jpg") for i in range(2)] == [encode(seed), encode(seed + 1)]
        for name in "array", "vector", "matrix":
            array = np.load(io.BytesIO(sample.pop(f"{name}.npy")))
            assert array.dtype == np.asarray(expected[name]).dtype
            np.testing.assert_array_equal(array, expected[name])
        assert sample.pop("meta.thumb.jpg") == encode(seed + 50)
        assert json.loads(sample.pop("json")) == {
            "caption": f"caption {seed}",
            "good": True,
            "score": seed / 2,
            "meta": {"camera": seed, "boxes": [1, 2.5]},
            "pair": [seed, "x"],
        }
        assert not sample


def test_worker_processes_write_the_same_bytes_and_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    source = write_simple(tmp_path / "lit", **COMPRESSIONS["chunk"])
    shardio.pack(source, tmp_path / "1", num_workers=1, max_shard_samples=4)
    shardio.pack(source, tmp_path / "2", num_workers=2, max_shard_samples=4)
    assert read_files(tmp_path / "1") == read_files(tmp_path / "2")
    shardio.pack(write_simple(tmp_path / "other"), tmp_path / "3", num_workers=1)  # It closes the first one.
    gc.collect()
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # LitData does not close files.
def test_chunks_that_a_loader_decompressed_are_read_in_place(tmp_path: Path) -> None:
    """StreamingDataset replaces the compressed ones by them."""
    source = write_simple(tmp_path / "lit", **COMPRESSIONS["chunk"])
    shardio.pack(source, tmp_path / "expected", num_workers=1)
    dataset = litdata.StreamingDataset(str(source))
    assert dataset[1][1] == 1
    assert (source / "chunk-0-0.bin").exists()
    assert not (source / "chunk-0-0.zstd.bin").exists()
    shardio.pack(source, tmp_path / "out", num_workers=1)
    assert read_files(tmp_path / "out") == read_files(tmp_path / "expected")


def test_samples_may_be_tuples_or_single_images(tmp_path: Path) -> None:
    shardio.pack(write_simple(tmp_path / "pairs"), tmp_path / "1", num_workers=1)
    assert read_packed(tmp_path / "1")["00000004"] == {"jpg": encode(4), "cls": b"1"}
    shardio.pack(write(tmp_path / "images", map(encode, range(9))), tmp_path / "2", num_workers=1)
    assert read_packed(tmp_path / "2")["00000004"] == {"jpg": encode(4)}
    triples = write(tmp_path / "triples", ([encode(i), 7, encode(i + 9)] for i in range(9)))
    shardio.pack(triples, tmp_path / "3", num_workers=1, image_column="2")
    assert read_packed(tmp_path / "3")["00000004"] == {"jpg": encode(13), "0.jpg": encode(4), "json": b'{"1": 7}'}


def test_labels_and_keys_come_from_columns(tmp_path: Path) -> None:
    import torch

    names = ["bee", "ant", "bee", "cow"]
    samples = [
        {"left": encode(i), "kind": name, "at": {"file": f"x/{i}.jpg"}, "number": torch.tensor(i)}
        for i, name in enumerate(names)
    ]
    source = write(tmp_path / "lit", samples, chunk_size=2)
    options: dict[str, Any] = {"key_column": "at.file", "num_workers": 1}
    assert shardio.pack(source, tmp_path / "1", label_column="kind", **options).classes == ("ant", "bee", "cow")
    sample = read_packed(tmp_path / "1")["x/3"]
    assert (sample["jpg"], sample["cls"]) == (encode(3), b"2")
    assert set(sample) == {"jpg", "cls", "number.npy"}
    shardio.pack(source, tmp_path / "2", label_column="number", **options)
    assert read_packed(tmp_path / "2")["x/3"] == {"jpg": encode(3), "cls": b"3", "json": b'{"kind": "cow"}'}


def test_pickles_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "lit", [{"image": encode(1), "extra": {1, 2}}])
    with pytest.raises(PackError, match=r"the value 'extra' of each sample .* it is a pickle, which can run any code"):
        shardio.pack(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_pickle_that_is_called_a_file_is_not_loaded(tmp_path: Path) -> None:
    """LitData takes the serializer that the second part of a format names."""
    source = write(tmp_path / "lit", [{"image": encode(1), "extra": {1, 2}}])
    _edit_the_config(data_format=["bytes", "file:pickle"])(source)
    shardio.pack(source, tmp_path / "out", num_workers=1)
    assert set(read_packed(tmp_path / "out")["00000000"]) == {"jpg", "extra.pickle"}


def test_no_module_that_the_index_names_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "surprise.py").write_text("class Surprise: pass")
    monkeypatch.syspath_prepend(str(tmp_path))
    source = write(tmp_path / "lit", [{"image": encode(1)}])
    spec = json.loads(json.loads((source / "index.json").read_text())["config"]["data_spec"])
    context = {
        "default_factory_module": "surprise",
        "default_factory_name": "Surprise",
        "dict_context": ["image"],
    }
    spec[1] |= {"type": "collections.defaultdict", "context": context}
    _edit_the_config(data_spec=json.dumps(spec))(source)
    with pytest.raises(PackError, match=r"contain a collections\.defaultdict: only dictionaries, lists and tuples"):
        shardio.pack(source, tmp_path / "out")
    assert "surprise" not in sys.modules
    litdata.utilities._pytree.treespec_loads(json.dumps(spec))
    assert "surprise" in sys.modules  # LitData imports it.
    del sys.modules["surprise"]


def test_tokens_and_encrypted_chunks_are_refused(tmp_path: Path) -> None:
    source = write_simple(tmp_path / "lit")
    _edit_the_config(item_loader="TokensLoader")(source)
    with pytest.raises(PackError, match=r"was written for LitData's TokensLoader: only samples of the default"):
        shardio.pack(source, tmp_path / "out")
    _edit_the_config(item_loader="PyTreeLoader", encryption={"algorithm": "fernet", "level": "sample"})(source)
    with pytest.raises(PackError, match=r"is encrypted: decrypt the samples with LitData"):
        shardio.pack(source, tmp_path / "out")


def test_several_splits_are_refused_with_what_to_pack(tmp_path: Path) -> None:
    for name in "train", "test":
        write_simple(tmp_path / "lit" / name, 2)
    with pytest.raises(PackError, match=r"holds the splits train, test: pack each one, such as .*lit/train"):
        shardio.pack(tmp_path / "lit", tmp_path / "out")


def test_an_image_that_cannot_be_decoded_is_left_out_with_its_place(tmp_path: Path) -> None:
    source = write(tmp_path / "lit", ((encode(i)[: 200 if i == 7 else None], 0) for i in range(12)), chunk_size=5)
    assert shardio.pack(source, tmp_path / "out", num_workers=1).num_samples == 11
    (line,) = (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()
    assert json.loads(line)["reason"].startswith("sample 2 of chunk-0-1.bin, field 'jpg': cannot be decoded")


def _cut_a_chunk(source: Path) -> None:
    path = source / "chunk-0-1.bin"
    path.write_bytes(path.read_bytes()[:-9])


def _cut_a_compressed_chunk(source: Path) -> None:
    shutil.rmtree(source)
    path = write_simple(source, **COMPRESSIONS["chunk"]) / "chunk-0-1.zstd.bin"
    path.write_bytes(path.read_bytes()[:-9])


def _change(position: int, xor: int) -> Any:
    def change(source: Path) -> None:
        content = bytearray((source / "chunk-0-1.bin").read_bytes())
        start = int.from_bytes(content[4:8], "little") if position < 0 else position
        content[start] ^= xor
        (source / "chunk-0-1.bin").write_bytes(content)

    return change


def _cut_the_index(source: Path) -> None:
    (source / "index.json").write_text((source / "index.json").read_text()[:-9])


def _edit_the_config(**changes: Any) -> Any:
    def edit(source: Path) -> None:
        index = json.loads((source / "index.json").read_text())
        index["config"] |= changes
        (source / "index.json").write_text(json.dumps(index))

    return edit


def _rename_a_chunk(source: Path) -> None:
    index = json.loads((source / "index.json").read_text())
    index["chunks"][1]["filename"] = "../secret"
    (source / "index.json").write_text(json.dumps(index))


DAMAGES = {
    "a cut chunk": (_cut_a_chunk, r"chunk-0-1\.bin has \d+ bytes, but \d+ according to .*index\.json: download"),
    "a missing chunk": (lambda source: (source / "chunk-0-1.bin").unlink(), r"chunk-0-1\.bin, which .* cannot be read"),
    "a cut compressed chunk": (_cut_a_compressed_chunk, r"chunk-0-1\.zstd\.bin cannot be decompressed: .*Download"),
    "a changed size": (_change(-1, 8), r"sample 0 of chunk-0-1\.bin of .* cannot be read: .*values do not have"),
    "a changed offset": (_change(11, 128), r"sample [01] of chunk-0-1\.bin of .* cannot be read"),
    "a changed number": (_change(0, 1), r"sample 0 of chunk-0-1\.bin of .* header item count \(2\) does not match"),
    "a cut index": (_cut_the_index, r"index\.json cannot be read: .*Download or create it again"),
    "no formats": (_edit_the_config(data_format=None), r"index\.json is invalid: "),
    "too few formats": (_edit_the_config(data_format=["bytes"]), r"data_format does not match data_spec"),
    "an unknown format": (
        _edit_the_config(data_format=["own", "int"]),
        r"'0' of each sample .* the format 'own', which",
    ),
    "a file elsewhere": (_rename_a_chunk, r"names the file '\.\./secret', which is not below"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_dataset_is_an_error_that_says_where(damage: str, tmp_path: Path) -> None:
    source = write_simple(tmp_path / "lit")
    change, message = DAMAGES[damage]
    change(source)
    with pytest.raises(PackError, match=message):
        shardio.pack(source, tmp_path / "out", num_workers=1)
    assert not (tmp_path / "out" / "shardio.json").exists()


def test_a_chunk_that_changed_after_the_scan_is_refused(tmp_path: Path) -> None:
    source, message = write_simple(tmp_path / "lit"), r"chunk-0-1\.bin changed from \d+ to \d+ bytes"
    assert_change_is_refused(source, tmp_path / "out", _cut_a_chunk, message)


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_simple(tmp_path / "lit", 1)
    monkeypatch.setitem(sys.modules, "litdata.streaming.config", None)
    with pytest.raises(PackError, match=r"litdata .*: install it with --no-deps, as docs/packing\.md describes"):
        shardio.pack(source, tmp_path / "out")
