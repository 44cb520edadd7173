"""From an image's bytes to pixels: only of what a crop needs, and exactly those of a full decode."""

from shardio.images.by_kernel import why_not_by_kernel
from shardio.images.chunk import DecodeError, decode_all, decode_chunk, make_rows
from shardio.images.decode import decode_image, decode_pil
from shardio.images.formats import find_format, read_format
from shardio.images.kernel import prepare_kernel, why_no_kernel
from shardio.images.orientation import Orientation
from shardio.images.pictures import (
    DEFAULT_MAX_PIXELS,
    DecodedPicture,
    DecoderName,
    JpegPicture,
    Picture,
    TooManyPixels,
    open_image,
)
from shardio.images.pixels import Pixels
from shardio.images.plans import Boxes, CropPlan, Sizes
from shardio.images.resizing import resize, use_one_thread

__all__ = [
    "DEFAULT_MAX_PIXELS",
    "Boxes",
    "CropPlan",
    "DecodeError",
    "DecodedPicture",
    "DecoderName",
    "JpegPicture",
    "Orientation",
    "Picture",
    "Pixels",
    "Sizes",
    "TooManyPixels",
    "decode_all",
    "decode_chunk",
    "decode_image",
    "decode_pil",
    "find_format",
    "make_rows",
    "open_image",
    "prepare_kernel",
    "read_format",
    "resize",
    "use_one_thread",
    "why_no_kernel",
    "why_not_by_kernel",
]
