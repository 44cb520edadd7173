"""From the bytes of samples' fields to values: arrays, numbers and strings. Nothing here needs torch."""

from shardio.decoding.fields import Decode, FieldDecoder, Fields
from shardio.decoding.planned_images import PlannedImages
from shardio.decoding.wide_integers import find_wide, refuse_wide

__all__ = ["Decode", "FieldDecoder", "Fields", "PlannedImages", "find_wide", "refuse_wide"]
