"""Each file of a directory is packed, ignored or rejected, and the plan depends only on the input and the settings."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import shardio
from shardio.errors import PackError
from shardio.libraries import import_torchvision
from shardio.packing import PackResult
from shardio.storage import read_and_stat
from tests.files import read_files
from tests.packing.packs import Change, assert_refused, pack, read_packed, write, write_files
from tests.raising import assert_raises
from tests.sources import encode, write_images
from tests.tars import read_with_webdataset

DIRECTORIES: dict[str, tuple[str, str, dict[str, str]]] = {
    "the top folder is the class": (
        "cats/1.jpg cats/a/b/c/2.jpg dogs/x/1.jpg Bees/1.jpg",
        "",
        dict.fromkeys(("Bees/1", "cats/1", "cats/a/b/c/2", "dogs/x/1"), "cls jpg"),
    ),
    "a flat directory has no labels": ("1.jpg 2.png", "", {"1": "jpg", "2": "png"}),
    "but may have label files": ("1.jpg 1.cls", "", {"1": "cls jpg"}),
    "one stem": ("c/a.jpg c/a.json c/a.TXT c/b.jpg", "", {"c/a": "cls jpg json txt", "c/b": "cls jpg"}),
    "hidden files": ("c/a.jpg c/.b.jpg .git/x.jpg c/.cache/y.jpg .DS_Store c/._a.jpg", "", {"c/a": "cls jpg"}),
    "other files": (
        "c/a.jpg c/notes.txt c/Thumbs.db README c/a.seg.json LICENSE.md c/jpg c/a",
        "c/notes.txt c/Thumbs.db README c/a.seg.json LICENSE.md c/jpg c/a",
        {"c/a": "cls jpg"},
    ),
}
"""The names of the files, the names of the ignored files, and the fields by key."""


@pytest.mark.parametrize(("names", "ignored", "fields"), DIRECTORIES.values(), ids=DIRECTORIES)
def test_files_are_fields_or_ignored(tmp_path: Path, names: str, ignored: str, fields: dict[str, str]) -> None:
    source = write(tmp_path / "in", names.split())
    result = pack(source, tmp_path / "out")
    found = read_packed(tmp_path / "out")
    assert {key: " ".join(sorted(sample)) for key, sample in found.items()} == fields
    assert sorted(result.ignored) == sorted(source / name for name in ignored.split())
    classes = sorted({key.split("/")[0] for key in fields if "/" in key})
    assert list(result.manifest.classes) == classes
    for key, sample in found.items():
        for field, content in sample.items():
            if field == "cls" and classes:
                assert content == str(classes.index(key.split("/")[0])).encode()
            elif field != "txt":  # The text file's suffix has a different case.
                assert content == (source / f"{key}.{field}").read_bytes()


def test_images_have_known_suffixes_in_any_letter_case_and_may_be_links(tmp_path: Path) -> None:
    suffixes = [
        f(suffix)
        for suffix in ("jpg", "jpeg", "png", "webp", "bmp", "tif", "tiff")
        for f in (str.lower, str.upper, str.title)
    ]
    source = write(tmp_path / "in", [f"c/{i:02d}.{suffix}" for i, suffix in enumerate(suffixes)])
    (source / "c" / "link.jpg").symlink_to(write(tmp_path / "store", ["1.jpg"]) / "1.jpg")
    result = pack(source, tmp_path / "out")
    assert read_packed(tmp_path / "out") == {
        f"c/{path.stem}": {path.suffix[1:].lower(): path.read_bytes(), "cls": b"0"} for path in source.glob("c/*")
    }
    assert (result.mislabelled, result.rejected, result.ignored) == ([], [], [])


@pytest.mark.parametrize("content", [b"", b"<html>404</html>", bytes(5000)], ids=["empty", "html", "zeros"])
def test_files_of_other_formats_are_named(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    source, png = write(tmp_path / "in", ["c/a.jpg", "c/d.json"]), encode(1, suffix="png")
    write_files(source, {"a/x.jpg": content, "c/b.jpg": png, "c/d.jpg": content})
    result = pack(source, tmp_path / "out")
    assert result.manifest.classes == ("a", "c")  # A class with only broken images keeps its label.
    assert read_packed(tmp_path / "out") == {
        f"c/{name}": {"jpg": (source / f"c/{name}.jpg").read_bytes(), "cls": b"1"} for name in "ab"
    }
    assert result.mislabelled == [(source / "c" / "b.jpg", "has the suffix .jpg but is in PNG format")]
    assert result.rejected == [(key, f"{key}.jpg", "is not an image") for key in ("a/x", "c/d")]
    with caplog.at_level(logging.WARNING):
        shardio.pack(source, tmp_path / "called")
    assert caplog.messages == [
        f"{source}/c/b.jpg has the suffix .jpg but is in PNG format: packed anyway",
        *(f"{source}: {name}.jpg is not an image: left out" for name in ("a/x", "c/d")),
    ]
    for name, other in (("x", png), ("y", content)):
        write_files(tmp_path / name, {"c/a.jpg": encode(0), "c/b.jpg": other})
        assert_refused(re.escape(f"{tmp_path}/{name}/c/b.jpg"), tmp_path / name, strict=True)
    write_files(tmp_path / "z", {"c/a.jpg": encode(0), "c/notes.txt": b"text"})
    assert shardio.pack(tmp_path / "z", tmp_path / "strict", strict=True).num_samples == 1


def test_pack_counts_images_in_unsupported_formats(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    suffixes = ["arw", "cr2", "cr3", "dng", "heic", "heif", "hif", "jpf", "jpx", "jxl", "nef", "svg"]
    names = ["c/a.jpg", "c/x.HEIC", "c/notes.txt", *(f"c/{suffix}.{suffix}" for suffix in suffixes)]
    with caplog.at_level(logging.WARNING):
        shardio.pack(write(tmp_path / "in", names), tmp_path / "out")
    counts = ", ".join(f"{1 + (suffix == 'heic')} .{suffix}" for suffix in suffixes)
    assert [message.partition("): ")[0] for message in caplog.messages] == [
        f"{tmp_path}/in: left out images in other formats ({counts}"
    ]


def test_dots_in_stems_become_underscores_on_request(tmp_path: Path) -> None:
    source = write(tmp_path / "in", ["v1.0/a.b.c.jpg", "v1.0/a.b.c.json", "v1.0/d.jpg"])
    assert_refused(r"--rename-dots \(rename_dots=True\)", source)
    shardio.pack(source, tmp_path / "out", rename_dots=True)
    found = {key: sorted(fields) for key, fields in read_packed(tmp_path / "out").items()}
    assert found == {"v1.0/a_b_c": ["cls", "jpg", "json"], "v1.0/d": ["cls", "jpg"]}


@pytest.mark.slow
def test_images_that_differ_in_the_suffix_are_samples(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ["c/a.JPG", "c/a.jpg", "c/b.jpeg", "c/b.jpg", "c/b.png", "c/d.jpg", "d/a.jpg"]
    source = write(tmp_path / "in", names)
    shardio.pack(source, tmp_path / "out")
    samples = read_packed(tmp_path / "out")
    keys = ["c/a_JPG", "c/a_jpg", "c/b_jpeg", "c/b_jpg", "c/b_png", "c/d", "d/a"]
    assert sorted(samples) == keys
    import_torchvision()  # Unlike a plain import, this call works even if torchvision is not compatible with torch.
    expected = pytest.importorskip("torchvision.datasets").ImageFolder(str(source))
    for key, (path, label) in zip(keys, sorted(expected.samples), strict=True):
        suffix = Path(path).suffix[1:].lower()
        assert samples[key] == {suffix: Path(path).read_bytes(), "cls": str(label).encode()}
    assert len(shardio.ShardDataset(tmp_path / "out", fields=("image", "label"))) == len(names)
    (message,) = caplog.messages
    assert "5 images have the same name as another, apart from the suffix" in message
    assert "such as 'c/a_JPG'" in message


def test_images_that_differ_in_the_suffix_have_labels_of_their_own(tmp_path: Path) -> None:
    names = ["x/a.jpg", "x/a.png", "x/b.c.jpg"]
    source = write(tmp_path / "in", names)
    text = "\n".join(["file,label", *(f"{name},{number}" for number, name in enumerate(names))])
    for path in (tmp_path / "labels.csv", source / "table.csv"):
        path.write_text(text)
    labels: dict[str, Any] = {"labels": tmp_path / "labels.csv"}
    options: dict[str, Any] = {"rename_dots": True, "shuffle_seed": None}
    assert_refused(
        r"a\.png have the same stem\n.*--layout flat \(layout='flat'\)\. If they", source, **options, **labels
    )
    calls = [(source, labels | {"layout": "flat"}), (source / "table.csv", labels), (source / "table.csv", {})]
    for number, (path, more) in enumerate(calls):
        shardio.pack(path, tmp_path / str(number), **options, **more)
        found = {key: sample["cls"] for key, sample in read_packed(tmp_path / str(number)).items()}
        assert list(found.items()) == [("x/a_jpg", b"0"), ("x/a_png", b"1"), ("x/b_c", b"2")]


# Files and folders in the source, and the path that the error must name
UNPACKABLE = {
    "empty": ("", "in"),
    "only texts": ("c/a.txt README", "in"),
    "only hidden files": ("c/.a.jpg .c/a.jpg", "in"),
    "dot in stem": ("c/a.jpg c/b.x.jpg", "in/c/b.x.jpg"),
    "dot in stem, flat": ("b.x.jpg", "in/b.x.jpg"),
    "only a suffix after a dot": ("c/a.jpg c/b..jpg", "in/c/b..jpg"),
    "image or mask": ("a.jpg a.png", "in/a.png"),
    "text of two images": ("c/a.jpg c/a.png c/a.txt", "in/c/a.txt"),
    "same key as with suffix": ("c/a.jpg c/a.png c/a_png.jpg", "in/c/a_png.jpg"),
    "letter case of a further field": ("c/a.jpg c/a.json c/a.JSON", "in/c/a.JSON"),
    "image among class folders": ("c/a.jpg a.jpg", "in/a.jpg"),
    "label in a class folder": ("c/a.jpg c/a.cls", "in/c/a.cls"),
    "class skipped by webdataset": ("c/a.jpg __x__/a.jpg", "in/__x__/a.jpg"),
    "class without images": ("c/a.jpg d/notes.txt", "in/d"),
    "empty class folder": ("c/a.jpg d/", "in/d"),
    "dangling link": ("c/a.jpg c/b.jpg->nothing", "in/c/b.jpg"),
    "cycle of links": ("c/a.jpg c/loop->in", "in/c/loop"),
}


@pytest.mark.parametrize(("names", "path"), UNPACKABLE.values(), ids=UNPACKABLE)
def test_files_that_cannot_become_samples_are_refused(tmp_path: Path, names: str, path: str) -> None:
    source = write(tmp_path / "in", [name for name in names.split() if name[-1] != "/" and "->" not in name])
    for name in names.split():
        link, _, target = name.partition("->")
        if target:
            (source / link).symlink_to(tmp_path / target)
        elif name[-1] == "/":
            (source / name).mkdir()
    assert_refused(re.escape(str(tmp_path / path)), source)


def test_a_source_that_is_no_directory_and_a_file_that_is_too_large_are_refused(tmp_path: Path) -> None:
    assert_refused(f"{tmp_path}/in", tmp_path / "in")
    (tmp_path / "in").write_bytes(encode(0))
    assert_refused(f"{tmp_path}/in", tmp_path / "in")
    source = write(tmp_path / "large", ["c/a.jpg", "c/a.npy"])
    os.truncate(source / "c/a.npy", 2**31 + 1)
    assert_refused(f"{source}/c/a.npy has {2**31 + 1} bytes, more than {2**31}", source)


@pytest.mark.parametrize("name", ["b\nc.jpg", "b\x01.jpg", "b\x7f.jpg", os.fsdecode(b"gr\xfc\xdfe.jpg")], ids=ascii)
def test_a_name_with_unprintable_characters_is_refused(tmp_path: Path, name: str) -> None:
    source = write(tmp_path / "in", ["c/a.jpg", f"c/{name}"])
    assert_refused(re.escape(repr(str(source / "c" / name))), source)


@pytest.mark.parametrize(("first", "other"), [("a.b", "a_b"), ("a.b.x", "a_b.x"), ("a.b.x", "a.b_x")])
def test_files_with_the_same_key_after_renaming_dots_are_refused(tmp_path: Path, first: str, other: str) -> None:
    source = write(tmp_path / "in", [f"c/{first}.jpg", f"c/{other}.jpg"])
    assert_refused(re.escape(f"in/c/{other}.jpg"), source, rename_dots=True)


def test_an_unreadable_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def scandir_unless_locked(path: Path) -> object:
        if str(path).endswith("in/d"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scandir_unless_locked)
    assert_refused("in/d", write(tmp_path / "in", ["c/a.jpg", "d/a.jpg"]))


def test_a_read_error_is_chained_and_the_pack_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "in", classes=2, per_class=10)

    def read_unless_locked(path: str, start: int, stop: int) -> tuple[bytes, os.stat_result]:
        if path.endswith("name-006.jpg"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return read_and_stat(path, start, stop)

    monkeypatch.setattr("shardio.packing.sources.source.read_and_stat", read_unless_locked)
    message, call = r"in/class-\d/name-006\.jpg cannot be read: Permission denied", (tmp_path / "in", tmp_path / "out")
    caught: BaseException = assert_raises(PackError, message, shardio.pack, *call, max_shard_samples=3)
    for _ in range(9):
        caught = caught.__cause__ or caught
    assert isinstance(caught, PermissionError)
    monkeypatch.undo()
    write(tmp_path / "in", ["class-0/new.jpg"])
    message = "unfinished pack of different images or with different settings: delete"
    assert_raises(PackError, message, shardio.pack, *call, max_shard_samples=3)
    (tmp_path / "in" / "class-0" / "new.jpg").unlink()
    shardio.pack(*call, max_shard_samples=3)
    shardio.pack(tmp_path / "in", tmp_path / "other", max_shard_samples=3)
    assert read_files(tmp_path / "out") == read_files(tmp_path / "other")


JPEG_START = b"\xff\xd8\xff" + bytes(49)
"""Bytes that are recognized as an image, and may be followed by any number of bytes."""


def read_keys(out: Path) -> list[list[str]]:
    return [[key for key, _ in read_with_webdataset(path)] for path in sorted(out.glob("shard-*.tar"))]


@given(
    sizes=st.lists(st.integers(52, 6000), min_size=1, max_size=25),
    max_shard_size=st.integers(1, 20_000),
    max_shard_samples=st.none() | st.integers(1, 6),
    seed=st.none() | st.integers(0, 2**63 - 1),
    prefix=st.sampled_from(["", "class/"]),
    name_length=st.sampled_from([1, 90, 94, 95, 110]),
)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_shards_hold_every_sample_once_and_are_as_full_as_their_limits_allow(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    max_shard_size: int,
    max_shard_samples: int | None,
    seed: int | None,
    prefix: str,
    name_length: int,
) -> None:
    root = tmp_path_factory.mktemp("limits")
    (root / "in" / prefix).mkdir(parents=True)
    keys = [f"{prefix}{i:0{name_length}d}" for i in range(len(sizes))]
    for i, size in enumerate(sizes):
        (root / "in" / f"{keys[i]}.jpg").write_bytes(JPEG_START + bytes([i]) * (size - len(JPEG_START)))
    limits = {"max_shard_size": max_shard_size, "max_shard_samples": max_shard_samples}
    manifest = shardio.pack(root / "in", root / "out", shuffle_seed=seed, check=False, **limits)  # type: ignore[arg-type]
    shards = read_keys(root / "out")
    found = list(chain.from_iterable(shards))
    assert sorted(found) == sorted(keys)
    assert found == sorted(keys) or seed is not None
    assert [len(keys) for keys in shards] == manifest.shard_sizes.tolist()
    paths = sorted((root / "out").glob("*.tar"))
    for keys, path in zip(shards, paths, strict=True):
        assert path.stat().st_size <= max_shard_size or len(keys) == 1
        assert max_shard_samples is None or len(keys) <= max_shard_samples
    for keys, path, following in zip(shards, paths, paths[1:], strict=False):
        with tarfile.open(following) as tar:
            last = tar.getmembers()[len(prefix) > 0]  # In a class folder, a sample has a label and an image.
        num_bytes = last.offset_data + -(-last.size // 512) * 512
        assert path.stat().st_size + num_bytes > max_shard_size or len(keys) == max_shard_samples
    shutil.rmtree(root)


def test_a_shard_may_have_exactly_the_maximum_size(tmp_path: Path) -> None:
    for i in range(4):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / f"{i}.jpg").write_bytes(JPEG_START + bytes(512 - len(JPEG_START)))
    two_samples = 2 * (512 + 512) + 1024
    for limit, sizes in (two_samples, [2, 2]), (two_samples - 1, [1, 1, 1, 1]), (two_samples + 1023, [2, 2]):
        manifest = shardio.pack(tmp_path / "in", tmp_path / str(limit), max_shard_size=limit, check=False)
        assert manifest.shard_sizes.tolist() == sizes


def test_the_path_and_the_age_of_the_source_change_no_byte(images: Path, tmp_path: Path) -> None:
    shardio.pack(images, tmp_path / "first", max_shard_samples=4)
    moved = tmp_path / "another" / "folder"
    for path in sorted(images.rglob("*.jpg"), reverse=True):  # A different order on disk.
        copy = moved / path.relative_to(images)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
        copy.chmod(0o600)
        os.utime(copy, (1_000_000_000, 1_000_000_000))
    shardio.pack(moved, tmp_path / "second", max_shard_samples=4)
    assert read_files(tmp_path / "first") == read_files(tmp_path / "second")


def test_seeds_change_the_order_of_samples_and_mix_classes(tmp_path: Path) -> None:
    """With 4 classes of 25 samples, the class changes about 75 times in shuffled and 3 times in sorted order."""
    write_images(tmp_path / "in", classes=4, per_class=25, width=8, height=8)
    orders = []
    for seed in 0, 1, 2**63 - 1:
        shardio.pack(tmp_path / "in", tmp_path / str(seed), shuffle_seed=seed, max_shard_samples=25)
        shards = read_keys(tmp_path / str(seed))
        assert [len({key.split("/")[0] for key in keys}) for keys in shards] == [4, 4, 4, 4]
        orders.append(list(chain.from_iterable(shards)))
        assert sum(a.split("/")[0] != b.split("/")[0] for a, b in pairwise(orders[-1])) > 50
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert orders[0] != orders[1] != orders[2] != orders[0]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Connect to a Ray cluster of real processes on this machine. Yield its address."""
    ray: Any = pytest.importorskip("ray")
    context = ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield context.address_info["gcs_address"]
    ray.shutdown()


@pytest.mark.slow
def test_a_ray_cluster_writes_the_same_bytes(cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "in"
    write_images(source, classes=2, per_class=5, width=8, height=8)
    (source / "class-0" / "broken.jpg").write_bytes(b"no image")

    def pack_to(out: Path, change: Change | None = None, **options: Any) -> PackResult:
        return pack(source, out, change, max_shard_samples=3, **options)

    pack_to(tmp_path / "alone", num_workers=1)
    alone = read_files(tmp_path / "alone")
    monkeypatch.chdir(tmp_path)  # Ray's tasks run in different directories.
    assert [sample.key for sample in pack_to(Path("out"), engine="ray").rejected] == ["class-0/broken"]
    assert read_files(tmp_path / "out") == alone
    path, elsewhere = source / "class-1" / "name-003.jpg", tmp_path / "elsewhere.jpg"
    with pytest.raises(PackError, match=r"class-1/name-003\.jpg is missing"):
        pack_to(tmp_path / "2", Change(lambda: path.rename(elsewhere)), engine="ray", num_workers=1)
    elsewhere.rename(path)
    pack_to(tmp_path / "2")
    assert read_files(tmp_path / "2") == alone
    command = [sys.executable, "-m", "shardio", "pack", str(source), "3", "--max-shard-samples", "3"]
    options = ["--max-shard-size", "1GiB", "--engine", "ray", "--address", cluster]
    subprocess.run([*command, *options], check=True, capture_output=True)
    assert read_files(tmp_path / "3") == alone
