"""ShardWriter, and ``shardio.pack`` of an iterable, store the same shards as other packs, and reject bad samples."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

import shardio
from shardio.errors import FormatError, PackError
from shardio.images.jpeg import has_tiles
from shardio.packing.samples import KeyHashes
from shardio.shards import UNFINISHED_NAME, open_table
from shardio.storage import Location, parse_location
from tests.files import files_of_at_most, read_files, read_objects
from tests.packing.packs import assert_refused, read_packed, write_all
from tests.processes import forkserver_context
from tests.raising import assert_raises
from tests.sources import encode, write_images
from tests.tars import read_members, read_with_webdataset

PIXELS = np.arange(24 * 16 * 3, dtype=np.uint8).reshape(24, 16, 3)
ONE = [{"__key__": "a", "txt": "x"}]


@pytest.fixture(params=["directory", "object store"])
def out(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """A new directory, or a new folder in an object store."""
    return parse_location(tmp_path / "out" if request.param == "directory" else f"memory://{uuid.uuid4().hex}/a/train")


def test_webdataset_and_shardio_read_back_what_was_written(tmp_path: Path) -> None:
    samples = [
        {"__key__": f"d/{i}", "jpg": encode(i), "cls": i % 2, "json": {"i": i}, "txt": f"ü {i}"} for i in range(10)
    ]
    manifest = write_all(tmp_path / "out", samples, max_shard_samples=4, classes=["cat", "dog"])
    assert [entry.num_samples for entry in manifest.shards] == [4, 4, 2]
    assert (manifest.fields, manifest.classes) == (("cls", "jpg", "json", "txt"), ("cat", "dog"))
    found = read_with_webdataset(*sorted((tmp_path / "out").glob("*.tar")))
    assert found == [
        (f"d/{i}", {"cls": b"%d" % (i % 2), "jpg": encode(i), "json": b'{"i": %d}' % i, "txt": f"ü {i}".encode()})
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
    images = {"jpg": PIXELS, "webp": PIXELS, "seg.png": PIXELS[:, :, 0], "flow.png": PIXELS.astype(np.uint16) * 257}
    others = {"left.npy": array, "cls": np.int64(3), "json": {"ä": [1, None]}, "bin": memoryview(b"raw"), "pkl": b"x"}
    sample: dict[str, Any] = {"__key__": "a", "__url__": "ignored", **images, **others}
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
    assert (fields["cls"], fields["bin"], fields["pkl"], len(fields)) == (b"3", b"raw", b"x", 9)


KEYS: dict[Any, str] = {"a.b": "use 'a_b'", "d.d/a.b": "use 'd.d/a_b'", "": "empty", "a/": "ends in a slash"}
KEYS |= {"a\nb": "control character", "a\udc80": "surrogate", "/a": "relative path", "a/../b": "relative path"}
KEYS |= {"__meta__/a": "skip", 7: "must be a string"}

REFUSED: list[tuple[dict[Any, Any], Any, str]] = [
    ({"jpg": PIXELS.astype(np.float32)}, TypeError, r"'jpg'.*ndarray of float32 \[24, 16, 3\].*an array, uint8"),
    ({"jpg": PIXELS.astype(np.uint16)}, TypeError, r"'jpg'.*uint16 \[24, 16, 3\].*pass an array, uint8"),
    ({"jpg": PIXELS[:, :, 0]}, TypeError, r"uint8 \[24, 16\]"),
    ({"cls": True}, TypeError, "'cls'.*bool.*integer"),
    ({"cls": 1.0}, TypeError, "'cls'.*float"),
    ({"cls": -1}, ValueError, "at least 0"),
    ({"cls": "cat"}, TypeError, "classes="),
    ({"json": {1, 2}}, TypeError, "'json'.*set"),
    ({"txt": 5}, TypeError, "'txt'.*int.*pass a string"),
    ({"npy": np.array([{}])}, TypeError, "without Python objects"),
    ({"x.pkl": {}}, TypeError, "can run arbitrary code"),
    ({"mp3": "text"}, TypeError, "'mp3'.*str.*pass bytes"),
    ({"JPG": b""}, ValueError, "use 'jpg'"),
    ({"a/b": b""}, ValueError, "slash"),
    ({"": b""}, ValueError, "empty"),
    ({3: b""}, TypeError, "must be strings"),
    ({}, ValueError, "no fields"),
    *(({"__key__": key, "txt": ""}, (ValueError, TypeError), message) for key, message in KEYS.items()),
]


@pytest.mark.parametrize(("fields", "kind", "message"), REFUSED)
def test_a_sample_that_readers_would_change_is_refused(
    tmp_path: Path, fields: dict[Any, Any], kind: Any, message: str
) -> None:
    with shardio.ShardWriter(tmp_path / "out") as writer:
        assert_raises(kind, message, writer.write, {"__key__": "a/1", **fields})
        assert_raises(ValueError, "needs '__key__'", writer.write, {"txt": ""})
        writer.write({"__key__": "d.d/ü 2", "txt": "x"})
    assert [name for name, _ in read_members(tmp_path / "out" / "shard-000000.tar")] == ["d.d/ü 2.txt"]


def test_a_repeated_key_is_refused_with_both_places(tmp_path: Path) -> None:
    with shardio.ShardWriter(tmp_path / "out", max_shard_samples=2) as writer:
        for i in range(5):
            writer.write({"__key__": f"k{i}", "txt": "x"})
        for key, place in (("k1", r"sample 1 in .*shard-000000\.tar"), ("k4", r"sample 0 in .*shard-000002\.tar")):
            assert_raises(PackError, rf"'{key}' of sample 5 .* {place}", writer.write, {"__key__": key, "txt": "y"})
    assert shardio.verify(tmp_path / "out") == []


def test_sets_of_hashes_equal_pythons() -> None:
    random = np.random.default_rng(0)
    values = np.concatenate([random.integers(0, 2**64, 3000, np.uint64), random.integers(1, 400, 1000, np.uint64)])
    hashes, expected = KeyHashes(), set[int]()
    for value in values.tolist():
        assert hashes.add(value) == (value not in expected)
        expected.add(value)
    assert len(hashes) == len(expected)


def samples_and_error(num_samples: int) -> Iterator[dict[str, Any]]:
    yield from ({"__key__": str(i), "txt": "x"} for i in range(num_samples))
    raise ZeroDivisionError


def test_a_block_that_raises_leaves_finished_shards_that_readers_refuse(out: Location, tmp_path: Path) -> None:
    assert_raises(ZeroDivisionError, None, write_all, out, samples_and_error(1), max_shard_samples=2)
    assert_raises(PackError, "no samples", write_all, out, [])
    assert not out.is_folder()
    assert_raises(ZeroDivisionError, None, write_all, out, samples_and_error(5), max_shard_samples=2)
    shards = [f"shard-00000{number}.tar{suffix}" for number in range(2) for suffix in ("", ".idx")]
    assert sorted(out.list()) == [UNFINISHED_NAME, *shards]
    assert_raises(FormatError, "unfinished", open_table, str(out))
    assert_raises(PackError, r"unfinished.*--overwrite", write_all, out, [])
    write_images(tmp_path / "in", classes=1, per_class=1)
    assert_refused("unfinished pack of different images", tmp_path / "in", str(out))
    write_all(out, ONE, overwrite=True)
    assert sorted(out.list()) == ["shard-000000.tar", "shard-000000.tar.idx", "shardio.json"]


def test_a_write_that_fails_ends_the_dataset(tmp_path: Path) -> None:
    errors = list[Exception]()

    def write_too_much() -> None:
        with files_of_at_most(3 * 2**20), shardio.ShardWriter(tmp_path / "out") as writer:
            for i in range(9):
                try:
                    writer.write({"__key__": str(i), "bin": bytes(2**20)})
                except (OSError, PackError) as error:  # noqa: PERF203  # Programs do this.
                    errors.append(error)

    assert_raises(PackError, "an earlier write", write_too_much)
    assert isinstance(errors[0], OSError)
    assert errors[0].filename == str(tmp_path / "out" / "shard-000000.tar")
    assert {type(error) for error in errors[1:]} == {PackError}
    assert not (tmp_path / "out").exists()


def test_a_directory_with_anything_in_it_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_all(out, ONE)
    assert_raises(PackError, r"is not empty.*overwrite=True", write_all, out, [])
    before = read_files(out)
    (out / "notes.txt").write_text("mine")
    for overwrite in False, True:
        message = r"notes\.txt, which shardio did not write"
        assert_raises(PackError, message, write_all, out, [], overwrite=overwrite)
    (out / "notes.txt").unlink()
    assert read_files(out) == before


def test_two_writers_exclude_each_other_in_any_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with shardio.ShardWriter("out") as writer:
        assert_raises(PackError, "another process", write_all, Path("out"), ONE)
        monkeypatch.chdir("/")
        writer.write({"__key__": "a", "txt": "x"})
    assert shardio.verify(tmp_path / "out") == []


def test_webdatasets_arguments_are_accepted(tmp_path: Path) -> None:
    samples = [{"__key__": str(i), "txt": "x"} for i in range(4)]
    assert len(write_all(tmp_path / "a", samples, maxcount=1, maxsize=3e9).shards) == 4
    assert_raises(ValueError, "only one of them", shardio.ShardWriter, tmp_path / "b", maxcount=1, max_shard_samples=1)
    assert_raises(ValueError, "must be a directory", shardio.ShardWriter, tmp_path / "b" / "shard-%06d.tar")
    assert_raises(ValueError, "256MiB", shardio.ShardWriter, tmp_path / "b", max_shard_size="big")
    assert_raises(RuntimeError, "context manager", shardio.ShardWriter(tmp_path / "b").write, ONE[0])


def test_a_directory_that_is_removed_meanwhile_is_an_error(tmp_path: Path) -> None:
    def write_and_remove() -> Iterator[dict[str, Any]]:
        yield ONE[0]
        shutil.rmtree(tmp_path / "out")

    assert_raises((PackError, OSError), None, write_all, tmp_path / "out", write_and_remove())
    assert not (tmp_path / "out" / "shardio.json").exists()


SAMPLES = [{"__key__": f"x/{i:02d}", "jpg": encode(i), "cls": "bee" if i % 2 else "ant"} for i in range(20)]


class OnlyIndexed:
    """A map-style dataset that has a length but does not raise IndexError at the end."""

    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return SAMPLES[number % len(SAMPLES)]


@pytest.mark.parametrize("make", [lambda: SAMPLES, lambda: iter(SAMPLES), OnlyIndexed], ids=["list", "iterator", "map"])
def test_an_iterable_is_packed_in_its_order_as_a_writer_would(make: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_shard_samples": 7, "classes": ["ant", "bee"]}
    manifest = shardio.pack(make(), tmp_path / "out", **options)
    write_all(tmp_path / "written", SAMPLES, **options)
    found, written = read_files(tmp_path / "out"), read_files(tmp_path / "written")
    assert found.keys() == written.keys()
    assert {name for name in found if found[name] != written[name]} == {"shardio.json"}  # Its settings differ.
    assert manifest.classes == ("ant", "bee")
    assert list(read_packed(tmp_path / "out")) == [sample["__key__"] for sample in SAMPLES]


def test_samples_are_numbered_checked_and_tiled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    photo = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    samples: list[dict[str, Any]] = [
        {"jpg": photo, "json": {"made": True}},
        {"jpg": encode(1)[:300], "cls": 1},
        {"jpg": encode(2, width=96, height=64), "cls": 2},
    ]
    with caplog.at_level(logging.WARNING):
        manifest = shardio.pack(samples, tmp_path / "out", jpeg="tile")
    assert manifest.pack["num_tiled"] == 2
    found = read_packed(tmp_path / "out")
    assert set(found) == {"00000000", "00000002"}
    assert all(has_tiles(sample["jpg"]) for sample in found.values())
    (line,) = (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()
    assert (json.loads(line)["key"], json.loads(line)["file"]) == ("00000001", "00000001.jpg")
    assert "00000001.jpg cannot be decoded" in caplog.text


def test_images_are_converted(tmp_path: Path) -> None:
    shardio.pack([{"image": encode(1, suffix="bmp")}], tmp_path / "out", convert_to="png")
    (sample,) = read_packed(tmp_path / "out").values()
    assert Image.open(io.BytesIO(sample["png"])).format == "PNG"


def test_an_interrupted_call_starts_again(out: Location, tmp_path: Path) -> None:
    def interrupted() -> Iterator[dict[str, Any]]:
        yield from SAMPLES[:15]
        raise KeyboardInterrupt

    options: dict[str, Any] = {"max_shard_samples": 4, "classes": ["ant", "bee"]}
    assert_raises(KeyboardInterrupt, None, shardio.pack, interrupted(), str(out), **options)
    assert UNFINISHED_NAME in out.list()
    assert_raises((shardio.FormatError, FileNotFoundError), None, shardio.open, str(out))
    shardio.pack(SAMPLES, str(out), **options)
    shardio.pack(SAMPLES, tmp_path / "whole", **options)
    assert read_objects(out) == read_files(tmp_path / "whole")
    assert_refused("is not empty", SAMPLES, str(out), classes=["ant", "bee"])


def test_wrong_samples_and_options_are_refused(tmp_path: Path) -> None:
    one, out = SAMPLES[0] | {"cls": 0}, tmp_path / "out"
    assert_raises(TypeError, "sample 1 is a tuple: an iterable must yield mappings such", shardio.pack, [one, ()], out)
    assert_refused("the key 'x/00' of sample 1 is also the key of sample 0", [one, one])
    assert_refused(r"no sample can be packed: 00000000\.jpg is not an image", [{"jpg": b"none"}])
    assert_refused("no samples were written", [])
    options = {"layout": "flat", "num_workers": 2, "on_changed": "skip", "labels": "x.csv", "key_column": "key"}
    options |= {"source_kind": "files", "prefix_keys": True, "tokenizer": "x.py:encode"}
    for name, value in options.items():
        message = f"{name} does not apply to an iterable of samples: omit it"
        assert_raises(ValueError, message, shardio.pack, SAMPLES, out, **{name: value})
    assert not out.exists()


NUM_WORKERS = 3


def key_of(worker: int, number: int) -> str:
    return f"w{worker}/{number}"


def write_part(out: Path | Location, worker: int, num: int = 5, *, kill: bool = False, overwrite: bool = False) -> None:
    def samples() -> Iterator[dict[str, Any]]:
        for number in range(num):
            yield {"__key__": key_of(worker, number), "cls": number % 2, "txt": f"{worker} {number}"}
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)

    options = {"worker": worker, "num_workers": NUM_WORKERS, "overwrite": overwrite}
    write_all(out, samples(), **options, max_shard_samples=2, classes=["a", "b"])


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """A directory that three workers have written to, in any order, before it is finalized."""
    for worker in (1, 2, 0):
        write_part(tmp_path / "parts", worker)
    return tmp_path / "parts"


def test_finalize_joins_the_parts_in_the_order_of_the_workers(parts: Path) -> None:
    assert_raises(FormatError, "unfinished", open_table, parts)
    manifest = shardio.finalize(parts)
    names = [f"shard-{worker:05d}-{number:06d}.tar" for worker in range(NUM_WORKERS) for number in range(3)]
    assert [entry.name for entry in manifest.shards] == names
    assert sorted(read_files(parts)) == sorted([*names, *(f"{name}.idx" for name in names), "shardio.json"])
    found = read_with_webdataset(*(parts / name for name in names))
    assert [key for key, _ in found] == [key_of(worker, i) for worker in range(NUM_WORKERS) for i in range(5)]
    assert (shardio.verify(parts), manifest.classes) == ([], ("a", "b"))
    assert shardio.finalize(parts) == manifest  # As after an interruption.
    assert_raises(PackError, "already holds a packed dataset", write_part, parts, 1)


def test_a_part_is_written_again_and_a_missing_one_is_named(parts: Path, out: Location) -> None:
    for worker in (0, 1):
        write_part(out, worker, 3 + worker)
    assert_raises(PackError, r"lacks the parts of 1 of 3 workers \(2\)", shardio.finalize, str(out))
    assert_raises(PackError, "already holds files of worker 0", write_part, out, 0)
    write_part(out, 0, overwrite=True)
    write_part(out, 1, overwrite=True)
    write_part(out, 2)
    shardio.finalize(str(out))
    shardio.finalize(parts)
    assert read_objects(out) == read_files(parts)
    assert_raises(PackError, "does not exist", shardio.finalize, str(out / "nothing"))


@pytest.mark.slow
def test_workers_at_the_same_time_write_the_same_and_may_be_killed(parts: Path, tmp_path: Path) -> None:
    out, process = tmp_path / "out", forkserver_context().Process
    processes = [process(target=write_part, args=(out, n), kwargs={"kill": n == 1}) for n in range(NUM_WORKERS)]
    for each in processes:
        each.start()
    for each in processes:
        each.join()
    assert [each.exitcode for each in processes] == [0, -signal.SIGKILL, 0]
    assert_raises(PackError, r"1 of 3 workers \(1\)", shardio.finalize, out)
    write_part(out, 1, overwrite=True)
    shardio.finalize(out)
    shardio.finalize(parts)
    assert read_files(out) == read_files(parts)


def test_keys_that_two_workers_wrote_are_refused(parts: Path) -> None:
    twice, options = {"__key__": key_of(2, 4), "txt": "x"}, {"worker": 1, "num_workers": NUM_WORKERS}
    write_all(parts, [twice], **options, classes=["a", "b"], overwrite=True)
    message = r"'w2/4', one in .*shard-00001-000000\.tar and one in .*shard-00002-000002"
    assert_raises(PackError, message, shardio.finalize, parts)
    assert not (parts / "shardio.json").exists()


def test_a_changed_or_foreign_shard_and_parts_of_other_runs_are_refused(parts: Path, tmp_path: Path) -> None:
    shutil.copy(parts / "shard-00000-000000.tar", parts / "shard-00007-000000.tar")
    assert_raises(PackError, "belongs to no worker", shardio.finalize, parts)
    (parts / "shard-00007-000000.tar").unlink()
    (parts / "shard-00000-000001.tar").unlink()
    assert_raises(PackError, r"shard-00000-000001\.tar cannot be read", shardio.finalize, parts)
    assert_raises(PackError, "not written by 4 workers", write_all, parts, [], worker=3, num_workers=4)
    assert_raises(PackError, "no finished part", shardio.finalize, tmp_path)
    (tmp_path / "notes").write_text("")
    assert_raises(PackError, "no worker wrote", write_all, tmp_path, [], worker=0, num_workers=1)
    assert_raises(ValueError, "belong together", shardio.ShardWriter, parts, worker=3)


def test_workers_without_samples_are_fine_but_not_all_of_them(tmp_path: Path) -> None:
    for worker, num_samples in enumerate([0, 3, 0]):
        write_part(tmp_path / "some", worker, num_samples)
        write_part(tmp_path / "none", worker, 0)
    assert shardio.finalize(tmp_path / "some").num_samples == 3
    assert_raises(PackError, "no worker wrote a sample", shardio.finalize, tmp_path / "none")
