"""Decoding of fields: from stored bytes to arrays, numbers and strings, without torch."""

from shardio.decoding.codecs import Missing, find_wide, refuse_wide
from shardio.decoding.fields import FieldDecoder, Fields
from shardio.decoding.planned import PlannedImages
from shardio.decoding.verification import check_image, verify
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
