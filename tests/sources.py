"""Directories of small images that Pillow writes, for tests that pack and read them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

PILLOW_FORMATS = {"jpg": "JPEG", "jpeg": "JPEG", "png": "PNG", "webp": "WEBP", "bmp": "BMP", "tif": "TIFF"}


def encode(
    seed: int, *, width: int = 48, height: int = 32, suffix: str = "jpg", mode: str = "RGB", **options: Any
) -> bytes:
    """Return an image file of random smooth colors, which depend only on the seed."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (4, 6, 3), dtype=np.uint8))
    file = io.BytesIO()
    image = coarse.resize((width, height), Image.Resampling.BICUBIC).convert(mode)
    image.save(file, PILLOW_FORMATS[suffix.lower()], **options)
    return file.getvalue()


def write_images(
    root: Path, *, classes: int = 3, per_class: int = 7, width: int = 48, height: int = 32, suffix: str = "jpg"
) -> dict[str, bytes]:
    """Write ``root/class-i/name-j.suffix``. Return the contents of the files, by the keys of their samples."""
    contents = {}
    for class_id in range(classes):
        folder = root / f"class-{class_id}"
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(per_class):
            content = encode(class_id * 1000 + number, width=width, height=height, suffix=suffix)
            (folder / f"name-{number:03d}.{suffix}").write_bytes(content)
            contents[f"class-{class_id}/name-{number:03d}"] = content
    return contents


def write_mixed(root: Path) -> None:
    """Write 12 images of 96×64 pixels in two classes, for all decoders.

    If there is a kernel, it decodes the crops of 2 baseline, 2 progressive and 3 tiled JPEGs. libjpeg-turbo decodes 2
    JPEGs with a byte after their end, and Pillow decodes a CMYK JPEG and 2 PNGs.
    """
    from shardio.images.tiling import tile_jpeg  # A global import would slow the start of each process.

    size: dict[str, Any] = {"width": 96, "height": 64}
    files = [("jpg", encode(seed, **size, progressive=seed < 2)) for seed in range(4)]
    files += [("jpg", tile_jpeg(encode(seed, **size))) for seed in range(4, 7)]
    files += [("jpg", encode(seed, **size) + b"\0") for seed in range(7, 9)]
    files += [("jpg", encode(9, **size, mode="CMYK"))]
    files += [("png", encode(seed, **size, suffix="png")) for seed in range(10, 12)]
    for number, (suffix, content) in enumerate(files):
        path = root / f"class-{number % 2}" / f"{number:03d}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
