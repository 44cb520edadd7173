"""Image decoding by Pillow, or OpenCV: whole images of any format, with the pixels of Pillow's ``convert("RGB")``."""

from __future__ import annotations

import io

import numpy as np
import PIL.Image

from shardio.images.by_opencv import decode_by_opencv, is_for_opencv
from shardio.images.errors_of_pillow import errors_of_pillow
from shardio.images.jpeg.head import read_head
from shardio.images.jpeg.regions import Box
from shardio.images.jpeg.standard import JPEG_START
from shardio.images.jpeg.verdict import refuse_damage
from shardio.images.orientation import Orientation, read_turn
from shardio.images.pictures import DecodedPicture, DecoderName, Part, Picture, check_size
from shardio.images.pixels import Pixels
from shardio.images.value_formats import read_value_format


class PillowPicture(Picture):
    """An image of any format. Each read of a part decodes the whole image."""

    can_scale = False

    def __init__(
        self, content: bytes, height: int, width: int, decoder_name: DecoderName, *, is_for_opencv: bool
    ) -> None:
        self._content, self._is_for_opencv = content, is_for_opencv
        self.size, self.decoder_name = (height, width), decoder_name

    def part(self, box: Box, scale: int = 1) -> Part:
        assert scale == 1, "Pillow decodes at full size"
        return lambda: self._decode()[box.top : box.top + box.height, box.left : box.left + box.width]

    def _decode(self) -> Pixels:
        if self._is_for_opencv:
            pixels = decode_by_opencv(self._content)
            if pixels is not None and pixels.shape[:2] == self.size:
                return pixels  # Otherwise, Pillow says what is wrong.
        _refuse_damage(self._content)
        with errors_of_pillow(), PIL.Image.open(io.BytesIO(self._content)) as image:
            pixels = _convert(image)
        if pixels.shape[:2] != self.size:
            declared, found = (f"{width}×{height}" for height, width in (self.size, pixels.shape[:2]))
            raise ValueError(f"the header declares {declared} pixels, but Pillow decoded {found}")
        return pixels


def open_by_pillow(content: bytes, orientation: Orientation, max_pixels: int) -> Picture:
    """Open an image of any format.

    Raises:
        ValueError: If the image is damaged, too large, or of a format that Pillow does not read.
    """
    with errors_of_pillow(), _open(content) as image:
        check_size(image.height, image.width, max_pixels)
        name: DecoderName = "pillow, clipped" if _is_clipped(image) else "pillow"
        if orientation == "ignore" and image.format != "TIFF":
            return PillowPicture(content, *image.size[::-1], name, is_for_opencv=is_for_opencv(image, content))
        _refuse_damage(content)
        # The orientation, and therefore the size, is certain only after the whole file has been read.
        pixels = _convert(image)
        return DecodedPicture(pixels if orientation == "ignore" else read_turn(image).apply(pixels), name)


def _open(content: bytes) -> PIL.Image.Image:
    """Open an image. Say what it stores if Pillow does not read its type of values."""
    try:
        return PIL.Image.open(io.BytesIO(content))
    except PIL.UnidentifiedImageError as error:
        if (stored := read_value_format(content)) is None:
            raise
        raise ValueError(
            f"it stores {stored.describe()}, which cannot become RGB: give its field another name than that of a "
            "sample's image, such as 'values.tif', which is read as it is stored"
        ) from error


def _convert(image: PIL.Image.Image) -> Pixels:
    if image.mode == "P":
        image.info.pop("transparency", None)  # RGB has none, and Pillow warns of some.
    return np.array(image.convert("RGB"))


def _refuse_damage(content: bytes) -> None:
    """Raise ValueError if the pixels of a CMYK JPEG are damaged. Pillow does not report it."""
    if not content.startswith(JPEG_START):
        return
    try:
        head = read_head(content)
    except ValueError:  # libjpeg-turbo reads it, or an error has been raised before.
        return
    if len(head.factors) == 4:
        refuse_damage(content, head)


def _is_clipped(image: PIL.Image.Image) -> bool:
    """Return whether Pillow clips an image's gray values when it converts them to RGB, or mistakes their sign."""
    if image.mode == "L" and image.format == "TIFF":
        return bool(image.tag_v2.get(_SAMPLE_FORMAT) == (_SIGNED,))  # type: ignore[attr-defined]  # TIFFs have it.
    return image.mode[0] in ("I", "F")


_SAMPLE_FORMAT, _SIGNED = 339, 2
