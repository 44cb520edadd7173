"""Decoding of fields: from stored bytes to arrays, numbers and strings, without torch."""

from shardio.decoding.field_values import Missing
from shardio.decoding.fields import FieldDecoder
from shardio.decoding.planned_images import PlannedImages
from shardio.decoding.settings import Fields
from shardio.decoding.verification import check_image, verify
from shardio.decoding.wide_integers import find_wide, refuse_wide
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
