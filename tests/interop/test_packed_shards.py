"""Shards packed by shardio: every tar tool reads each sample byte for byte."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image

import shardio
from shardio.reading import SampleReader
from shardio.shards import open_table
from shardio.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop
from tests.images.pictures import make_picture, read_by_pillow, save
from tests.sources import encode, write_images
from tests.tars import extract_with_gnu_tar, read_members, read_with_webdataset

NAMES = ["plain", "with space", "n" * 96, "n" * 97, "n" * 101, "m" * 200, "schön", "日本語の写真", "ü" * 100]
NAMES += ["emoji-🙂", "-dash", "it's", "a=b", "100%"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("source")
    write_images(root, classes=11, per_class=1)  # Two digits are needed.
    for folder in "class-0", "Klasse äöü", "deep/" + "er/" * 40 + "x":
        (root / folder).mkdir(parents=True, exist_ok=True)
        for i, name in enumerate(NAMES):
            (root / folder / f"{name}.PNG").write_bytes(encode(i, suffix="png"))
            (root / folder / f"{name}.json").write_text(f'{{"name": "{name}"}}')
    return root


@pytest.fixture(scope="module")
def shards(source: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    out = tmp_path_factory.mktemp("shards")
    shardio.pack(source, out, max_shard_samples=13)
    return sorted(out.glob("*.tar"))


@pytest.fixture(scope="module")
def expected(source: Path) -> dict[str, dict[str, bytes]]:
    classes = sorted(path.name for path in source.iterdir())
    samples: dict[str, dict[str, bytes]] = {}
    for path in source.rglob("*.*"):
        if path.is_file():
            key, class_name = str(path.relative_to(source).with_suffix("")), path.relative_to(source).parts[0]
            fields = samples.setdefault(key, {"cls": str(classes.index(class_name)).encode()})
            fields[path.suffix[1:].lower()] = path.read_bytes()
    return samples


def test_all_tools_read_every_sample(shards: list[Path], expected: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    samples = read_with_webdataset(*shards)
    assert (len(samples), dict(samples)) == (len(expected), expected)
    members = [member for path in shards for member in read_members(path)]
    names = {f"{key}.{field}": content for key, fields in expected.items() for field, content in fields.items()}
    assert (len(members), dict(members)) == (len(names), names)
    table = open_table(shards[0].parent)
    reader = SampleReader(table)
    read = reader.read(np.arange(table.manifest.num_samples), table.manifest.fields)
    reader.close()
    assert [(sample.key, dict(sample.fields)) for sample in read] == samples
    if shutil.which("tar") is None:
        pytest.skip("there is no tar on this system")
    unpacked: dict[str, bytes] = {}
    for path in shards:
        unpacked |= extract_with_gnu_tar(path, tmp_path / path.stem)
    assert unpacked == names


def test_a_samples_members_are_adjacent_and_sorted(shards: list[Path]) -> None:
    for path in shards:
        names = [name for name, _ in read_members(path)]
        keys = [str(Path(name).with_suffix("")) for name in names]
        starts = [key for i, key in enumerate(keys) if i == 0 or keys[i - 1] != key]
        assert len(starts) == len(set(keys))
        fields = [[name for name in names if str(Path(name).with_suffix("")) == key] for key in starts]
        assert all(members == sorted(members) for members in fields)


# Shards packed with ``--jpeg tile``: other tools decode the original pixels, and crops are exact

SIZES = [(375, 500), (321, 481), (33, 47), (1, 1), (64, 3), (17, 130)]


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photographs")
    for class_id in range(2):
        folder = root / f"class-{class_id}"
        folder.mkdir()
        for i, size in enumerate(SIZES):
            for subsampling in range(3):
                picture = make_picture(*size, seed=class_id)
                content = save(picture, "JPEG", subsampling=subsampling, quality=90, comment=b"kept")
                (folder / f"{i}-{subsampling}.jpg").write_bytes(content)
    return root


@pytest.fixture(scope="module")
def tiled(photographs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiled")
    manifest = shardio.pack(photographs, out, jpeg="tile", max_shard_samples=10)
    assert manifest.pack["num_tiled"] == manifest.num_samples
    return out


def test_webdataset_pillow_opencv_and_simplejpeg_read_the_original_pixels(photographs: Path, tiled: Path) -> None:
    samples = read_with_webdataset(*sorted(tiled.glob("*.tar")))
    assert len(samples) == 2 * 3 * len(SIZES)
    for key, fields in samples:
        original, stored = (photographs / f"{key}.jpg").read_bytes(), fields["jpg"]
        assert stored != original
        np.testing.assert_array_equal(read_by_pillow(stored), read_by_pillow(original))
        np.testing.assert_array_equal(simplejpeg.decode_jpeg(stored), simplejpeg.decode_jpeg(original))
        by_opencv = [cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR) for content in (stored, original)]
        np.testing.assert_array_equal(by_opencv[0], by_opencv[1])
        with Image.open(io.BytesIO(stored)) as image:
            assert image.info["comment"] == b"kept"


@pytest.mark.parametrize("antialias", [False, True])
def test_batches_of_tiled_and_copied_shards_are_equal(
    photographs: Path, tiled: Path, tmp_path: Path, antialias: bool
) -> None:
    shardio.pack(photographs, tmp_path / "copied", max_shard_samples=10)
    transform = Compose([RandomResizedCrop(64, antialias=antialias), RandomHorizontalFlip()])
    found, copied = (
        list(shardio.DataLoader(shardio.ShardDataset(path, shuffle=True, transform=transform), batch_size=7))
        for path in (tiled, tmp_path / "copied")
    )
    assert len(found) == len(copied) > 1
    for (images, labels), (expected_images, expected_labels) in zip(found, copied, strict=True):
        assert torch.equal(images, expected_images)
        assert torch.equal(labels, expected_labels)
