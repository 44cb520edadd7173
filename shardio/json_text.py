"""Parse JSON from files. Every defect raises ValueError."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any


def parse_json(content: bytes | str) -> Any:
    """Parse a JSON text and return its value.

    Args:
        content: The text, as a string or in UTF-8.

    Raises:
        ValueError: If the text is not JSON in UTF-8 (RFC 8259), holds NaN or an infinity, is nested too deeply, or has
            an object with a duplicate name, which parsers interpret differently.
    """
    text = content if isinstance(content, str) else content.decode("utf-8-sig")
    try:
        return json.loads(text, object_pairs_hook=_make_object, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("lists or objects are nested too deeply") from error


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        name = next(name for name, number in Counter(name for name, _ in pairs).items() if number > 1)
        raise ValueError(f"the name {name!r:.100} occurs twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
