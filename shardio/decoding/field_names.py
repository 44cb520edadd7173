"""The names of a sample's values, and the stored fields that they are made of."""

from __future__ import annotations

from collections.abc import Sequence

from shardio.images import IMAGE_FIELDS
from shardio.shards import LABEL_FIELD

_STORED_FIELDS: dict[str, tuple[str, ...]] = {"image": IMAGE_FIELDS, "label": (LABEL_FIELD,), "key": ()}
"""The stored fields of values that are not named after their field."""


def stored_fields_of(name: str) -> tuple[str, ...]:
    """Return the stored fields that may hold a value."""
    return _STORED_FIELDS.get(name, (name,))


def check_present(names: Sequence[str], present: Sequence[str], where: str) -> None:
    """Check the names of values, given the fields that a dataset's samples have.

    Raises:
        ValueError: If a field is missing.
    """
    for name in names:
        choices = stored_fields_of(name) or present
        if not set(choices) & set(present):
            derived = [value for value, stored in _STORED_FIELDS.items() if not stored or set(stored) & set(present)]
            raise ValueError(
                f"no sample of {where} has the field {name!r}: choose fields=... from "
                f"{', '.join((*sorted(derived), *present))}"
            )
