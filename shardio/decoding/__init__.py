"""From the bytes of samples' fields to values: arrays, numbers, strings; no tensors, so without torch."""

from shardio.decoding.fields import Decode, FieldDecoder, Fields

__all__ = ["Decode", "FieldDecoder", "Fields"]
