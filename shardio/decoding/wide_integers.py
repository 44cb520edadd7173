"""Integers of more than 64 bits, which tensors cannot hold."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from shardio.decoding.codecs import UNBOUNDED, extension_of
from shardio.errors import SampleError
from shardio.reading import StoredSamples

_LONG = re.compile(rb"[0-9]{19}")
"""Text without 19 consecutive digits holds no integer of more than 64 bits."""


def find_wide(value: Any) -> int | None:
    """Return an integer of more than 64 bits in a value parsed from JSON, or None if there is none."""
    if isinstance(value, int):
        return None if -(2**63) <= value < 2**63 else value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((wide for part in parts if (wide := find_wide(part)) is not None), None)


def refuse_wide(samples: StoredSamples, field: str, values: Sequence[Any]) -> None:
    """Raise SampleError if a sample's field holds an integer of more than 64 bits."""
    if extension_of(field) not in UNBOUNDED:
        return
    for row, (content, value) in enumerate(zip(samples.columns[field], values, strict=True)):
        if content is not None and _LONG.search(content) and (wide := find_wide(value)) is not None:
            key, where = samples.describe(row, (field,))
            message = (
                f"field {field!r} of sample {key} in {where} holds the integer {wide}, which does not fit in 64 bits "
                "(signed), so a tensor cannot hold it: store it as a string, or pass a collate_fn that does not "
                "convert it"
            )
            raise SampleError(message, row=row, key=key, where=where)
