"""From an image's bytes to pixels."""

from shardio.images.decode import Orientation, Pixels, check_orientation, decode_image, decode_pil
from shardio.images.formats import read_format
from shardio.images.resize import flip, resize, use_one_thread

__all__ = [
    "Orientation",
    "Pixels",
    "check_orientation",
    "decode_image",
    "decode_pil",
    "flip",
    "read_format",
    "resize",
    "use_one_thread",
]
