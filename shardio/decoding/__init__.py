"""Decode fields: from stored bytes to arrays, numbers and strings, without torch."""

from shardio.decoding.codecs import Missing, check_image, find_wide, refuse_wide, verify
from shardio.decoding.fields import FieldDecoder, Fields, PlannedImages
from shardio.transforms import Decode

__all__ = [
    "Decode",
    "FieldDecoder",
    "Fields",
    "Missing",
    "PlannedImages",
    "check_image",
    "find_wide",
    "refuse_wide",
    "verify",
]
