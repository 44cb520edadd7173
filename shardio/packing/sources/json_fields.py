"""The ``json`` field of a record: the values of its columns that are neither contents nor the label."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def dump_json(values: Mapping[str, Any]) -> bytes:
    """Return values as JSON in UTF-8. Dates become ISO 8601 text, arrays become lists, and NaN becomes null.

    Raises:
        ValueError: If a value has no JSON form.
    """
    return json.dumps(_plain("", values), ensure_ascii=False, allow_nan=False).encode()


def _plain(name: str, value: Any) -> Any:
    match value:
        case float():
            return None if math.isnan(value) else value
        case None | bool() | int() | str():
            return value
        case Mapping():
            return {str(key): _plain(f"{name}.{key}" if name else str(key), each) for key, each in value.items()}
        case list() | tuple():
            return [_plain(name, each) for each in value]
        case np.ndarray() | np.generic():
            return _plain(name, value.tolist())
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise ValueError(f"{name!r} has a value of type {type(value).__name__}, which has no JSON form")
