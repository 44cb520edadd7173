"""Sample, the value that shardio's subpackages exchange."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One training example as stored.

    Attributes:
        key: The sample's identity.
        fields: The content of its fields by name (``jpg``, ``cls``), in the requested order.
        origin: Where it is stored, for messages (``shard-000003.tar at byte 1536`` or a file's path).
    """

    key: str
    fields: Mapping[str, bytes]
    origin: str
