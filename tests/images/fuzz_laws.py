"""The laws of damaged image files: an error that says something, or the right pixels."""

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
from shardio.images.jpeg.markers import read_head
from shardio.images.jpeg.regions import Box
from shardio.images.jpeg.tile_table import read_tiles
from shardio.images.tiling import NotTileable, tile_jpeg
from tests.images.animals import scan_start
from tests.images.by_kernel import draw_parts
from tests.images.crop_laws import SCALES, full_decode, part, scaled_size
from tests.images.mutations import Collection, Specimen, mutate
from tests.images.pictures import TURNS, Array, read_by_pillow

MAX_PIXELS = 2**17
"""More than any file in order here has; files that claim more must be refused."""

TILING_SHARE = 1.0
"""Files of which also the tiling is tried, which takes much longer than reading."""

MARKER_OF_NO_SCAN = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")


class LawBrokenError(AssertionError):
    """A damaged file is read as it must not be."""


def draw_file(seed: int, collection: Collection) -> tuple[bytes, list[Specimen], random.Random]:
    """Return the damaged file of a seed, the files that it was made of, and what decides how it is read."""
    draw = random.Random(seed)
    specimen, other = collection.draw(draw), collection.draw(draw)
    return mutate(specimen, other, draw), [specimen, other], draw


def check_file(content: bytes, made_of: list[Specimen], draw: random.Random) -> list[str]:
    """Read a damaged file, and tile it; return what came of that.

    Raises:
        LawBrokenError: If a law does not hold.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of much that is odd.
        outcomes = check_reading(content, made_of, draw)
        if draw.random() < TILING_SHARE:
            outcomes.append(check_tiling(content))
    return outcomes


def check_reading(content: bytes, made_of: list[Specimen], draw: random.Random) -> list[str]:
    """Ask for one part or two of a file."""
    orientation: Orientation = "apply" if draw.random() < 0.2 else "ignore"
    try:
        picture = open_image(content, orientation=orientation, max_pixels=MAX_PIXELS)
    except ValueError as error:
        return ["opening: " + _said(error)]
    height, width = picture.size
    if height * width > MAX_PIXELS:
        raise LawBrokenError(f"a picture of {picture.size} was opened, of more than {MAX_PIXELS} pixels")
    outcomes = []
    for _ in range(draw.randint(1, 2)):
        scale = draw.choice((1, *SCALES)) if picture.can_scale else 1
        box = _draw_box(scaled_size(picture.size, scale), draw)
        try:
            pixels = picture.read(box, scale)
        except ValueError as error:
            outcomes.append("reading: " + _said(error))
        else:
            outcomes.append("reading: " + _judge(pixels, content, picture, made_of, orientation, box, scale))
        if scale == 1 and isinstance(picture, JpegPicture) and orientation == "ignore":
            (pixels,), (is_drawn,) = draw_parts(content, [box])
            if is_drawn:
                outcomes.append("drawing: " + _judge(pixels, content, picture, made_of, orientation, box, scale))
    return outcomes


def check_tiling(content: bytes) -> str:
    """Tile a file; if that works, it must be read, strictly, as the file itself is, or as little."""
    try:
        tiled = tile_jpeg(content)
    except NotTileable as error:
        return "tiling: " + _said(error)
    before, after = _strictly(content), _strictly(tiled)
    if (before is None) != (after is None):
        raise LawBrokenError(
            f"of the file and the tiled file, libjpeg reads only the {'first' if after is None else 'second'}"
        )
    if before is None or after is None:
        return "tiling: done, and libjpeg reads neither"
    if not np.array_equal(before, after):
        raise LawBrokenError("the tiled file has other pixels")
    return "tiling: done, with the same pixels"


def _said(error: ValueError) -> str:
    if not str(error).strip():
        raise LawBrokenError(f"an error says nothing: {error!r}")
    return "an error"


def _draw_box(size: tuple[int, int], draw: random.Random) -> Box:
    top, left = draw.randrange(size[0]), draw.randrange(size[1])
    return Box(top, left, draw.randint(1, size[0] - top), draw.randint(1, size[1] - left))


def _judge(
    pixels: Array,
    content: bytes,
    picture: Picture,
    made_of: list[Specimen],
    orientation: Orientation,
    box: Box,
    scale: int,
) -> str:
    """Say by whom pixels are right: by a full decode of the same bytes, by libjpeg or Pillow, which does its best.

    Where restart markers are damaged elsewhere, libjpeg may lose its place and a tile table does not: then the
    pixels are those from before the damage.
    """
    if pixels.shape != (box.height, box.width, 3):
        raise LawBrokenError(f"{box} was asked for, and the pixels have the shape {pixels.shape}")
    if not isinstance(picture, JpegPicture):
        if np.array_equal(pixels, part(_turned(read_by_pillow(content), content, orientation), box)):
            return "Pillow's pixels"
        raise LawBrokenError(f"{box} does not have Pillow's pixels")
    whole = _leniently(content, orientation, scale)
    if whole is not None and np.array_equal(pixels, part(whole, box)):
        return "the pixels of a full decode"
    for mended in _without_strays(content):
        intact = _leniently(mended, orientation, scale)
        if intact is not None and np.array_equal(pixels, part(intact, box)):
            return "the pixels of a full decode without stray markers"
    for before in _before_damage(content, made_of):
        intact = _leniently(before, orientation, scale)
        if intact is not None and np.array_equal(pixels, part(intact, box)):
            return "the pixels from before the damage, and a full decode " + ("fails" if whole is None else "differs")
    raise LawBrokenError(
        f"{box} at scale {scale} has wrong pixels" + (", a full decode fails" if whole is None else "")
    )


def _before_damage(content: bytes, made_of: list[Specimen]) -> Iterator[bytes]:
    """Yield what a file was made of, its head with the scans of that, and it as far as markers are a scan's."""
    yield from (specimen.content for specimen in made_of)
    with contextlib.suppress(IndexError):
        stray = MARKER_OF_NO_SCAN.search(content, scan_start(content))
        if stray is not None:
            yield content[: stray.start()] + b"\xff\xd9"
    with contextlib.suppress(IndexError):
        head = content[: scan_start(content)]
        yield from (head + specimen.content[specimen.segments[-1][1] :] for specimen in made_of if specimen.segments)


def _without_strays(content: bytes) -> Iterator[bytes]:
    """Yield a tiled file without the markers that lie inside of its intervals, at which libjpeg loses its place."""
    with contextlib.suppress(ValueError):
        head = read_head(content)
        tiles = read_tiles(content, head)
        if tiles is not None:
            mended = bytearray(content)
            ends = set((tiles.stops - 2).ravel().tolist())
            for place in range(head.scan_start, int(tiles.stops[-1, -1]) - 2):
                if mended[place] == 0xFF and place not in ends:
                    mended[place + 1] = 0
            yield bytes(mended)


def _leniently(content: bytes, orientation: Orientation, scale: int) -> Array | None:
    """Return a JPEG's pixels, as far as libjpeg gets; None if it gives up."""
    try:
        height, width = Image.open(io.BytesIO(content)).size[::-1] if scale > 1 else (0, 0)
        if scale == 1:
            pixels = np.asarray(simplejpeg.decode_jpeg(content, strict=False))
        else:
            pixels = full_decode(content, (height, width), scale, strict=False)
    except (ValueError, OSError):
        return None
    return _turned(pixels, content, orientation)


def _strictly(content: bytes) -> Array | None:
    try:
        return np.asarray(simplejpeg.decode_jpeg(content, strict=True))
    except ValueError:
        return None


def _turned(pixels: Array, content: bytes, orientation: Orientation) -> Array:
    if orientation == "ignore":
        return pixels
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(TURNS.get(image.getexif().get(274, 1), TURNS[1])(pixels))
