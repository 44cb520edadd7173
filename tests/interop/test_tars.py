"""Tars from other tools, and shardio's tars in other tools: all tools read the same samples."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from itertools import product
from pathlib import Path

import cv2
import numpy as np
import pytest
import simplejpeg
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from PIL import Image

import shardio
from shardio.errors import FormatError
from shardio.reading import SampleReader
from shardio.shards import open_table
from shardio.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop
from tests.images.pictures import make_picture, read_by_pillow, save
from tests.packing.packs import write_files
from tests.raising import assert_raises
from tests.sources import encode, write_images
from tests.tars import Member, Samples, extract_with_gnu_tar, index_of, read_members, read_with_webdataset, write_tar

FORMATS = pytest.mark.parametrize(
    "tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT], ids=["ustar", "gnu", "pax"]
)


def read_with_shardio(path: Path) -> Samples:
    table = open_table(path)
    reader = SampleReader(table)
    samples = reader.read(np.arange(table.manifest.num_samples), table.manifest.fields)
    reader.close()
    return [(sample.key, dict(sample.fields)) for sample in samples]


def assert_equal_to_webdataset(path: Path, num_samples: int) -> None:
    expected = read_with_webdataset(path)
    assert (read_with_shardio(path), len(expected)) == (expected, num_samples)


@FORMATS
def test_samples_equal_those_of_webdataset(tmp_path: Path, tar_format: int) -> None:
    members = [(f"d/{i:04d}.{field}", f"{i} {field}".encode() * i) for i in range(30) for field in ("JPG", "seg.png")]
    names = ["ü" * 9, "日本語/写真", "with space", "a\tb"]
    if tar_format != tarfile.USTAR_FORMAT:
        names += ["x" * 101, "d" * 300 + "/" + "e" * 200]
    members += [(f"{name}.{field}", field.encode()) for name in names for field in ("jpg", "cls")]
    for skipped in ("__info__/a.json", "__b.jpg__", "c/__d__.jpg"):
        members.insert(0, (skipped, b"3"))
    write_tar(tmp_path / "a.tar", members, tar_format=tar_format)
    assert_equal_to_webdataset(tmp_path / "a.tar", 31 + len(names))


def test_names_that_are_not_utf8_and_tars_by_gnu_tar_are_read(tmp_path: Path, images: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT, encoding="latin-1") as tar:
        for name in "größe.jpg", "größe.cls", "plain.jpg":
            info = tarfile.TarInfo(name)
            info.size = 3
            tar.addfile(info, io.BytesIO(b"abc"))
    assert_equal_to_webdataset(path, 2)
    for tar_format in ("gnu", "pax", "ustar", "v7"):
        path = tmp_path / f"{tar_format}.tar"
        subprocess.run(["tar", f"--format={tar_format}", "--sort=name", "-cf", path, "-C", images, "."], check=True)
        assert_equal_to_webdataset(path, 21)


@FORMATS
def test_directories_links_and_members_without_a_key_are_skipped(tmp_path: Path, tar_format: int) -> None:
    path = tmp_path / "a.tar"
    kinds = [tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE]
    with tarfile.open(path, "w", format=tar_format) as tar:
        for i in range(8):
            odd = tarfile.TarInfo(f"odd-{i}" if i % 4 else f"odd-{i}.jpg")  # Links that have a key are rejected.
            odd.type, odd.linkname = kinds[i % 4], "0.jpg" if i % 4 in (1, 2) else ""
            tar.addfile(odd)
            for name in f"{i}.jpg", f"README-{i}":
                info = tarfile.TarInfo(name)
                info.size = 600 + i
                tar.addfile(info, io.BytesIO(bytes([i]) * (600 + i)))
    assert_equal_to_webdataset(path, 8)


MEMBER_NAMES = st.tuples(
    st.sampled_from(["a", "b", "d/a", "d.e/a", "é", "__m__/a", "README", "", "."]),
    st.sampled_from(["jpg", "JPG", "cls", "seg.png", "", None]),
).map(lambda pair: pair[0] if pair[1] is None else f"{pair[0]}.{pair[1]}")


def gather(runs: Samples) -> Samples | None:
    """Join runs of members with the same key into samples. Return None if it is unclear which runs belong together."""
    samples: Samples = []
    for key, fields in runs:
        of_key = [other for name, other in runs if name == key]
        together = {field: content for each in of_key for field, content in each.items()}
        if all(each.keys() == fields.keys() for each in of_key):
            samples.append((key, fields))
        elif len(together) < sum(map(len, of_key)):
            return None
        elif fields is of_key[0]:
            samples.append((key, together))
    return samples


@pytest.mark.filterwarnings("ignore:the members of some samples")
@given(st.lists(st.tuples(MEMBER_NAMES, st.binary(max_size=20)), min_size=1, max_size=12), st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_members_are_gathered_or_refused(
    tmp_path_factory: pytest.TempPathFactory, members: list[Member], is_gnu: bool
) -> None:
    path = tmp_path_factory.mktemp("tars") / "a.tar"
    members = [(name or "x", content) for name, content in members]
    write_tar(path, members, tar_format=tarfile.GNU_FORMAT if is_gnu else tarfile.PAX_FORMAT)
    try:
        expected = gather(read_with_webdataset(path))
    except ValueError:
        expected = None
    if expected is None:
        assert_raises(FormatError, "twice", open_table, path)
        assert not index_of(path).exists()
    elif expected:
        assert read_with_shardio(path) == expected
    else:
        assert_raises(FormatError, "no samples", open_table, path)


@pytest.mark.parametrize("options", [["--format=gnu"], ["--format=pax"], ["--format=pax", "--sparse-version=0.1"]])
def test_a_sparse_member_is_refused(tmp_path: Path, options: list[str]) -> None:
    """GNU tar does not store the content of a sparse file as one range of bytes."""
    with (tmp_path / "a.jpg").open("wb") as file:
        file.write(b"begin")
        file.seek(1 << 20)
        file.write(b"end")
    (tmp_path / "b.jpg").write_bytes(b"full" * (1 << 19))
    subprocess.run(["tar", *options, "-S", "-cf", "x.tar", "a.jpg", "b.jpg"], cwd=tmp_path, check=True)
    assert (tmp_path / "x.tar").stat().st_size < 3 << 20, "this file system has no sparse files"
    assert_raises(FormatError, r"x\.tar", open_table, tmp_path / "x.tar")
    assert not (tmp_path / "x.tar.idx").exists()


NAMES = ["plain", "with space", "n" * 96, "n" * 97, "n" * 101, "m" * 200, "schön", "日本語の写真", "ü" * 100]
NAMES += ["emoji-🙂", "-dash", "it's", "a=b", "100%"]


def test_all_tools_read_every_sample(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    write_images(source, classes=11, per_class=1)  # The class numbers need two digits.
    for folder in "class-0", "Klasse äöü", "deep/" + "er/" * 40 + "x":
        for i, name in enumerate(NAMES):
            files = {f"{name}.PNG": encode(i, suffix="png"), f"{name}.json": f'{{"name": "{name}"}}'.encode()}
            write_files(source / folder, files)
    shardio.pack(source, out, max_shard_samples=13)
    shards, classes = sorted(out.glob("*.tar")), sorted(path.name for path in source.iterdir())
    expected = dict[str, dict[str, bytes]]()
    for path in filter(Path.is_file, source.rglob("*.*")):
        place = path.relative_to(source)
        fields = expected.setdefault(str(place.with_suffix("")), {"cls": str(classes.index(place.parts[0])).encode()})
        fields[path.suffix[1:].lower()] = path.read_bytes()

    samples = read_with_webdataset(*shards)
    assert (len(samples), dict(samples)) == (len(expected), expected)
    members = [member for path in shards for member in read_members(path)]
    names = {f"{key}.{field}": content for key, fields in expected.items() for field, content in fields.items()}
    assert (len(members), dict(members)) == (len(names), names)
    assert read_with_shardio(out) == samples
    if shutil.which("tar") is None:
        pytest.skip("there is no tar on this system")
    unpacked: dict[str, bytes] = {}
    for path in shards:
        unpacked |= extract_with_gnu_tar(path, tmp_path / path.stem)
    assert unpacked == names


def test_other_tools_decode_the_original_pixels_of_tiled_shards_and_crops_are_exact(tmp_path: Path) -> None:
    sizes, photographs, files = [(375, 500), (321, 481), (33, 47), (1, 1), (64, 3), (17, 130)], tmp_path / "in", {}
    for class_id, (i, size), subsampling in product(range(2), enumerate(sizes), range(3)):
        picture = make_picture(*size, seed=class_id)
        content = save(picture, "JPEG", subsampling=subsampling, quality=90, comment=b"kept")
        files[f"class-{class_id}/{i}-{subsampling}.jpg"] = content
    write_files(photographs, files)
    manifest = shardio.pack(photographs, tmp_path / "tiled", jpeg="tile", max_shard_samples=10)
    assert manifest.pack["num_tiled"] == manifest.num_samples == len(files)
    samples = read_with_webdataset(*sorted((tmp_path / "tiled").glob("*.tar")))
    assert sorted(f"{key}.jpg" for key, _ in samples) == sorted(files)
    for key, fields in samples:
        original, stored = files[f"{key}.jpg"], fields["jpg"]
        assert stored != original
        np.testing.assert_array_equal(read_by_pillow(stored), read_by_pillow(original))
        np.testing.assert_array_equal(simplejpeg.decode_jpeg(stored), simplejpeg.decode_jpeg(original))
        by_opencv = [cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR) for content in (stored, original)]
        np.testing.assert_array_equal(by_opencv[0], by_opencv[1])
        with Image.open(io.BytesIO(stored)) as image:
            assert image.info["comment"] == b"kept"

    shardio.pack(photographs, tmp_path / "copied", max_shard_samples=10)
    for antialias in (False, True):
        transform = Compose([RandomResizedCrop(64, antialias=antialias), RandomHorizontalFlip()])
        found, copied = (
            list(shardio.DataLoader(shardio.ShardDataset(tmp_path / name, shuffle=True, transform=transform), 7))
            for name in ("tiled", "copied")
        )
        for (images, labels), (expected_images, expected_labels) in zip(found, copied, strict=True):
            assert torch.equal(images, expected_images)
            assert torch.equal(labels, expected_labels)
