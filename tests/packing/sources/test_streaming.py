"""Datasets written by MosaicML Streaming's ``MDSWriter`` and by LitData's writer, which ``litdata.optimize`` uses."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import sys
from collections.abc import Callable, Iterable
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

import shardio
from shardio.libraries import import_torchvision
from tests.files import read_files
from tests.packing.packs import assert_refused, read_packed
from tests.sources import encode

if find_spec("streaming") is not None:
    import_torchvision()  # Streaming imports it.
streaming = pytest.importorskip("streaming")
litdata = pytest.importorskip("litdata")


def write_mds(folder: Path, columns: dict[str, str], samples: Iterable[Any], **options: Any) -> Path:
    with streaming.MDSWriter(out=str(folder), columns=columns, **{"size_limit": 1 << 16, **options}) as writer:
        for sample in samples:
            writer.write(sample)
    return folder


def write_litdata(folder: Path, samples: Iterable[Any], **options: Any) -> Path:
    from litdata.streaming.writer import BinaryWriter

    folder.mkdir(parents=True)
    writer = BinaryWriter(str(folder), **({"chunk_size": 7} | options))
    for number, sample in enumerate(samples):
        writer[number] = sample
    writer.done()
    writer.merge(1)
    return folder


LITDATA_COMPRESSIONS: dict[str, dict[str, Any]] = {"none": {}} | {
    level: {"compression": "zstd", "compression_level": level} for level in ("batch", "chunk", "sample")
}


def write_simple_mds(folder: Path, num: int = 12, *, compressed: bool = False) -> Path:
    samples = ({"image": encode(i), "label": i % 3} for i in range(num))
    columns = {"image": "jpeg", "label": "int"}
    return write_mds(folder, columns, samples, size_limit=1 << 12, compression="gz" if compressed else None)


def write_simple_litdata(folder: Path, num: int = 12, *, compressed: bool = False) -> Path:
    samples = ((encode(i), i % 3) for i in range(num))
    return write_litdata(folder, samples, chunk_size=3, **LITDATA_COMPRESSIONS["chunk" if compressed else "none"])


class Kind(NamedTuple):
    """A kind of dataset: a function that writes one, the name of its second file, and the package that reads it."""

    write: Callable[..., Path]
    second: str
    compressed: str
    package: str
    install: str


MDS = Kind(write_simple_mds, "shard.00001.mds", "shard.00001.mds.gz", "streaming.base.format", "mosaicml-streaming")
LITDATA = Kind(write_simple_litdata, "chunk-0-1.bin", "chunk-0-1.zstd.bin", "litdata.streaming.config", "litdata")
KINDS = pytest.mark.parametrize("kind", [MDS, LITDATA], ids=["mds", "litdata"])


def make_pixels(seed: int, mode: str = "RGB") -> Image.Image:
    return Image.open(io.BytesIO(encode(seed, suffix="png"))).convert(mode)


def read_pixels(content: bytes) -> tuple[str | None, str, bytes]:
    image = Image.open(io.BytesIO(content))
    return image.format, image.mode, image.tobytes()


NUM = 20
COMMON = {"image": "jpeg", "label": "int", "caption": "str", "depth": "png", "raw": "bytes", "pixels": "pil"}
ONLY_MDS = {"array": "ndarray", "fixed": "ndarray:float32:2,2", "score": "float32", "price": "str_decimal"}
ONLY_MDS |= {"meta": "json", "views": "list[png]", "frames": "jpeg_array"}


def make_common(seed: int) -> dict[str, Any]:
    return {
        "image": encode(seed),
        "label": seed % 3,
        "caption": f"caption {seed}",
        "depth": encode(seed, suffix="png"),
        "raw": encode(seed, suffix="webp") if seed % 2 else b"\0 sound",
        "pixels": make_pixels(seed),
    }


def pop_common(found: dict[str, bytes], expected: dict[str, Any], seed: int) -> None:
    """Compare the fields that both kinds of dataset have, and remove them."""
    assert (found.pop("jpg"), found.pop("cls")) == (expected["image"], str(seed % 3).encode())
    assert found.pop("depth.png") == expected["depth"]
    assert found.pop("raw.webp" if seed % 2 else "raw.bin") == expected["raw"]
    assert read_pixels(found.pop("pixels.png")) == ("PNG", "RGB", expected["pixels"].tobytes())
    for name in ("array", "fixed", "vector", "matrix"):
        if name in expected:
            array = np.load(io.BytesIO(found.pop(f"{name}.npy")))
            assert array.dtype == np.asarray(expected[name]).dtype
            np.testing.assert_array_equal(array, expected[name])


def pack_all(source: Path, out: Path) -> dict[str, dict[str, bytes]]:
    before = read_files(source)
    assert shardio.pack(source, out, max_shard_samples=11, num_workers=1).num_samples == NUM
    assert read_files(source) == before
    found = read_packed(out)
    assert len(found) == NUM
    return found


@pytest.mark.parametrize("compression", [None, "zstd", "gz:1"])
def test_every_sample_of_mds_is_packed_with_its_bytes(compression: str | None, tmp_path: Path) -> None:
    samples = [
        make_common(seed)
        | {"array": np.arange(seed + 1), "fixed": np.full((2, 2), seed, np.float32), "score": seed / 2}
        | {"price": Decimal("1.10"), "meta": {"box": [seed, 2], "name": None}}
        | {"frames": [encode(seed), encode(seed + 1)], "views": [make_pixels(seed + i) for i in range(seed % 3)]}
        for seed in range(NUM)
    ]
    source = write_mds(tmp_path / "in", COMMON | ONLY_MDS, samples, compression=compression)
    assert len(list(source.glob("*.mds*"))) > 2
    found = pack_all(source, tmp_path / "out")
    for seed, expected in enumerate(samples):
        sample = found[f"{seed:08d}"]
        pop_common(sample, expected, seed)
        for i, view in enumerate(expected["views"]):
            assert read_pixels(sample.pop(f"views.{i}.png")) == ("PNG", "RGB", view.tobytes())
        assert [sample.pop(f"frames.{i}.jpg") for i in range(2)] == expected["frames"]
        columns = {"caption": f"caption {seed}", "meta": expected["meta"], "price": "1.10", "score": seed / 2}
        assert json.loads(sample.pop("json")) == columns
        assert not sample


@pytest.mark.parametrize("compression", LITDATA_COMPRESSIONS)
def test_every_sample_of_litdata_is_packed_with_its_bytes(compression: str, tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text('{"q":  1}')
    samples = [
        make_common(seed)
        | {"image": litdata.Jpeg(bytes=encode(seed))}
        | {"depth": litdata.Image(bytes=encode(seed, suffix="png"), path="x.png")}
        | {"frames": litdata.JpegArray(images=[litdata.Jpeg(bytes=encode(seed + i)) for i in range(2)])}
        | {"notes": litdata.File(path=str(tmp_path / "notes.json")), "good": True, "score": seed / 2}
        | {"array": np.arange(6).reshape(2, 3) + seed, "vector": torch.arange(3) + seed}
        | {"matrix": torch.full((2, 2), seed / 2)}
        | {"meta": {"camera": seed, "boxes": [1, 2.5], "thumb": encode(seed + 50)}, "pair": [seed, "x"]}
        for seed in range(NUM)
    ]
    source = write_litdata(tmp_path / "in", samples, **LITDATA_COMPRESSIONS[compression])
    assert len(list(source.glob("*.bin"))) == 3
    found = pack_all(source, tmp_path / "out")
    for seed, expected in enumerate(samples):
        sample = found[f"{seed:08d}"]
        pop_common(sample, expected | {"image": encode(seed), "depth": encode(seed, suffix="png")}, seed)
        assert sample.pop("notes.json") == b'{"q":  1}'
        assert [sample.pop(f"frames.{i}.jpg") for i in range(2)] == [encode(seed), encode(seed + 1)]
        assert sample.pop("meta.thumb.jpg") == encode(seed + 50)
        meta = {"camera": seed, "boxes": [1, 2.5]}
        others = {"caption": f"caption {seed}", "good": True, "score": seed / 2, "meta": meta, "pair": [seed, "x"]}
        assert json.loads(sample.pop("json")) == others
        assert not sample


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # LitData does not close files.
@KINDS
def test_files_that_a_loader_decompressed_are_read_in_place(kind: Kind, tmp_path: Path) -> None:
    source = kind.write(tmp_path / "in", compressed=True)
    shardio.pack(source, tmp_path / "expected", num_workers=1)
    if kind is MDS:
        for number in range(2):
            content = gzip.decompress((source / f"shard.0000{number}.mds.gz").read_bytes())
            cut = content[: -number or None]  # The second file is incomplete.
            (source / f"shard.0000{number}.mds").write_bytes(cut)
        (source / "shard.00000.mds.gz").unlink()
    else:
        dataset = litdata.StreamingDataset(str(source))
        assert dataset[1][1] == 1
        assert (source / "chunk-0-0.bin").exists()
        assert not (source / "chunk-0-0.zstd.bin").exists()
    shardio.pack(source, tmp_path / "out", num_workers=1)
    assert read_files(tmp_path / "out") == read_files(tmp_path / "expected")


@KINDS
def test_the_error_says_what_to_pack_or_to_install(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train", "val"):
        kind.write(tmp_path / "in" / name, 2)
    assert_refused(r"holds the splits train, val: pack each, for example .*in/train", tmp_path / "in")
    monkeypatch.setitem(sys.modules, kind.package, None)
    message = rf"{kind.install} .*: install it with --no-deps, as docs/packing\.md describes"
    assert_refused(message, tmp_path / "in" / "train")


def test_the_disk_must_hold_the_decompressed_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_simple_mds(tmp_path / "mds", compressed=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 0, 100))
    assert_refused(r"only 100 B of free space: set the environment variable TMPDIR", source)


MODES = {"1": "PNG", "L": "PNG", "LA": "PNG", "RGBA": "PNG", "I;16": "PNG", "I": "TIFF", "CMYK": "TIFF"}


def test_raw_pixels_are_stored_without_loss(tmp_path: Path) -> None:
    for mode, name in MODES.items():
        image = make_pixels(1, "I" if mode == "I;16" else mode)
        if mode == "I;16":
            image = Image.fromarray(np.arange(12 * 256, dtype=np.uint16).reshape(12, -1) * 21)
        out = tmp_path / f"out-{mode}"
        source = write_mds(tmp_path / mode, {"x": "pil", "y": "int8"}, [{"x": image, "y": 5}])
        shardio.pack(source, out, num_workers=1, check=False)
        sample = read_packed(out)["00000000"]
        assert read_pixels(sample["png" if name == "PNG" else "tif"]) == (name, mode, image.tobytes())
        assert sample["cls"] == b"5"


NAMES = ["bee", "ant", "bee", "cow"]


def test_labels_and_keys_come_from_columns_of_mds_or_a_file(tmp_path: Path) -> None:
    samples = [{"a": encode(i), "b": encode(9 + i), "kind": name, "file": f"x/{i}.jpg"} for i, name in enumerate(NAMES)]
    source = write_mds(tmp_path / "mds", {"a": "bytes", "b": "bytes", "kind": "str", "file": "str"}, samples)
    assert_refused(r"several columns of .* may hold the images \(a, b\)", source)
    options: dict[str, Any] = {"image_column": "b", "key_column": "file", "label_column": "kind", "num_workers": 1}
    assert shardio.pack(source, tmp_path / "out", **options).classes == ("ant", "bee", "cow")
    assert read_packed(tmp_path / "out")["x/3"] == {"jpg": encode(12), "a.jpg": encode(3), "cls": b"2"}
    (tmp_path / "labels.csv").write_text("key,label\n" + "".join(f"{i:08d},{i + 5}\n" for i in range(4)))
    shardio.pack(source, tmp_path / "2", labels=tmp_path / "labels.csv", image_column="a", num_workers=1)
    assert read_packed(tmp_path / "2")["00000003"]["cls"] == b"8"


def test_labels_and_keys_come_from_values_of_litdata(tmp_path: Path) -> None:
    samples = [
        {"left": encode(i), "kind": name, "at": {"file": f"x/{i}.jpg"}, "number": torch.tensor(i)}
        for i, name in enumerate(NAMES)
    ]
    source = write_litdata(tmp_path / "in", samples, chunk_size=2)
    options: dict[str, Any] = {"key_column": "at.file", "num_workers": 1}
    assert shardio.pack(source, tmp_path / "1", label_column="kind", **options).classes == ("ant", "bee", "cow")
    sample = read_packed(tmp_path / "1")["x/3"]
    assert (sample["jpg"], sample["cls"]) == (encode(3), b"2")
    assert set(sample) == {"jpg", "cls", "number.npy"}
    shardio.pack(source, tmp_path / "2", label_column="number", **options)
    assert read_packed(tmp_path / "2")["x/3"] == {"jpg": encode(3), "cls": b"3", "json": b'{"kind": "cow"}'}


def test_samples_of_litdata_may_be_tuples_or_single_images(tmp_path: Path) -> None:
    triples = write_litdata(tmp_path / "triples", ([encode(i), 7, encode(i + 9)] for i in range(9)))
    for source, column, expected in (
        (write_simple_litdata(tmp_path / "pairs"), None, {"jpg": encode(4), "cls": b"1"}),
        (write_litdata(tmp_path / "images", map(encode, range(9))), None, {"jpg": encode(4)}),
        (triples, "2", {"jpg": encode(13), "0.jpg": encode(4), "json": b'{"1": 7}'}),
    ):
        shardio.pack(source, tmp_path / f"{source.name}-out", num_workers=1, image_column=column)
        assert read_packed(tmp_path / f"{source.name}-out")["00000004"] == expected


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Streaming does not close files.
def test_merged_datasets_are_packed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_simple_mds(tmp_path / "mds" / name, 5, compressed=name == "b")
    streaming.base.util.merge_index(str(tmp_path / "mds"))
    assert shardio.pack(tmp_path / "mds", tmp_path / "out", num_workers=1).num_samples == 10
    found = read_packed(tmp_path / "out")
    assert [found[f"{row:08d}"]["jpg"] for row in range(10)] == [encode(seed) for seed in (*range(5), *range(5))]


def test_columns_of_mds_that_cannot_be_fields_are_refused(tmp_path: Path) -> None:
    with streaming.JSONWriter(out=str(tmp_path / "json"), columns={"text": "str"}) as writer:
        writer.write({"text": "x"})
    edit("shards", 0, column_encodings=["str"])(tmp_path / "json")
    image, pickled = encode(1), {"image": encode(1), "extra": {1, 2}}
    write_mds(tmp_path / "pickles", {"image": "jpeg", "extra": "pkl"}, [pickled])
    write_mds(tmp_path / "case", {"a": "bytes", "A": "bytes"}, [{"a": b"1", "A": b"2"}])
    write_mds(tmp_path / "slash", {"image": "jpeg", "a/b": "bytes"}, [{"image": image, "a/b": image}])
    for name, column, message in (
        ("json", None, r"shard 0 in .*index\.json has the format 'json', version 2: only MDS"),
        ("pickles", None, r"the column 'extra' of .* holds pickles, which can run arbitrary code"),
        ("case", "a", r"differ only in case \(A, a\)"),
        ("slash", None, r"sample 0 of shard.00000.mds .* the field name 'a/b\.jpg' .* contains a slash"),
    ):
        assert_refused(message, tmp_path / name, image_column=column, num_workers=1)


def test_pickles_of_litdata_are_refused_or_not_loaded(tmp_path: Path) -> None:
    source = write_litdata(tmp_path / "in", [{"image": encode(1), "extra": {1, 2}}])
    assert_refused(r"the value 'extra' of each sample .* it is a pickle, which can run arbitrary code", source)
    edit("config", data_format=["bytes", "file:pickle"])(source)  # The second part is the serializer's name.
    shardio.pack(source, tmp_path / "out", num_workers=1)
    assert set(read_packed(tmp_path / "out")["00000000"]) == {"jpg", "extra.pickle"}


def test_no_module_that_the_index_names_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "surprise.py").write_text("class Surprise: pass")
    monkeypatch.syspath_prepend(str(tmp_path))
    source = write_litdata(tmp_path / "in", [{"image": encode(1)}])
    spec = json.loads(json.loads((source / "index.json").read_text())["config"]["data_spec"])
    named = {"default_factory_module": "surprise", "default_factory_name": "Surprise", "dict_context": ["image"]}
    spec[1] |= {"type": "collections.defaultdict", "context": named}
    edit("config", data_spec=json.dumps(spec))(source)
    assert_refused(r"contain a collections\.defaultdict: only dictionaries, lists and tuples", source)
    assert "surprise" not in sys.modules
    litdata.utilities._pytree.treespec_loads(json.dumps(spec))
    assert "surprise" in sys.modules  # LitData imports it.
    del sys.modules["surprise"]


def cut(name: str, num_bytes: int = 9) -> Callable[[Path], object]:
    return lambda source: (source / name).write_bytes((source / name).read_bytes()[:-num_bytes])


def cut_compressed_mds(source: Path) -> None:
    shutil.rmtree(source)
    cut(MDS.compressed, 30)(write_simple_mds(source, compressed=True))
    index = json.loads((source / "index.json").read_text())
    index["shards"][1]["zip_data"]["bytes"] = (source / MDS.compressed).stat().st_size
    (source / "index.json").write_text(json.dumps(index))


def cut_compressed_litdata(source: Path) -> None:
    shutil.rmtree(source)
    cut(LITDATA.compressed)(write_simple_litdata(source, compressed=True))


def change(name: str, position: int, xor: int) -> Callable[[Path], None]:
    """Change one byte of a file. Position -1 is the lowest byte of the size of the first sample's image."""

    def apply(source: Path) -> None:
        content = bytearray((source / name).read_bytes())
        content[int.from_bytes(content[4:8], "little") if position < 0 else position] ^= xor
        (source / name).write_bytes(content)

    return apply


def edit(*place: Any, **changes: Any) -> Callable[[Path], None]:
    """Change values of the index. None removes a value from the description of a shard."""

    def apply(source: Path) -> None:
        index = json.loads((source / "index.json").read_text())
        part = index
        for name in place:
            part = part[name]
        part |= changes
        for name in [name for name, value in changes.items() if value is None and place[0] == "shards"]:
            del part[name]
        (source / "index.json").write_text(json.dumps(index))

    return apply


DAMAGES: dict[str, tuple[Kind, Callable[[Path], Any], str]] = {
    "a cut shard": (MDS, cut(MDS.second), r"00001\.mds has \d+ bytes, but \d+ according to .*index\.json: download"),
    "no shard": (MDS, lambda source: (source / MDS.second).unlink(), r"00001\.mds, which .* cannot be read"),
    "a cut compressed shard": (MDS, cut_compressed_mds, r"shard\.00001\.mds\.gz cannot be decompressed: .*Download"),
    "a size": (MDS, change(MDS.second, -1, 8), r"00001\.mds cannot be read: .*columns of sample 0 do not have \d+ b"),
    "a size, labeled": (MDS, change(MDS.second, -1, 8), r"sample 0 of shard\.00001\.mds of .* cannot be read: .*do no"),
    "an offset": (MDS, change(MDS.second, 11, 128), r"00001\.mds cannot be read: .*positions of its samples are inval"),
    "a cut index": (MDS, cut("index.json"), r"index\.json cannot be read: .*Download or create it again"),
    "no raw_data": (MDS, edit("shards", 1, raw_data=None), r"index\.json is invalid: it has no 'raw_data'"),
    "no sizes": (MDS, edit("shards", 1, column_sizes=None), r"shard 1 in .*index\.json is invalid: TypeError"),
    "other columns": (MDS, edit("shards", 1, column_encodings=["png", "int"]), r"s 0 and 1 in .* different columns"),
    "unknown columns": (MDS, edit("shards", 1, column_encodings="x"), r"different columns"),
    "a file elsewhere": (
        MDS,
        edit("shards", 1, raw_data={"basename": "../secret", "bytes": 1, "hashes": {}}),
        r"names the file '\.\./secret', which is not below",
    ),
    "a cut chunk": (LITDATA, cut(LITDATA.second), r"1\.bin has \d+ bytes, but \d+ according to .*index\.json: down"),
    "no chunk": (LITDATA, lambda source: (source / LITDATA.second).unlink(), r"-0-1\.bin, which .* cannot be read"),
    "a cut compressed chunk": (LITDATA, cut_compressed_litdata, r"-1\.zstd\.bin cannot be decompressed: .*Download"),
    "a chunk's size": (LITDATA, change(LITDATA.second, -1, 8), r"sample 0 of chunk-0-1\.bin of .*values do not have"),
    "a chunk's offset": (LITDATA, change(LITDATA.second, 11, 128), r"sample [01] of chunk-0-1\.bin of .* cannot be r"),
    "a chunk's number": (LITDATA, change(LITDATA.second, 0, 1), r"-1\.bin of .* item count \(2\) does not match"),
    "LitData's cut index": (LITDATA, cut("index.json"), r"index\.json cannot be read: .*Download or create it again"),
    "no formats": (LITDATA, edit("config", data_format=None), r"index\.json is invalid: "),
    "few formats": (LITDATA, edit("config", data_format=["bytes"]), r"data_format does not match data_spec"),
    "an unknown format": (LITDATA, edit("config", data_format=["own", "int"]), r"'0' of each .* format 'own', which"),
    "a chunk elsewhere": (LITDATA, edit("chunks", 1, filename="../secret"), r"the file '\.\./secret', which is not b"),
    "tokens": (LITDATA, edit("config", item_loader="TokensLoader"), r"LitData's TokensLoader: only samples of the def"),
    "encryption": (LITDATA, edit("config", encryption={"algorithm": "x"}), r"is encrypted: decrypt the samples with"),
}


@pytest.mark.parametrize(("kind", "damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_dataset_is_an_error_that_says_where(
    kind: Kind, damage: Callable[[Path], object], message: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source, labels = kind.write(tmp_path / "in"), tmp_path / "labels.csv"
    damage(source)
    labels.write_text("key,label\n" + "".join(f"{row:08d},1\n" for row in range(12)))
    assert_refused(message, source, num_workers=1, labels=labels if "labeled" in request.node.name else None)
