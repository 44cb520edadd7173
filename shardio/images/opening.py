"""Open an image's bytes with the first decoder that reads them, or decode a whole image."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from shardio.files import FileRange
from shardio.images.decoded_cache import find_key
from shardio.images.formats import (
    PNG_SIGNATURE,
    decode_by_opencv,
    errors_of_pillow,
    find_format,
    is_for_opencv,
    opened_by_pillow,
    read_value_format,
)
from shardio.images.jpeg import Box, cut_rows, cut_tiles, has_tiles, read_tiles, refuse_damage, write_harmless
from shardio.images.jpeg.head import (
    APP1,
    EOI,
    JPEG_START,
    RST0,
    USUAL_FACTORS,
    JpegHead,
    marker_bytes,
    read_head,
    why_irregular,
)
from shardio.images.netpbm import open_pixels
from shardio.images.pictures import (
    DEFAULT_MAX_PIXELS,
    UPRIGHT,
    DecodedPicture,
    DecoderName,
    Orientation,
    Part,
    Picture,
    Pixels,
    Turn,
    check_size,
    read_turn,
)
from shardio.kernel import find_functions
from shardio.kernel.functions import Kept, scratch_pixels

if TYPE_CHECKING:
    import PIL.Image

    from shardio.images.decoded_cache import DecodedCache


_SAMPLE_FORMAT, _SIGNED = 339, 2
"""The TIFF tag that specifies the kind of values, and its value for signed integers (TIFF 6.0, section 19)."""

_LEFTOVER = re.compile(r"Corrupt JPEG data: [0-9]+ extraneous bytes before marker 0x(d[0-9])")
"""Matches libjpeg's warning about a frame that ends before its scan. The pixels are complete nevertheless."""


def open_image(
    content: bytes | FileRange,
    *,
    orientation: Orientation = "ignore",
    max_pixels: int = DEFAULT_MAX_PIXELS,
    cache: DecodedCache | None = None,
) -> Picture:
    """Open an image of any common format.

    libjpeg-turbo decodes only the requested parts of JPEGs, and damaged data raises an error. 8-bit binary PGM and PPM
    files are not decoded: only the requested rows are read. CMYK JPEGs and all other formats are decoded in full, with
    the same pixels as Pillow's ``convert("RGB")``.

    Args:
        content: The bytes of an image file, or where to read them.
        orientation: Whether to apply the EXIF orientation. Pillow always applies a TIFF's orientation.
        max_pixels: The maximum number of pixels.
        cache: The cache for decoded JPEGs.

    Raises:
        ValueError: If the image is damaged, too large, or of an unknown format.
    """
    if (found := open_pixels(content, max_pixels)) is not None:
        return found
    key = 0 if cache is None else find_key(content)
    if cache is not None and key and (kept := cache.find(key)) is not None:
        check_size(*kept.size, max_pixels)
        return JpegPicture(content, kept.size, kept.turn, Kept(None, kept=kept.address))
    if isinstance(content, FileRange):
        content = content.read()
        key = key and find_key(content)  # The file may have changed.
    for open_picture in _OPENERS:
        if (picture := open_picture(content, orientation, max_pixels)) is not None:
            if cache is not None and key and isinstance(picture, JpegPicture):
                picture.kept = Kept(content, key, cache.address, cache.file)
            return picture
    return open_by_pillow(content, orientation, max_pixels)


def decode_image(
    content: bytes | FileRange, *, orientation: Orientation = "ignore", max_pixels: int = DEFAULT_MAX_PIXELS
) -> Pixels:
    """Decode a whole image of any common format to RGB. Arguments and errors are as in :func:`open_image`.

    Returns:
        uint8 [height, width, 3], contiguous and writable.
    """
    picture = open_image(content, orientation=orientation, max_pixels=max_pixels)
    return np.array(picture.read(Box(0, 0, *picture.size)))


def decode_pil(
    content: bytes | FileRange, *, orientation: Orientation = "ignore", max_pixels: int = DEFAULT_MAX_PIXELS
) -> PIL.Image.Image:
    """Decode an image to an RGB Pillow image, with the same pixels and errors as :func:`decode_image`."""
    import PIL.Image  # Pillow is imported only when an image needs it: see crop_plan.py.

    return PIL.Image.fromarray(decode_image(content, orientation=orientation, max_pixels=max_pixels))


def decode_unconverted(
    content: bytes, *, orientation: Orientation = "ignore", max_pixels: int = DEFAULT_MAX_PIXELS
) -> NDArray[Any]:
    """Decode a whole image to the values that its file stores. Arguments and errors are as in :func:`open_image`.

    Returns:
        The stored values in native byte order, in a writable array [height, width] or [height, width, channels]. Their
        type is the stored type, with three exceptions: one-bit values become bool, signed 16-bit values in a TIFF
        become int32, and 2-bit or 4-bit gray is scaled to uint8. For an image with a palette, the values are the
        indices.

    Raises:
        ValueError: As for :func:`open_image`, or if the values cannot be decoded exactly.
    """
    stored = read_value_format(content)
    if stored is not None and not stored.is_in_pillow:
        values = stored.decode_exactly(content, max_pixels)
        is_to_turn = orientation == "apply" and content.startswith(PNG_SIGNATURE)  # TIFFs are upright already.
        return _read_turn(content).apply(values) if is_to_turn else values
    if _is_rgb(content, max_pixels):
        return decode_image(content, orientation=orientation, max_pixels=max_pixels)
    pixels = np.array(_load_unconverted(content, orientation))
    return pixels.astype(pixels.dtype.newbyteorder("="), copy=False)  # TIFFs may be big-endian.


def decode_unconverted_pil(
    content: bytes, *, orientation: Orientation = "ignore", max_pixels: int = DEFAULT_MAX_PIXELS
) -> PIL.Image.Image:
    """Decode an image to a Pillow image of the stored mode, with the same values as :func:`decode_unconverted`.

    Raises:
        ValueError: As for :func:`decode_unconverted`, or if a Pillow image cannot hold the values.
    """
    stored = read_value_format(content)
    if stored is not None and not stored.is_in_pillow:
        check_size(stored.shape[0], stored.shape[1], max_pixels)
        raise ValueError(
            f"it stores {stored.describe()}, which a Pillow image cannot hold: use decode='array', or decoders= with "
            "your own function"
        )
    if _is_rgb(content, max_pixels):
        return decode_pil(content, orientation=orientation, max_pixels=max_pixels)
    return _load_unconverted(content, orientation)


def _read_turn(content: bytes) -> Turn:
    with opened_by_pillow(content) as image:
        return read_turn(image)


def _is_rgb(content: bytes, max_pixels: int) -> bool:
    import PIL.Image

    try:
        with opened_by_pillow(content) as image:
            check_size(image.height, image.width, max_pixels)
            return image.mode == "RGB"
    except ValueError:
        # Pillow cannot read this format, so a decoder in _OPENERS reads it.
        if (name := find_format(content)) is not None and name not in PIL.Image.OPEN:
            return True
        raise


def _load_unconverted(content: bytes, orientation: Orientation) -> PIL.Image.Image:
    import PIL.Image
    import PIL.ImageOps

    with errors_of_pillow():
        image = PIL.Image.open(io.BytesIO(content))
        image.load()
        return PIL.ImageOps.exif_transpose(image) if orientation == "apply" else image


class JpegPicture(Picture):
    """A JPEG whose parts are decoded when they are read.

    Attributes:
        turn: The turn that makes the stored picture upright.
        kept: The kept image, or the JPEG whose decoded image the kernel will keep; None if nothing is kept.
    """

    decoder_name = "libjpeg"

    def __init__(
        self, source: bytes | FileRange, size: tuple[int, int], turn: Turn = UPRIGHT, kept: Kept | None = None
    ) -> None:
        self._source, self.turn, self.kept = source, turn, kept
        self.size = turn.size(*size)
        if kept is not None:
            self.kernel_name = "cache"

    @property
    def content(self) -> bytes:
        """The bytes of the file."""
        return self._source if isinstance(self._source, bytes) else self._source.read()

    @cached_property
    def _head(self) -> JpegHead:
        return read_head(self.content)

    def part(self, box: Box) -> Part:
        head, turn = self._head, self.turn
        stored = turn.stored_box(box, head.height, head.width)
        decode = prepare_part(self.content, head, stored, is_regular=why_irregular(head) is None)
        return decode if turn == UPRIGHT else lambda: turn.apply(decode())

    def prepare_copy(self, box: Box) -> Callable[[Pixels], object]:
        head = self._head
        if self.turn != UPRIGHT or box != (0, 0, head.height, head.width) or has_tiles(self.content):
            return super().prepare_copy(box)

        def decode(out: Pixels) -> None:
            is_direct = out.flags.c_contiguous
            pixels = decode_whole(self.content, head, out=out if is_direct else None)
            if not is_direct:
                np.copyto(out, pixels)

        return decode


def open_by_libjpeg(content: bytes, orientation: Orientation, max_pixels: int) -> Picture | None:
    """Open a JPEG. Return None for other formats and for JPEGs that only Pillow can convert to RGB.

    Raises:
        ValueError: If the JPEG is damaged or too large.
    """
    if not content.startswith(JPEG_START):
        return None
    functions = find_functions()
    if functions is not None and orientation == "ignore" and (size := functions.read_size(content)) is not None:
        check_size(*size, max_pixels)
        return JpegPicture(content, size)
    try:
        head = read_head(content)
    except ValueError:
        with suppress(KeyError):
            simplejpeg.decode_jpeg_header(content)  # If libjpeg finds an error, this call raises it.
        return None
    if not _can_convert(content, head):
        return None
    check_size(head.height, head.width, max_pixels)
    may_be_turned = orientation == "apply" and any(segment.marker == APP1 for segment in head.segments)
    return JpegPicture(content, (head.height, head.width), _read_turn(content) if may_be_turned else UPRIGHT)


def _can_convert(content: bytes, head: JpegHead) -> bool:
    if len(head.factors) not in (1, 3) or not head.height or not head.width:
        return False
    if len(head.factors) == 1 or head.factors in USUAL_FACTORS:
        return True
    try:
        simplejpeg.decode_jpeg_header(content)
    except (ValueError, KeyError):  # simplejpeg raises KeyError for sampling factors that only libjpeg supports.
        return False
    return True


class _Cut(NamedTuple):
    """A smaller JPEG, the part of the image that it shows, and the marker that ends the leftover bytes of its scan."""

    content: bytes | bytearray
    shown: Box
    next_marker: int | None


def prepare_part(content: bytes, head: JpegHead, box: Box, *, is_regular: bool) -> Callable[[], NDArray[np.uint8]]:
    """Cut out a smaller JPEG that shows a part of the image, and return a function that decodes it.

    Args:
        content: The file.
        head: The file's head.
        box: The part of the image.
        is_regular: Whether parts of the image can be decoded separately.

    Returns:
        A function that returns RGB pixels, uint8 [box.height, box.width, 3], equal to those of a full decode. The
        pixels are valid until this thread decodes again. The function raises ValueError if the image is truncated, or
        damaged in the part that is read.
    """
    cut = _cut(content, head, box) if is_regular else None

    def crop(pixels: NDArray[np.uint8], shown: Box) -> NDArray[np.uint8]:
        top, left = box.top - shown.top, box.left - shown.left
        return pixels[top : top + box.height, left : left + box.width]

    def decode() -> NDArray[np.uint8]:
        if cut is not None and (pixels := _decode_cut(cut)) is not None:
            return crop(pixels, cut.shown)
        return crop(decode_whole(content, head), Box(0, 0, head.height, head.width))

    return decode


def decode_whole(content: bytes, head: JpegHead, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """Decode a JPEG to uint8 [height, width, 3].

    Args:
        content: The file.
        head: The file's head.
        out: The destination of the pixels, without gaps between the rows; by default, scratch memory.

    Raises:
        ValueError: If libjpeg-turbo reports an error, or a warning that is not harmless: see
            :mod:`shardio.images.jpeg`.
    """
    pixels = scratch_pixels("decoded", head.height, head.width) if out is None else out
    try:
        _decode_to(pixels, content)
    except ValueError:
        if (harmless := write_harmless(content, head)) is None:
            raise
        _decode_to(pixels, harmless, strict=False)
    return pixels


def _decode_to(pixels: NDArray[np.uint8], content: bytes | bytearray, *, strict: bool = True) -> None:
    """Decode a JPEG of a known size.

    Raises:
        ValueError: If libjpeg-turbo reports an error or, if ``strict``, a warning. Even after a warning about the scan,
            all pixels have been written.
    """
    decoded = simplejpeg.decode_jpeg(content, buffer=pixels, strict=strict)
    assert decoded.shape == pixels.shape, "shardio and libjpeg read the same size from the head"


def _cut(content: bytes, head: JpegHead, box: Box) -> _Cut | None:
    """Cut out the intervals that contain a box, or the rows above its bottom. Return None if cutting saves no bytes."""
    tiles = read_tiles(content, head)
    if tiles is not None:
        return _Cut(*cut_tiles(content, head, tiles, box), next_marker=None)
    if not content.endswith(marker_bytes(EOI)):
        return None  # The file may be truncated below the box. Only a full decode detects this.
    rows, shown = cut_rows(content, head, box)
    return None if shown.height == head.height else _Cut(rows, shown, _marker_after(head, shown.height))


def _marker_after(head: JpegHead, height: int) -> int:
    """Return the marker after the interval that contains the first MCU below ``height``."""
    rows, row_mcus = head.num_mcus
    if not head.restart_interval:
        return EOI
    interval = height // head.mcu_size[0] * row_mcus // head.restart_interval
    is_last = interval >= (rows * row_mcus - 1) // head.restart_interval
    return EOI if is_last else RST0 + interval % 8


def _decode_cut(cut: _Cut) -> NDArray[np.uint8] | None:
    """Decode a JPEG cut from a file. Return None if the JPEG has an error: a full decode then reports the error."""
    pixels = scratch_pixels("decoded", cut.shown.height, cut.shown.width)
    try:
        _decode_to(pixels, cut.content)
    except ValueError as error:
        leftover = _LEFTOVER.fullmatch(str(error))
        is_expected = leftover is not None and int(leftover[1], 16) == cut.next_marker
        return pixels if is_expected else None
    return pixels


_OPENERS: tuple[Callable[[bytes, Orientation, int], Picture | None], ...] = (open_by_libjpeg,)
"""The decoders, in the order in which they are tried. Each decoder returns None for images that it does not read.

Pillow opens all other images.

To add a decoder, add its function here and its name to :data:`shardio.images.pictures.DecoderName`.
"""


class PillowPicture(Picture):
    """An image of any format that Pillow reads. Reading a part decodes the whole image."""

    def __init__(
        self, content: bytes, height: int, width: int, decoder_name: DecoderName, *, is_for_opencv: bool
    ) -> None:
        self._content, self._is_for_opencv = content, is_for_opencv
        self.size, self.decoder_name = (height, width), decoder_name

    def part(self, box: Box) -> Part:
        return lambda: self._decode()[box.top : box.top + box.height, box.left : box.left + box.width]

    def _decode(self) -> Pixels:
        if self._is_for_opencv:
            pixels = decode_by_opencv(self._content)
            if pixels is not None and pixels.shape[:2] == self.size:
                return pixels  # Otherwise, Pillow reports the error.
        _refuse_damage(self._content)
        with opened_by_pillow(self._content) as image:
            pixels = _convert_to_rgb(image)
        if pixels.shape[:2] != self.size:
            declared, found = (f"{width}×{height}" for height, width in (self.size, pixels.shape[:2]))
            raise ValueError(f"the header declares {declared} pixels, but Pillow decoded {found}")
        return pixels


def open_by_pillow(content: bytes, orientation: Orientation, max_pixels: int) -> Picture:
    """Open an image of any format.

    Raises:
        ValueError: If the image is damaged, too large, or of a format that Pillow does not read.
    """
    with errors_of_pillow(), _open_stored(content) as image:
        check_size(image.height, image.width, max_pixels)
        name: DecoderName = "pillow, clipped" if _is_clipped(image) else "pillow"
        if orientation == "ignore" and image.format != "TIFF":
            return PillowPicture(content, *image.size[::-1], name, is_for_opencv=is_for_opencv(image, content))
        _refuse_damage(content)
        # The orientation, and therefore the size, is known only after the whole file has been read.
        pixels = _convert_to_rgb(image)
        return DecodedPicture(pixels if orientation == "ignore" else read_turn(image).apply(pixels), name)


def _open_stored(content: bytes) -> PIL.Image.Image:
    """Open an image. If Pillow does not support the type of the stored values, the error names the type."""
    import PIL.Image  # Pillow is imported only when an image needs it: see crop_plan.py.

    try:
        return PIL.Image.open(io.BytesIO(content))
    except PIL.UnidentifiedImageError as error:
        if (stored := read_value_format(content)) is None:
            raise
        raise ValueError(
            f"it stores {stored.describe()}, which cannot be converted to RGB: to read it unconverted instead of as a "
            "sample's image, give its field a name such as 'values.tif'"
        ) from error


def _convert_to_rgb(image: PIL.Image.Image) -> Pixels:
    if image.mode == "P":
        image.info.pop("transparency", None)  # Pillow warns about some forms of transparency, but RGB has none.
    return np.array(image.convert("RGB"))


def _refuse_damage(content: bytes) -> None:
    """Raise ValueError if the pixels of a CMYK JPEG are damaged. Pillow does not report such damage."""
    if not content.startswith(JPEG_START):
        return
    try:
        head = read_head(content)
    except ValueError:  # libjpeg-turbo reads the file, or has already raised an error.
        return
    if len(head.factors) == 4:
        refuse_damage(content, head)


def _is_clipped(image: PIL.Image.Image) -> bool:
    """Return whether Pillow clips an image's gray values in the conversion to RGB, or misreads their sign."""
    if image.mode == "L" and image.format == "TIFF":
        return bool(image.tag_v2.get(_SAMPLE_FORMAT) == (_SIGNED,))  # type: ignore[attr-defined]  # TIFFs have tag_v2.
    return image.mode[0] in ("I", "F")
