"""Shards packed with ``--jpeg tile``: other tools decode the original pixels, and shardio's crops are exact."""

from __future__ import annotations

import io
from pathlib import Path

import cv2
import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image

import shardio
from shardio.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop
from tests.images.pictures import make_picture, read_by_pillow, save
from tests.tars import read_with_webdataset

SIZES = [(375, 500), (321, 481), (33, 47), (1, 1), (64, 3), (17, 130)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
def out(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiled")
    manifest = shardio.pack(source, out, jpeg="tile", max_shard_samples=10)
    assert manifest.pack["num_tiled"] == manifest.num_samples
    return out


def test_webdataset_pillow_opencv_and_simplejpeg_read_the_original_pixels(source: Path, out: Path) -> None:
    samples = read_with_webdataset(*sorted(out.glob("*.tar")))
    assert len(samples) == 2 * 3 * len(SIZES)
    for key, fields in samples:
        original, stored = (source / f"{key}.jpg").read_bytes(), fields["jpg"]
        assert stored != original
        np.testing.assert_array_equal(read_by_pillow(stored), read_by_pillow(original))
        np.testing.assert_array_equal(simplejpeg.decode_jpeg(stored), simplejpeg.decode_jpeg(original))
        by_opencv = [cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR) for content in (stored, original)]
        np.testing.assert_array_equal(by_opencv[0], by_opencv[1])
        with Image.open(io.BytesIO(stored)) as image:
            assert image.info["comment"] == b"kept"


@pytest.mark.parametrize("antialias", [False, True])
def test_batches_of_tiled_shards_equal_those_of_copied_ones(
    source: Path, out: Path, tmp_path: Path, antialias: bool
) -> None:
    shardio.pack(source, tmp_path / "copied", max_shard_samples=10)
    transform = Compose([RandomResizedCrop(64, antialias=antialias), RandomHorizontalFlip()])
    tiled, copied = (
        list(shardio.DataLoader(shardio.ShardDataset(path, shuffle=True, transform=transform), batch_size=7))
        for path in (out, tmp_path / "copied")
    )
    assert len(tiled) == len(copied) > 1
    for (images, labels), (expected_images, expected_labels) in zip(tiled, copied, strict=True):
        assert torch.equal(images, expected_images)
        assert torch.equal(labels, expected_labels)
