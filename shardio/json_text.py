"""JSON in files that shardio reads: whatever is wrong with it is a ValueError."""

from __future__ import annotations

import json
from typing import Any


def parse_json(content: bytes | str) -> Any:
    """Return what a JSON text holds.

    Args:
        content: The text, in UTF-8 where it is bytes.

    Raises:
        ValueError: If it is not JSON in UTF-8 (RFC 8259): also for NaN and infinities, for an object with a name twice,
            of which readers take one or the other, and for lists nested too deep to be read.
    """
    text = content if isinstance(content, str) else content.decode("utf-8-sig")
    try:
        return json.loads(text, object_pairs_hook=_make_object, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("lists or objects are nested too deep") from error


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(name for name in names if names.count(name) > 1)!r:.100} comes twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")
