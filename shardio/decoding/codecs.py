"""How the bytes of a field become a value, by the field's name.

Add a line to :data:`DECODERS` to add a codec.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from shardio.decoding.arrays import decode_npy
from shardio.shards import LABEL_FIELD


def decode_label(content: bytes) -> int:
    """Return a label, which is written in ASCII digits.

    Raises:
        ValueError: If the content is not an integer, or has more than 64 bits.
    """
    if not re.fullmatch(rb"-?[0-9]+", content.strip()):
        raise ValueError(f"a label is written in ASCII digits, got {content[:20]!r}")
    label = int(content)
    if not -(2**63) <= label < 2**63:
        raise ValueError(f"a label is an integer of 64 bits, got {content[:40]!r}")
    return label


DECODERS: dict[str, Callable[[bytes], Any]] = {
    LABEL_FIELD: decode_label,
    "json": json.loads,
    "txt": bytes.decode,
    "npy": decode_npy,
}
"""The decoder of each field, by the field's name. Fields without a decoder stay bytes."""

TRUSTED_DECODERS: dict[str, Callable[[bytes], Any]] = {
    **DECODERS,
    "npy": partial(decode_npy, trusted=True),
    "pkl": pickle.loads,
    "pickle": pickle.loads,
    "pyd": pickle.loads,
}
"""The decoders if the caller allows the data to run code. The names of pickles are WebDataset's."""
