"""Decode fields: from stored bytes to arrays, numbers and strings, without torch."""

from shardio.decoding.codecs import (
    Missing,
    check_image,
    copy_arrays,
    extension_of,
    find_wide,
    read_npy_header,
    refuse_wide,
    verify,
)
from shardio.decoding.fields import CHUNK, FieldDecoder, Fields, PlannedFields, PlannedImages
from shardio.transforms import Decode

__all__ = [
    "CHUNK",
    "Decode",
    "FieldDecoder",
    "Fields",
    "Missing",
    "PlannedFields",
    "PlannedImages",
    "check_image",
    "copy_arrays",
    "extension_of",
    "find_wide",
    "read_npy_header",
    "refuse_wide",
    "verify",
]
