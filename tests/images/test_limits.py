"""Files that claim to be huge are refused before memory is allocated for them."""

from __future__ import annotations

import resource
import struct
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path

import PIL.Image
import pytest

from shardio.images import DEFAULT_MAX_PIXELS, Orientation, open_image
from shardio.images.tiling import tile_jpeg
from tests.images.jpeg_files import by_pillow, patch
from tests.images.pictures import exif_of, make_picture, save

SIZE = (20, 30)
TOO_LARGE = "max_pixels|decompression bomb"
"""The error for such a file; Pillow raises it for the largest ones."""
FORMATS = ["JPEG", "PNG", "TIFF", "WEBP", "BMP", "GIF", "PPM"]


def _claim_jpeg(content: bytes, height: int, width: int) -> bytes:
    for offset, value in enumerate(struct.pack(">HH", height, width), start=1):
        content = patch(content, 0xC2 if b"\xff\xc2" in content else 0xC0, offset, value)
    return content


def _bombs(height: int, width: int) -> dict[str, bytes]:
    """Return small files whose headers claim a size."""
    picture = make_picture(*SIZE)
    png = save(picture, "PNG")
    header = struct.pack(">II", width, height) + png[24:29]
    tiff = bytearray(save(picture, "TIFF", compression="raw"))
    directory = struct.unpack_from("<I", tiff, 4)[0]
    for entry in range(
        directory + 2, directory + 2 + 12 * int.from_bytes(tiff[directory : directory + 2], "little"), 12
    ):
        tag, kind, _ = struct.unpack_from("<HHI", tiff, entry)
        if tag in (256, 257):  # ImageWidth, ImageLength (TIFF 6.0)
            struct.pack_into("<H" if kind == 3 else "<I", tiff, entry + 8, width if tag == 256 else height)
    bitmap = bytearray(save(picture, "BMP"))
    struct.pack_into("<ii", bitmap, 18, width, height)
    return {
        "jpeg": _claim_jpeg(by_pillow(picture), height, width),
        "tiled jpeg": _claim_jpeg(tile_jpeg(by_pillow(picture)), height, width),
        "gray jpeg": _claim_jpeg(by_pillow(picture[..., 0].copy()), height, width),
        "progressive jpeg": _claim_jpeg(by_pillow(picture, progressive=True), height, width),
        "cmyk jpeg": _claim_jpeg(by_pillow(picture[..., [0, 1, 2, 0]]), height, width),
        "turned jpeg": _claim_jpeg(by_pillow(picture, exif=exif_of(6)), height, width),
        "png": png[:16] + header + struct.pack(">I", zlib.crc32(b"IHDR" + header)) + png[33:],
        "tiff": bytes(tiff),
        "bmp": bytes(bitmap),
        "gif": b"GIF89a" + struct.pack("<HH", width, height) + save(picture, "GIF")[10:],
    }


@pytest.mark.parametrize("orientation", ["ignore", "apply"])
@pytest.mark.parametrize("file_format", FORMATS)
def test_the_limit_is_the_largest_number_of_pixels_that_is_opened(file_format: str, orientation: Orientation) -> None:
    content = save(make_picture(*SIZE), file_format)
    assert open_image(content, orientation=orientation, max_pixels=600).size == SIZE
    with pytest.raises(ValueError, match="30×20 pixels, more than max_pixels=599: raise max_pixels"):
        open_image(content, orientation=orientation, max_pixels=599)


@pytest.mark.parametrize("content", [pytest.param(content, id=name) for name, content in _bombs(65500, 65500).items()])
@pytest.mark.parametrize("orientation", ["ignore", "apply"])
def test_a_small_file_that_claims_to_be_huge_is_refused(content: bytes, orientation: Orientation) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=TOO_LARGE):
            open_image(content, orientation=orientation)
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("content", [pytest.param(content, id=name) for name, content in _bombs(4000, 4000).items()])
def test_a_custom_limit_holds_for_every_format(content: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="4000×4000 pixels, more than max_pixels=1000000"):
            open_image(content, max_pixels=1_000_000)
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()


def _refuse_all(contents: list[bytes]) -> None:
    """Check that files are refused for their size in a process with little memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 100 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for content in contents:
        with pytest.raises(ValueError, match=TOO_LARGE):
            open_image(content)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the address space from /proc")
def test_no_memory_is_allocated_for_the_claimed_size() -> None:
    code = "from tests.images import test_limits as t; t._refuse_all(list(t._bombs(65500, 65500).values()))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=Path(__file__).parents[2])


def test_the_default_limit_is_pillows() -> None:
    warning_limit = PIL.Image.MAX_IMAGE_PIXELS
    assert warning_limit is not None
    assert 2 * warning_limit == DEFAULT_MAX_PIXELS
