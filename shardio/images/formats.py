"""Describe image formats: their names, suffixes and signatures, and the values that files store.

Pillow's images hold colors of at most 8 bits, or gray values: 16-bit integers, signed 32-bit integers or 32-bit floats.
Pillow truncates, wraps or rejects other values. OpenCV reads more of the pixel types of PNGs and TIFFs than Pillow
does. shardio uses OpenCV only for the kinds of files that OpenCV decodes exactly, and checks that the result has the
declared type and shape.

OpenCV also decodes ordinary PNGs, because it is faster than Pillow. PNGs have checksums, and OpenCV rejects all damaged
PNGs that Pillow rejects. Pillow decodes WebP images, although it takes 1.2 to 1.6 times as long as OpenCV, because
OpenCV accepts one in sixteen of the damaged WebP images that Pillow rejects.
"""

from __future__ import annotations

import io
import re
import struct
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.images.jpeg.head import JPEG_START
from shardio.images.netpbm import decode_netpbm, read_layout
from shardio.images.pictures import Pixels, check_size
from shardio.process import let_through
from shardio.values import count

if TYPE_CHECKING:
    import PIL.Image


PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"

IHDR = struct.Struct(">IIBBBBB")
"""The data of a PNG's first chunk: width, height, bit depth, color type, compression, filter, interlace (11.2.1)."""

COLOR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}
"""The color types of gray, gray with alpha, RGB and RGBA, by number of channels."""

_CHUNK_HEAD = struct.Struct(">I4s")

_CRITICAL_CHUNKS = frozenset((b"IHDR", b"PLTE", b"IDAT", b"IEND"))

_PAETH = 4


class ImageFormat(NamedTuple):
    """An image format that shardio packs and reads. :mod:`shardio.testing.image_format` has tests for formats.

    Attributes:
        name: Pillow's name for the format.
        suffixes: The suffixes of the format's files, which are also the names of samples' fields.
        signature: A pattern that matches the first 16 bytes of every file in this format. If the pattern is None,
            Pillow identifies the format, which takes longer.
    """

    name: str
    suffixes: tuple[str, ...]
    signature: re.Pattern[bytes] | None


_FORMATS = (
    ImageFormat("JPEG", ("jpg", "jpeg"), re.compile(re.escape(JPEG_START))),
    ImageFormat("PNG", ("png",), re.compile(re.escape(PNG_SIGNATURE))),
    ImageFormat("WEBP", ("webp",), re.compile(rb"RIFF.{4}WEBP", re.DOTALL)),
    ImageFormat("BMP", ("bmp",), None),
    ImageFormat("TIFF", ("tif", "tiff"), re.compile(rb"II\*\x00|MM\x00\*")),
    ImageFormat("PPM", ("ppm", "pgm"), None),
)
"""The formats that shardio packs and reads. To add a format that Pillow reads, add a line here."""

IMAGE_FORMATS = {suffix: image_format.name for image_format in _FORMATS for suffix in image_format.suffixes}
"""The format of each suffix. The suffix is also the name of a sample's field."""

IMAGE_FIELDS = tuple(IMAGE_FORMATS)
"""The fields that contain images."""

JPEG_FIELDS = ("jpg", "jpeg")
"""Fields that usually hold JPEGs."""

PIXEL_FIELDS = ("ppm", "pgm")
"""Fields that usually hold uncompressed pixels, row by row."""

UNCOMPRESSED = frozenset(("bmp", *PIXEL_FIELDS))
"""Fields of formats that are rarely compressed."""

ConvertedFormat = Literal["jpeg", "png", "webp", "ppm"]
"""The formats that images can be converted to."""

CONVERTIBLE = frozenset(
    ["avif", "dib", "gif", "ico", "j2k", "jfif", "jp2", "jpe", "jpf", "jpx", "pbm", "pcx", "pnm", "qoi", "tga"]
).difference(IMAGE_FORMATS)
"""Suffixes of other formats that Pillow reads. shardio packs such images only if it converts them."""

_OTHER_IMAGES = CONVERTIBLE.union(["arw", "cr2", "cr3", "dng", "heic", "heif", "hif", "nef", "jxl", "svg"]).difference(
    IMAGE_FORMATS
)
"""Suffixes of image formats that shardio neither reads nor packs without converting them."""


def is_convertible(field: str) -> bool:
    """Return whether a field's images may be converted: images of any format may, except masks such as ``mask.png``."""
    return field == "image" or field in IMAGE_FORMATS or field in CONVERTIBLE


def holds_images(field: str) -> bool:
    """Return whether a field holds images: it is ``image`` (for any format), or its name has an image's suffix."""
    return field == "image" or field.rpartition(".")[2] in IMAGE_FORMATS


def read_format(path: Path) -> str | None:
    """Return Pillow's name for an image file's format, such as ``"JPEG"``, or None if the file is not an image.

    Only the header is read. The file's name is ignored.
    """
    with path.open("rb") as file:
        return _find_format(file)


def find_format(content: bytes) -> str | None:
    """Return the format of an image file's bytes, as :func:`read_format` does."""
    return _find_format(io.BytesIO(content))


def find_field(content: bytes) -> str:
    """Return the name of the field for an image: its format's usual suffix, or ``image`` if it has none."""
    if content.startswith(b"P5"):
        return "pgm"
    found = find_format(content)
    return next((suffix for suffix, name in IMAGE_FORMATS.items() if name == found), "image")


def describe_other_images(paths: Iterable[Path]) -> str:
    """Return a message that counts the images in unsupported formats by suffix, or "" if there are none.

    Args:
        paths: The files that were left out.
    """
    counts = Counter(path.suffix.lower() for path in paths if path.suffix[1:].lower() in _OTHER_IMAGES)
    if not counts:
        return ""
    return (
        f"left out images in other formats ({', '.join(f'{counts[suffix]} {suffix}' for suffix in sorted(counts))}): "
        f"only .{', .'.join(IMAGE_FIELDS)} files are read. Convert those images, as shardio pack --convert-to does. If "
        "only a file's suffix is unusual (such as .jfif), rename it"
    )


def _find_format(file: BinaryIO) -> str | None:
    start = file.read(16)
    file.seek(0)
    for image_format in _FORMATS:
        if image_format.signature is not None and image_format.signature.match(start):
            return image_format.name
    import PIL.Image  # Pillow is imported only when an image needs it: see crop_plan.py.

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Decoding repeats the warnings.
            with PIL.Image.open(file) as image:
                return image.format
    except pillow_errors() as error:  # Pillow's readers may raise any of these errors for bytes that are not an image.
        let_through(error)
        return None


@cache
def pillow_errors() -> tuple[type[Exception], ...]:
    """Return the errors that Pillow raises for damaged files.

    The errors include neither MemoryError, which does not mean that a file is damaged, nor user-defined errors, which a
    signal handler may raise.
    """
    import PIL.Image  # Pillow is imported only when an image needs it: see crop_plan.py.

    return (
        ArithmeticError,
        AssertionError,
        AttributeError,
        EOFError,
        LookupError,
        OSError,
        RuntimeError,
        SyntaxError,
        TypeError,
        ValueError,
        Warning,  # The user may turn warnings into errors.
        struct.error,
        zlib.error,
        PIL.Image.DecompressionBombError,
    )


@contextmanager
def errors_of_pillow() -> Iterator[None]:
    """Convert any error that Pillow raises for a damaged file to ValueError."""
    from PIL import UnidentifiedImageError

    try:
        yield
    except pillow_errors() as error:
        let_through(error)
        if isinstance(error, ValueError):
            raise
        if isinstance(error, UnidentifiedImageError):  # The message contains a memory address.
            raise ValueError("it is not an image in a known format") from error
        raise ValueError(str(error) or repr(error)) from error


@contextmanager
def opened_by_pillow(content: bytes) -> Iterator[PIL.Image.Image]:
    """Open an image for a ``with`` block, and convert any error that Pillow raises in the block to ValueError."""
    import PIL.Image  # Pillow is imported only when an image needs it: see crop_plan.py.

    with errors_of_pillow(), PIL.Image.open(io.BytesIO(content)) as image:
        yield image


def strip_png(content: bytes) -> bytes | None:
    """Return a PNG without ancillary chunks, such as profiles, or None if any chunk is damaged.

    For ancillary chunks, libpng may print warnings, and OpenCV adds an alpha channel for a transparent color. libpng
    also prints errors for damaged chunks, so this function compares the checksums.
    """
    view, offset = memoryview(content), len(PNG_SIGNATURE)
    kept: list[bytes | memoryview] = [PNG_SIGNATURE]
    while offset + 12 <= len(content):
        length, name = _CHUNK_HEAD.unpack_from(content, offset)
        stop = offset + 12 + length
        checksum = int.from_bytes(view[stop - 4 : stop], "big")
        if stop > len(content) or zlib.crc32(view[offset + 4 : stop - 4]) != checksum:
            return None
        if name in _CRITICAL_CHUNKS:
            kept.append(view[offset:stop])
        if name == b"IEND":
            return b"".join(kept)
        offset = stop
    return None


def encode_png(
    values: NDArray[Any], *, icc_profile: bytes | None = None, transparency: tuple[int, ...] | None = None
) -> bytes:
    """Encode values without loss as a 16-bit PNG.

    Pillow cannot encode such colors, because its color images have at most 8 bits per channel.

    Args:
        values: uint16 [height, width] or [height, width, channels], with 1 to 4 channels.
        icc_profile: The color profile.
        transparency: The transparent color, one value for each channel.
    """
    height, width = values.shape[:2]
    num_channels = values.shape[2] if values.ndim == 3 else 1
    big_endian = np.ascontiguousarray(values.reshape(height, width * num_channels), ">u2")
    head = IHDR.pack(width, height, 16, COLOR_TYPES[num_channels], 0, 0, 0)
    chunks = [_write_chunk(b"IHDR", head)]
    if icc_profile is not None:
        chunks.append(_write_chunk(b"iCCP", b"ICC Profile\0\0" + zlib.compress(icc_profile)))
    if transparency is not None:
        chunks.append(_write_chunk(b"tRNS", struct.pack(f">{num_channels}H", *transparency)))
    rows = _filter_by_paeth(big_endian.view(np.uint8), 2 * num_channels)
    chunks += [_write_chunk(b"IDAT", zlib.compress(rows)), _write_chunk(b"IEND", b"")]
    return PNG_SIGNATURE + b"".join(chunks)


def _write_chunk(name: bytes, data: bytes) -> bytes:
    return _CHUNK_HEAD.pack(len(data), name) + data + zlib.crc32(name + data).to_bytes(4, "big")


def _filter_by_paeth(rows: NDArray[np.uint8], stride: int) -> bytes:
    """Filter rows of bytes with the Paeth predictor (clause 9.4). A pixel has ``stride`` bytes."""
    padded = np.zeros((rows.shape[0] + 1, rows.shape[1] + stride), np.int16)
    padded[1:, stride:] = rows
    left, above, corner = padded[1:, :-stride], padded[:-1, stride:], padded[:-1, :-stride]
    by_left, by_above, by_corner = np.abs(above - corner), np.abs(left - corner), np.abs(left + above - 2 * corner)
    predicted = np.where(by_above <= by_corner, above, corner)
    predicted = np.where((by_left <= by_above) & (by_left <= by_corner), left, predicted)
    filtered = np.full((len(rows), rows.shape[1] + 1), _PAETH, np.uint8)
    filtered[:, 1:] = rows - predicted.astype(np.uint8)
    return filtered.tobytes()


_PNG_DEPTH = 24
"""The offset of the bit depth in a PNG (PNG specification, 11.2.2)."""

_SILENT = 0
"""OpenCV's lowest log level."""

_LOG_LEVEL_LOCK = Lock()
"""A lock for OpenCV's log level, which is global."""


class ValueFormat(NamedTuple):
    """The form in which an image file stores its values.

    Attributes:
        dtype: The values' type, in native byte order.
        shape: Height, width and, unless there is a single channel, the number of channels.
        is_in_pillow: Whether Pillow's image holds the same values.
        decode: A function that decodes the file to these values, [height, width] or [height, width, channels]; None if
            no decoder is exact.
        has_alpha: Whether the last of 2 or 4 channels is an alpha channel, and the others are not multiplied by it.
        white: The value of white, the largest that a pixel may have. Pillow scales values unless white is 255 or
            65,535.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_in_pillow: bool
    decode: Callable[[bytes], NDArray[Any]] | None = None
    has_alpha: bool = True
    white: int | None = None

    @property
    def num_channels(self) -> int:
        """The number of channels."""
        return self.shape[2] if len(self.shape) == 3 else 1

    def describe(self) -> str:
        """Return the type and the number of channels in words, such as ``3 channels of uint16``."""
        return f"{count(self.num_channels, 'channel')} of {self.dtype.name}"

    def scale(self, values: NDArray[Any]) -> NDArray[Any]:
        """Scale values as Pillow does, so that all bits of white are set."""
        full = np.iinfo(self.dtype).max
        return values if self.white in (None, full) else np.rint(values * (full / self.white)).astype(self.dtype)

    def decode_exactly(self, content: bytes, max_pixels: int) -> NDArray[Any]:
        """Return the values that a file of this format stores, as a writable array.

        Raises:
            ValueError: If the image is damaged or too large (TooManyPixels), or cannot be decoded exactly.
        """
        check_size(self.shape[0], self.shape[1], max_pixels)
        if self.decode is None:
            raise ValueError(
                f"it stores {self.describe()} in a form that none of shardio's decoders reads exactly: store the "
                "values in an npy field, or as PNG or TIFF with 1, 3 or 4 interleaved channels"
            )
        values = self.decode(content)
        if values.dtype != self.dtype or values.shape != self.shape:
            raise ValueError(
                f"it declares {self.describe()} of shape {self.shape}, but was decoded to {values.dtype.name} of shape "
                f"{values.shape}"
            )
        return values


def read_value_format(content: bytes) -> ValueFormat | None:
    """Return the value format of an image file.

    Return None if the file is damaged, or if it stores unsigned values of at most 8 bits that Pillow does not change.
    Pillow scales the values of a PGM or PPM file if the declared maximum is not 255. In a TIFF file, Pillow drops extra
    channels, and divides colors by the alpha channel if the file stores colors multiplied by alpha.
    """
    if content.startswith(PNG_SIGNATURE):
        return _read_png(content)
    if content[:4] in _TIFF_SIGNATURES:
        return _read_tiff(content)
    if content[:2] in (b"P2", b"P3", b"P5", b"P6"):
        return _read_pnm(content)
    if content.startswith(_JPEG_2000_SIGNATURES):
        return _read_jpeg_2000(content)
    return _read_avif(content) if content[4:12] in (b"ftypavif", b"ftypavis") else None


def find_clipped_type(content: bytes) -> str | None:
    """Return the type of an image's gray values if conversion to RGB clips them, else None.

    Pillow keeps the upper 8 bits of colors, but clips gray values to 8 bits, and treats signed bytes as unsigned.
    """
    stored = read_value_format(content)
    return stored.dtype.name if stored is not None and stored.num_channels == 1 and stored.dtype != np.uint8 else None


def is_for_opencv(image: PIL.Image.Image, content: bytes) -> bool:
    """Return whether an image is a PNG that OpenCV decodes as Pillow does: still, non-interlaced, with 8-bit colors."""
    if image.format != "PNG" or image.mode not in ("RGB", "RGBA") or getattr(image, "is_animated", False):
        return False
    return content[_PNG_DEPTH] == 8 and "interlace" not in image.info


def decode_by_opencv(content: bytes) -> Pixels | None:
    """Decode a whole PNG, ignoring transparency and orientation. Return None if the PNG is damaged or too large."""
    import cv2

    if (stripped := strip_png(content)) is None:
        return None
    try:
        pixels = cv2.imdecode(np.frombuffer(stripped, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error:  # A side is longer than OpenCV allows.
        return None
    return None if pixels is None else np.asarray(cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB, dst=pixels), np.uint8)


def decode_unchanged(content: bytes) -> NDArray[Any] | None:
    """Decode an image to the values that it stores, with red before blue. Return None if it is damaged or too large.

    OpenCV's log messages about unusual TIFFs do not name the file, so this function silences them.
    """
    import cv2

    with _LOG_LEVEL_LOCK:
        level = cv2.utils.logging.setLogLevel(_SILENT)
        try:
            values = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_UNCHANGED)
        except cv2.error:
            return None
        finally:
            cv2.utils.logging.setLogLevel(level)
    if values is None or values.ndim == 2:
        return values
    order = {3: [2, 1, 0], 4: [2, 1, 0, 3]}
    return np.ascontiguousarray(values[..., order[values.shape[2]]])


def _read_png(content: bytes) -> ValueFormat | None:
    start = len(PNG_SIGNATURE) + 8
    if len(content) < start + IHDR.size:
        return None
    width, height, depth, color_type, *_ = IHDR.unpack_from(content, start)
    num_channels = {color: number for number, color in COLOR_TYPES.items()}.get(color_type)
    if depth != 16 or num_channels is None:
        return None
    return _make_format(np.uint16, height, width, num_channels, is_in_pillow=num_channels == 1, decode=_decode_png)


def _decode_png(content: bytes) -> NDArray[Any]:
    stripped = strip_png(content)
    values = None if stripped is None else decode_unchanged(stripped)
    if values is None:
        raise ValueError("the PNG is truncated or damaged")
    is_gray_with_alpha = content[len(PNG_SIGNATURE) + 8 + 9] == COLOR_TYPES[2]
    return values[..., [0, 3]] if is_gray_with_alpha else values  # OpenCV decodes gray to three equal channels.


_TIFF_SIGNATURES = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_BIG_TIFF = 43

_WIDTH, _HEIGHT, _BITS, _PHOTOMETRIC, _SAMPLES, _PLANES, _EXTRA, _KINDS = 256, 257, 258, 262, 277, 284, 338, 339
_ORIENTATION, _TRANSPOSING = 274, 5
"""TIFF tags (TIFF 6.0, sections 8 and 18 to 20), and the first orientation that swaps rows and columns."""

_GRAY_OR_RGB = (0, 1, 2)
_UNSIGNED, _SIGNED, _FLOATING = 1, 2, 3
_NUMPY_KINDS = {_UNSIGNED: "u", _SIGNED: "i", _FLOATING: "f", 5: "i", 6: "c"}
_UNASSOCIATED = 2

_IN_PILLOW = {("u", 2), ("i", 2), ("i", 4), ("f", 4)}
"""The kinds and sizes of gray values that Pillow's images hold."""


def _read_tiff(content: bytes) -> ValueFormat | None:
    from PIL import TiffImagePlugin  # Pillow is imported only when an image needs it: see crop_plan.py.

    is_big = _BIG_TIFF in content[2:4]
    try:
        tags = TiffImagePlugin.ImageFileDirectory_v2(content[: 16 if is_big else 8])
        file = io.BytesIO(content)
        file.seek(tags.next)
        tags.load(file)
        height, width, samples = (int(tags.get(tag, 1)) for tag in (_HEIGHT, _WIDTH, _SAMPLES))
        bits, kinds = {*tags.get(_BITS, (1,))}, {*tags.get(_KINDS, (_UNSIGNED,))}
        photometric, planes, orientation = (int(tags.get(tag, 1)) for tag in (_PHOTOMETRIC, _PLANES, _ORIENTATION))
        extra: tuple[int, ...] = tuple(tags.get(_EXTRA, ()))
    except pillow_errors() as error:  # Pillow's reader may raise any of these errors for damaged files.
        let_through(error)
        return None
    if _TRANSPOSING <= orientation <= 8:  # Both Pillow and OpenCV turn TIFFs upright.
        height, width = width, height
    if photometric not in _GRAY_OR_RGB or bits == {1}:
        is_known = max(bits) <= 8 and kinds == {_UNSIGNED}
        return None if is_known else _make_format(np.uint16, height, width, samples, is_in_pillow=False)
    num_bits, kind = max(bits), _NUMPY_KINDS.get(max(kinds), "u")
    is_uniform = len(bits) == len(kinds) == 1 and num_bits in (8, 16, 32, 64) and (kind, num_bits) != ("f", 8)
    if not is_uniform or kind == "c":
        # As in PNGs, Pillow scales 2-bit and 4-bit gray values. It unpacks 12-bit values and rejects most other depths.
        is_in_pillow = samples == 1 and kinds == {_UNSIGNED}
        is_narrow = is_in_pillow and num_bits <= 8
        return None if is_narrow else _make_format(np.uint16, height, width, samples, is_in_pillow=is_in_pillow)
    dtype = np.dtype(f"{kind}{num_bits // 8}")
    has_alpha = samples not in (2, 4) or extra in ((), (_UNASSOCIATED,))
    if dtype == np.uint8 and has_alpha and samples <= 4:
        return None
    is_readable = samples == 1 or (samples in (3, 4) and planes == 1)
    if dtype == np.float16 or (dtype.itemsize == 1 and photometric == 0):
        is_readable = False  # OpenCV cannot read float16, and inverts 8-bit values if 0 means white.
    is_in_pillow = samples == 1 and (dtype.kind, dtype.itemsize) in _IN_PILLOW
    decode = _decode_tiff if is_readable else None
    return _make_format(dtype, height, width, samples, is_in_pillow=is_in_pillow, decode=decode, has_alpha=has_alpha)


def _decode_tiff(content: bytes) -> NDArray[Any]:
    values = decode_unchanged(content)
    if values is None:
        raise ValueError("the TIFF is truncated, damaged, or compressed in an unknown way")
    return values


def _read_pnm(content: bytes) -> ValueFormat | None:
    """Read the header of a PGM or PPM. Pillow scales the values if the declared maximum is not 255."""
    layout = read_layout(content)
    if layout is None or layout.white == 255 or not 0 < layout.white < 1 << 16:
        return None
    _, *shape, white, _ = layout
    dtype = np.uint8 if white < 256 else np.uint16
    return _make_format(dtype, *shape, is_in_pillow=False, decode=decode_netpbm, white=white)


_JPEG_2000_SIGNATURES = (b"\xff\x4f\xff\x51", b"\0\0\0\x0cjP  ")
_CODESTREAM = _JPEG_2000_SIGNATURES[0]
_COMPONENTS, _COMPONENT_DEPTH = 40, 42
"""The offsets, in a codestream, of the number of components and of the first component's depth (ISO/IEC 15444-1,
A.5.1)."""


def _read_jpeg_2000(content: bytes) -> ValueFormat | None:
    start = content.find(_CODESTREAM)
    if start < 0 or len(content) < start + _COMPONENT_DEPTH + 1:
        return None
    num_channels = int.from_bytes(content[start + _COMPONENTS : start + _COMPONENT_DEPTH], "big")
    x1, y1, x0, y0 = (int.from_bytes(content[start + 8 + 4 * i : start + 12 + 4 * i], "big") for i in range(4))
    depth, is_signed = (content[start + _COMPONENT_DEPTH] & 127) + 1, content[start + _COMPONENT_DEPTH] >> 7
    if not is_signed and depth <= 8:
        return None
    is_in_pillow = not is_signed and depth == 16 and num_channels == 1
    return _make_format(np.int16 if is_signed else np.uint16, y1 - y0, x1 - x0, num_channels, is_in_pillow=is_in_pillow)


_AVIF_HIGH_DEPTH = 0x40


def _read_avif(content: bytes) -> ValueFormat | None:
    """Recognize 10-bit and 12-bit AVIF images by their configuration (AV1 in ISOBMFF, 2.3.3)."""
    start = content.find(b"av1C")
    if start < 0 or len(content) < start + 8 or not content[start + 6] & _AVIF_HIGH_DEPTH:
        return None
    at = content.find(b"ispe")
    width, height = (int.from_bytes(content[at + 8 + 4 * i : at + 12 + 4 * i], "big") for i in range(2))
    return _make_format(np.uint16, height, width, 3, is_in_pillow=False)


def _make_format(dtype: Any, height: int, width: int, num_channels: int, **others: Any) -> ValueFormat:
    shape = (height, width) if num_channels == 1 else (height, width, num_channels)
    return ValueFormat(np.dtype(dtype), shape, **others)
