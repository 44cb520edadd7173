"""Field codecs: the functions that decode a field's bytes, by the last extension in the field's name.

To add a codec, add a line to :data:`DECODERS`, and to :data:`UNBOUNDED` if it parses integers of any size.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import safetensors.numpy

from shardio.decoding.arrays import decode_npy, decode_npz
from shardio.shards import LABEL_FIELD


def decode_label(content: bytes) -> int:
    """Return a label from its ASCII digits.

    Raises:
        ValueError: If the content is not an integer, or does not fit in 64 bits.
    """
    if not re.fullmatch(rb"-?[0-9]+", content.strip()):
        raise ValueError(f"a label must be an integer in ASCII digits, got {content[:20]!r}")
    label = int(content)
    if not -(2**63) <= label < 2**63:
        raise ValueError(f"a label must fit in a signed 64-bit integer, got {content[:40]!r}")
    return label


def decode_msgpack(content: bytes) -> Any:
    """Return the value in a MessagePack file.

    Raises:
        ValueError: If it is damaged.
    """
    import msgpack  # It takes 2 ms.

    return msgpack.unpackb(content, strict_map_key=False)


DECODERS: dict[str, Callable[[bytes], Any]] = {
    LABEL_FIELD: decode_label,
    "json": json.loads,
    "txt": bytes.decode,
    "npy": decode_npy,
    "npz": decode_npz,
    "safetensors": safetensors.numpy.load,
    "msgpack": decode_msgpack,
    "msg": decode_msgpack,
    "mp": decode_msgpack,
}
"""The decoder of each field, by the last extension in the field's name. Fields without a decoder stay bytes."""

UNBOUNDED = frozenset({"json"})
"""Fields whose values may contain integers of more than 64 bits, which tensors cannot hold."""

TRUSTED_DECODERS: dict[str, Callable[[bytes], Any]] = {
    **DECODERS,
    "npy": partial(decode_npy, trusted=True),
    "npz": partial(decode_npz, trusted=True),
    "pkl": pickle.loads,
    "pickle": pickle.loads,
    "pyd": pickle.loads,
}
"""The decoders for data that is trusted to run code. The field names of pickles are WebDataset's."""


def extension_of(field: str) -> str:
    """Return the last extension in a field's name: ``npy`` for ``mask.npy``."""
    return field.rpartition(".")[2]
