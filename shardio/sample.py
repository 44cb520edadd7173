"""Values that cross folders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange:
    """The bytes [start, stop) of a file."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Length in bytes."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One training example as it is stored.

    Attributes:
        key: The sample's identity.
        fields: The content of its fields by name (``jpg``, ``cls``), in the order that they were asked for.
        origin: Where it lies, for messages (``shard-000003.tar at byte 1536`` or a file's path).
    """

    key: str
    fields: Mapping[str, bytes]
    origin: str
