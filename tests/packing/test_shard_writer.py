"""ShardWriter stores what it is given, as a pack would, and refuses what readers would read differently."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

import shardio
from shardio.errors import FormatError, PackError
from shardio.packing.names import KeyHashes
from shardio.shards import open_table
from tests.files import files_of_at_most, read_files
from tests.sources import encode, write_images
from tests.tars import read_members, read_with_webdataset

PIXELS = np.arange(24 * 16 * 3, dtype=np.uint8).reshape(24, 16, 3)


def write_all(out: Path, samples: list[dict[str, Any]], **options: Any) -> shardio.Manifest:
    with shardio.ShardWriter(out, **options) as writer:
        for sample in samples:
            writer.write(sample)
    assert writer.manifest is not None
    return writer.manifest


def test_webdataset_and_shardio_read_back_what_was_written(tmp_path: Path) -> None:
    samples = [
        {"__key__": f"d/{i}", "jpg": encode(i), "cls": i % 2, "json": {"i": i}, "txt": f"ü {i}"} for i in range(10)
    ]
    manifest = write_all(tmp_path / "out", samples, max_shard_samples=4, classes=["cat", "dog"])
    assert [entry.num_samples for entry in manifest.shards] == [4, 4, 2]
    assert (manifest.fields, manifest.classes) == (("cls", "jpg", "json", "txt"), ("cat", "dog"))
    found = read_with_webdataset(*sorted((tmp_path / "out").glob("*.tar")))
    assert found == [
        (
            f"d/{i}",
            {"cls": b"%d" % (i % 2), "jpg": encode(i), "json": b'{"i": %d}' % i, "txt": f"ü {i}".encode()},
        )
        for i in range(10)
    ]
    assert shardio.verify(tmp_path / "out") == []
    with shardio.open(tmp_path / "out") as opened:
        assert opened["d/7"]["jpg"] == encode(7)


@pytest.mark.parametrize("limits", [{"max_shard_samples": 5}, {"max_shard_size": 9000}, {"max_shard_size": 1}])
def test_the_shards_equal_those_of_a_pack(tmp_path: Path, limits: dict[str, Any]) -> None:
    contents = write_images(tmp_path / "in")
    packed = shardio.pack(tmp_path / "in", tmp_path / "packed", shuffle_seed=None, **limits)
    samples = [{"__key__": key, "jpg": contents[key], "cls": key.partition("/")[0]} for key in sorted(contents)]
    written = write_all(tmp_path / "written", samples, classes=packed, **limits)
    assert (written.shards, written.fields, written.classes) == (packed.shards, packed.fields, packed.classes)
    packed_files, written_files = read_files(tmp_path / "packed"), read_files(tmp_path / "written")
    assert packed_files.keys() == written_files.keys()
    assert {n for n in packed_files if packed_files[n] != written_files[n]} == {"shardio.json"}  # Its settings differ.


def test_values_are_encoded_by_the_last_suffix(tmp_path: Path) -> None:
    array = np.array([[1.5, -2.0]], np.float32)
    sample: dict[str, Any] = {
        "__key__": "a",
        "__url__": "ignored",
        "jpg": PIXELS,
        "seg.png": PIXELS[:, :, 0],
        "flow.png": PIXELS.astype(np.uint16) * 257,
        "webp": PIXELS,
        "left.npy": array,
        "cls": np.int64(3),
        "json": {"ä": [1, None]},
        "bin": memoryview(b"raw"),
        "pkl": b"as it is",
    }
    write_all(tmp_path / "out", [sample], quality=80)
    fields = {name.partition(".")[2]: content for name, content in read_members(tmp_path / "out" / "shard-000000.tar")}
    expected = io.BytesIO()
    Image.fromarray(PIXELS).save(expected, "JPEG", quality=80)
    assert fields["jpg"] == expected.getvalue()
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(fields["seg.png"]))), PIXELS[:, :, 0])
    flow: Any = cv2.imdecode(np.frombuffer(fields["flow.png"], np.uint8), cv2.IMREAD_UNCHANGED)
    assert flow.dtype == np.uint16
    assert np.array_equal(flow[..., ::-1], sample["flow.png"])
    assert Image.open(io.BytesIO(fields["webp"])).format == "WEBP"
    assert np.array_equal(np.load(io.BytesIO(fields["left.npy"])), array)
    assert json.loads(fields["json"]) == {"ä": [1, None]}
    assert (fields["cls"], fields["bin"], fields["pkl"]) == (b"3", b"raw", b"as it is")
    assert len(fields) == 9


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        (
            {"jpg": PIXELS.astype(np.float32)},
            TypeError,
            r"'jpg'.*ndarray of float32 \[24, 16, 3\].*pass an array, uint8",
        ),
        ({"jpg": PIXELS.astype(np.uint16)}, TypeError, r"'jpg'.*uint16 \[24, 16, 3\].*pass an array, uint8"),
        ({"jpg": PIXELS[:, :, 0]}, TypeError, r"uint8 \[24, 16\]"),
        ({"cls": True}, TypeError, "'cls'.*bool.*integer"),
        ({"cls": 1.0}, TypeError, "'cls'.*float"),
        ({"cls": -1}, ValueError, "at least 0"),
        ({"cls": "cat"}, TypeError, "classes="),
        ({"json": {1, 2}}, TypeError, "'json'.*set"),
        ({"txt": 5}, TypeError, "'txt'.*int.*pass a string"),
        ({"npy": np.array([{}])}, TypeError, "without Python objects"),
        ({"x.pkl": {}}, TypeError, "can run any code"),
        ({"mp3": "text"}, TypeError, "'mp3'.*str.*pass bytes"),
        ({"JPG": b""}, ValueError, "use 'jpg'"),
        ({"a/b": b""}, ValueError, "slash"),
        ({"": b""}, ValueError, "empty"),
        ({3: b""}, TypeError, "must be strings"),
        ({}, ValueError, "no fields"),
    ],
)
def test_a_field_that_cannot_be_stored_is_refused_and_the_writer_goes_on(
    tmp_path: Path, fields: dict[Any, Any], kind: type[Exception], message: str
) -> None:
    with shardio.ShardWriter(tmp_path / "out") as writer:
        with pytest.raises(kind, match=message):
            writer.write({"__key__": "a/1", **fields})
        writer.write({"__key__": "a/2", "txt": "x"})
    assert [name for name, _ in read_members(tmp_path / "out" / "shard-000000.tar")] == ["a/2.txt"]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("a.b", "use 'a_b'"),
        ("d.d/a.b", "use 'd.d/a_b'"),
        ("", "empty"),
        ("a/", "ends in a slash"),
        ("a\nb", "control character"),
        ("a\udc80", "surrogate"),
        ("/a", "relative path"),
        ("a/../b", "relative path"),
        ("__meta__/a", "skip"),
        (7, "must be a string"),
    ],
)
def test_a_key_that_readers_would_change_is_refused(tmp_path: Path, key: Any, message: str) -> None:
    with shardio.ShardWriter(tmp_path / "out") as writer:
        writer.write({"__key__": "d.d/ü 1", "txt": ""})
        with pytest.raises((ValueError, TypeError), match=message):
            writer.write({"__key__": key, "txt": ""})
        with pytest.raises(ValueError, match="needs '__key__'"):
            writer.write({"txt": ""})


def test_a_repeated_key_is_refused_with_both_places(tmp_path: Path) -> None:
    with shardio.ShardWriter(tmp_path / "out", max_shard_samples=2) as writer:
        for i in range(5):
            writer.write({"__key__": f"k{i}", "txt": "x"})
        with pytest.raises(PackError, match=r"'k1' of sample 5 .* sample 1 in .*shard-000000\.tar"):
            writer.write({"__key__": "k1", "txt": "y"})
        with pytest.raises(PackError, match=r"'k4' of sample 5 .* sample 0 in .*shard-000002\.tar"):
            writer.write({"__key__": "k4", "txt": "y"})
    assert shardio.verify(tmp_path / "out") == []


def test_sets_of_hashes_equal_pythons() -> None:
    random = np.random.default_rng(0)
    values = np.concatenate([random.integers(0, 2**64, 3000, np.uint64), random.integers(1, 400, 1000, np.uint64)])
    hashes, expected = KeyHashes(), set[int]()
    for value in values.tolist():
        assert hashes.add(value) == (value not in expected)
        expected.add(value)
    assert len(hashes) == len(expected)


def write_and_raise(out: Path, num_samples: int) -> None:
    with shardio.ShardWriter(out, max_shard_samples=2) as writer:
        for i in range(num_samples):
            writer.write({"__key__": str(i), "txt": "x"})
        raise ZeroDivisionError


def test_a_block_that_raises_leaves_finished_shards_that_readers_refuse(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ZeroDivisionError):
        write_and_raise(out, 5)
    names = {"shard-000000.tar", "shard-000000.tar.idx", "shard-000001.tar", "shard-000001.tar.idx"}
    assert {name for name in read_files(out) if not name.startswith(".")} == names
    with pytest.raises(FormatError, match="unfinished"):
        open_table(out)
    with pytest.raises(PackError, match=r"unfinished.*--overwrite"), shardio.ShardWriter(out):
        pass
    write_images(tmp_path / "in", classes=1, per_class=1)
    with pytest.raises(PackError, match="unfinished pack of different images"):
        shardio.pack(tmp_path / "in", out)
    write_all(out, [{"__key__": "a", "txt": "x"}], overwrite=True)
    assert set(read_files(out)) == {"shard-000000.tar", "shard-000000.tar.idx", "shardio.json"}


def test_a_block_that_raises_before_a_shard_is_finished_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        write_and_raise(tmp_path / "out", 1)
    with pytest.raises(PackError, match="no samples"), shardio.ShardWriter(tmp_path / "out"):
        pass
    assert not (tmp_path / "out").exists()


def test_a_write_that_fails_ends_the_dataset(tmp_path: Path) -> None:
    """Even if the program ignores the error."""
    errors = list[Exception]()

    def write_too_much() -> None:
        with files_of_at_most(3 * 2**20), shardio.ShardWriter(tmp_path / "out") as writer:
            for i in range(9):
                try:
                    writer.write({"__key__": str(i), "bin": bytes(2**20)})
                except (OSError, PackError) as error:  # noqa: PERF203  # Programs do this.
                    errors.append(error)

    with pytest.raises(PackError, match="an earlier write"):
        write_too_much()
    assert isinstance(errors[0], OSError)
    assert errors[0].filename == str(tmp_path / "out" / "shard-000000.tar")
    assert {type(error) for error in errors[1:]} == {PackError}
    assert not (tmp_path / "out").exists()


def test_a_directory_with_anything_in_it_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_all(out, [{"__key__": "a", "txt": "x"}])
    with pytest.raises(PackError, match=r"is not empty.*overwrite=True"), shardio.ShardWriter(out):
        pass
    before = read_files(out)
    (out / "notes.txt").write_text("mine")
    for overwrite in False, True:
        with (
            pytest.raises(PackError, match=r"notes\.txt, which shardio did not write"),
            shardio.ShardWriter(out, overwrite=overwrite),
        ):
            pass
    (out / "notes.txt").unlink()
    assert read_files(out) == before


def test_two_writers_exclude_each_other(tmp_path: Path) -> None:
    with shardio.ShardWriter(tmp_path / "out") as writer:
        with pytest.raises(PackError, match="another process"), shardio.ShardWriter(tmp_path / "out"):
            pass
        writer.write({"__key__": "a", "txt": "x"})
    assert shardio.verify(tmp_path / "out") == []


def test_webdatasets_arguments_are_accepted(tmp_path: Path) -> None:
    samples = [{"__key__": str(i), "txt": "x"} for i in range(4)]
    assert len(write_all(tmp_path / "a", samples, maxcount=1, maxsize=3e9).shards) == 4
    with pytest.raises(ValueError, match="only one of them"):
        shardio.ShardWriter(tmp_path / "b", maxcount=1, max_shard_samples=1)
    with pytest.raises(ValueError, match="must be a directory"):
        shardio.ShardWriter(tmp_path / "b" / "shard-%06d.tar")
    with pytest.raises(ValueError, match="256MiB"):
        shardio.ShardWriter(tmp_path / "b", max_shard_size="big")
    with pytest.raises(RuntimeError, match="context manager"):
        shardio.ShardWriter(tmp_path / "b").write({"__key__": "a", "txt": "x"})


def test_the_program_may_change_its_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with shardio.ShardWriter("out") as writer:
        monkeypatch.chdir("/")
        writer.write({"__key__": "a", "txt": "x"})
    assert shardio.verify(tmp_path / "out") == []


def remove_while_writing(out: Path) -> None:
    with shardio.ShardWriter(out) as writer:
        writer.write({"__key__": "a", "txt": "x"})
        shutil.rmtree(out)


def test_a_directory_that_is_removed_meanwhile_is_an_error(tmp_path: Path) -> None:
    with pytest.raises((PackError, OSError)):
        remove_while_writing(tmp_path / "out")
    assert not (tmp_path / "out" / "shardio.json").exists()
