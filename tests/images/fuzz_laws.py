"""The laws of damaged image files: reading them raises a meaningful error or returns the right pixels."""

from __future__ import annotations

import contextlib
import io
import random
import re
import warnings
from collections.abc import Iterator

import numpy as np
import simplejpeg
from PIL import Image

from shardio.images import JpegPicture, Orientation, Picture, open_image
from shardio.images.jpeg import Box, read_tiles
from shardio.images.jpeg.head import read_head
from shardio.images.netpbm import PixelPicture
from shardio.images.rendering import find_content
from shardio.images.tiling import NotTileable, tile_jpeg
from tests.images.crop_laws import part, render_parts
from tests.images.jpeg_files import scan_start
from tests.images.mutations import Original, Originals, mutate
from tests.images.pictures import TURNS, Array, read_by_pillow

MAX_PIXELS = 2**17
"""A limit that all undamaged files here respect. Files that claim to have more pixels must be rejected."""

TILING_SHARE = 1.0
"""The fraction of files that are also tiled: tiling takes much longer than reading."""

MARKER_OF_NO_SCAN = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")


class LawBrokenError(AssertionError):
    """Reading or tiling a damaged file breaks a law."""


def make_damaged_file(seed: int, originals: Originals) -> tuple[bytes, list[Original], random.Random]:
    """Return the damaged file for a seed, the files that it was made from, and the random generator for the check."""
    rng = random.Random(seed)
    original, other = originals.pick(rng), originals.pick(rng)
    return mutate(original, other, rng), [original, other], rng


def check_file(content: bytes, made_of: list[Original], rng: random.Random) -> list[str]:
    """Read a damaged file, and usually tile it. Return the outcomes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about many unusual files.
        outcomes = check_reading(content, made_of, rng)
        if rng.random() < TILING_SHARE:
            outcomes.append(check_tiling(content))
    return outcomes


def check_reading(content: bytes, made_of: list[Original], rng: random.Random) -> list[str]:
    """Read one or two parts of a file. Return the outcomes."""
    orientation: Orientation = "apply" if rng.random() < 0.2 else "ignore"
    try:
        picture = open_image(content, orientation=orientation, max_pixels=MAX_PIXELS)
    except ValueError as error:
        return ["opening: " + _outcome_of(error)]
    height, width = picture.size
    if height * width > MAX_PIXELS:
        raise LawBrokenError(f"an image of {picture.size} was opened, with more than {MAX_PIXELS} pixels")
    outcomes = []
    for _ in range(rng.randint(1, 2)):
        box = _draw_box(picture.size, rng)
        try:
            pixels = picture.read(box)
        except ValueError as error:
            outcomes.append("reading: " + _outcome_of(error))
        else:
            outcomes.append("reading: " + _judge(pixels, content, picture, made_of, orientation, box))
        if isinstance(picture, JpegPicture | PixelPicture) and orientation == "ignore":
            (pixels,), (is_rendered,) = render_parts(find_content(picture), [box])
            if is_rendered:
                outcomes.append("rendering: " + _judge(pixels, content, picture, made_of, orientation, box))
    return outcomes


def check_tiling(content: bytes) -> str:
    """Tile a file. In strict mode, libjpeg must read the same pixels from both files, or reject both."""
    try:
        tiled = tile_jpeg(content)
    except NotTileable as error:
        return "tiling: " + _outcome_of(error)
    before, after = _read(content, strict=True), _read(tiled, strict=True)
    if (before is None) != (after is None):
        which = "first" if after is None else "second"
        raise LawBrokenError(f"of the file and the tiled file, libjpeg reads only the {which}")
    if before is None or after is None:
        return "tiling: done, and libjpeg reads neither"
    if not np.array_equal(before, after):
        raise LawBrokenError("the tiled file has different pixels")
    return "tiling: done, with the same pixels"


def _outcome_of(error: ValueError) -> str:
    if not str(error).strip():
        raise LawBrokenError(f"an error has no message: {error!r}")
    return "an error"


def _draw_box(size: tuple[int, int], rng: random.Random) -> Box:
    top, left = rng.randrange(size[0]), rng.randrange(size[1])
    return Box(top, left, rng.randint(1, size[0] - top), rng.randint(1, size[1] - left))


def _judge(
    pixels: Array, content: bytes, picture: Picture, made_of: list[Original], orientation: Orientation, box: Box
) -> str:
    """Check pixels. Return the name of the decode that gives equal pixels, usually a full decode by libjpeg or Pillow.

    At damaged restart markers outside the box, libjpeg may lose synchronization, unlike a reader of the tile table. The
    pixels are then those of the undamaged file.
    """
    if pixels.shape != (box.height, box.width, 3):
        raise LawBrokenError(f"the pixels have the shape {pixels.shape}, expected that of {box}")
    if not isinstance(picture, JpegPicture):
        if np.array_equal(pixels, part(_turned(read_by_pillow(content), content, orientation), box)):
            return "Pillow's pixels"
        raise LawBrokenError(f"{box} does not have Pillow's pixels")
    whole = _leniently(content, orientation)
    if whole is not None and np.array_equal(pixels, part(whole, box)):
        return "the pixels of a full decode"
    for repaired in _without_foreign_markers(content):
        intact = _leniently(repaired, orientation)
        if intact is not None and np.array_equal(pixels, part(intact, box)):
            return "the pixels of a full decode without foreign markers"
    for before in _before_damage(content, made_of):
        intact = _leniently(before, orientation)
        if intact is not None and np.array_equal(pixels, part(intact, box)):
            return "the pixels from before the damage, and a full decode " + ("fails" if whole is None else "differs")
    raise LawBrokenError(f"{box} has wrong pixels" + (", a full decode fails" if whole is None else ""))


def _before_damage(content: bytes, made_of: list[Original]) -> Iterator[bytes]:
    """Yield the original files, the file up to the first foreign marker, and its head with the original scans."""
    yield from (original.content for original in made_of)
    with contextlib.suppress(IndexError):
        foreign = MARKER_OF_NO_SCAN.search(content, scan_start(content))
        if foreign is not None:
            yield content[: foreign.start()] + b"\xff\xd9"
    with contextlib.suppress(IndexError):
        head = content[: scan_start(content)]
        yield from (head + original.content[original.segments[-1][1] :] for original in made_of if original.segments)


def _without_foreign_markers(content: bytes) -> Iterator[bytes]:
    """Yield a tiled file without the markers inside its intervals, because libjpeg loses synchronization at them."""
    with contextlib.suppress(ValueError):
        head = read_head(content)
        tiles = read_tiles(content, head)
        if tiles is not None:
            repaired = bytearray(content)
            ends = set((tiles.stops - 2).ravel().tolist())
            for offset in range(head.scan_start, int(tiles.stops[-1, -1]) - 2):
                if repaired[offset] == 0xFF and offset not in ends:
                    repaired[offset + 1] = 0
            yield bytes(repaired)


def _leniently(content: bytes, orientation: Orientation) -> Array | None:
    """Return the pixels that libjpeg decodes despite errors, or None if it decodes none."""
    # libjpeg only warns about an unknown JFIF version or Adobe transform, but simplejpeg rejects such files.
    content = re.sub(rb"JFIF\0.", b"JFIF\0\1", content, count=1, flags=re.DOTALL)
    known = b"\1"
    with contextlib.suppress(ValueError):
        known = b"\2" if len(read_head(content).factors) == 4 else b"\1"  # CMYK files use transforms 0 and 2.
    content = re.sub(rb"(Adobe.{6})[^\0" + known + rb"]", rb"\g<1>" + known, content, count=1, flags=re.DOTALL)
    pixels = _read(content, strict=False)
    return None if pixels is None else _turned(pixels, content, orientation)


def _read(content: bytes, *, strict: bool) -> Array | None:
    try:
        return np.asarray(simplejpeg.decode_jpeg(content, strict=strict))
    except (ValueError, OSError):
        return None


def _turned(pixels: Array, content: bytes, orientation: Orientation) -> Array:
    if orientation == "ignore":
        return pixels
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(TURNS.get(image.getexif().get(274, 1), TURNS[1])(pixels))
