"""Directories of images for tests to pack and read: small, seeded, written by Pillow."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

PILLOW_FORMATS = {"jpg": "JPEG", "jpeg": "JPEG", "png": "PNG", "webp": "WEBP", "bmp": "BMP", "tif": "TIFF"}


def encode(seed: int, *, width: int = 48, height: int = 32, suffix: str = "jpg") -> bytes:
    """Return an image file of random smooth colours; equal seeds give equal files."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (4, 6, 3), dtype=np.uint8))
    file = io.BytesIO()
    coarse.resize((width, height), Image.Resampling.BICUBIC).save(file, PILLOW_FORMATS[suffix.lower()])
    return file.getvalue()


def write_images(
    root: Path, *, classes: int = 3, per_class: int = 7, width: int = 48, height: int = 32, suffix: str = "jpg"
) -> dict[str, bytes]:
    """Write ``root/class-i/name-j.suffix``; return the content of each file by its sample's key."""
    contents = {}
    for class_id in range(classes):
        folder = root / f"class-{class_id}"
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(per_class):
            content = encode(class_id * 1000 + number, width=width, height=height, suffix=suffix)
            (folder / f"name-{number:03d}.{suffix}").write_bytes(content)
            contents[f"class-{class_id}/name-{number:03d}"] = content
    return contents
