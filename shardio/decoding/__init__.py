"""From the bytes of samples' fields to values: arrays, numbers, strings; no tensors, so without torch."""

from shardio.decoding.fields import Decode, FieldDecoder, Fields
from shardio.decoding.wide_integers import find_wide, refuse_wide

__all__ = ["Decode", "FieldDecoder", "Fields", "find_wide", "refuse_wide"]
