"""What several datasets have in common when they become one: class names, fields, settings, keys."""

from __future__ import annotations

from collections.abc import Sequence

from shardio.errors import PackError
from shardio.packing.key_hashes import find_duplicate
from shardio.shards import LABEL_FIELD, Manifest, ShardTable

Settings = dict[str, str | int | None]
"""The settings in a manifest."""

_KEPT_SETTINGS = ("jpeg", "max_side", "quality")
"""Settings that describe the images, and stay true when samples are moved to other shards."""


def unite_classes(tables: Sequence[ShardTable]) -> tuple[str, ...]:
    """Return the class names of several datasets, by label: the longest list. The others are its prefixes.

    Raises:
        PackError: If equal labels have different names, or only some datasets have names for their labels.
    """
    longest = max(tables, key=lambda table: len(table.manifest.classes))
    names = longest.manifest.classes
    for table in tables:
        others = table.manifest.classes
        for label, (name, other) in enumerate(zip(names, others, strict=False)):
            if name != other:
                raise PackError(
                    f"label {label} is {name!r} in {describe(longest)} and {other!r} in {describe(table)}: pack the "
                    "second one again with the class names of the first (--classes)"
                )
        if names and not others and LABEL_FIELD in table.manifest.fields:
            raise PackError(
                f"{describe(table)} has labels without class names, and {describe(longest)} has {len(names)} class "
                "names, so it is unknown whether the labels mean the same: write the former again with class names "
                "(shardio pack --classes, or ShardWriter(classes=…))"
            )
    return names


def unite_fields(manifests: Sequence[Manifest]) -> tuple[str, ...]:
    """Return the names of all fields, sorted."""
    return tuple(sorted({field for manifest in manifests for field in manifest.fields}))


def unite_settings(manifests: Sequence[Manifest]) -> Settings:
    """Return the settings that describe the images of several datasets: those that are equal in all of them."""
    first = manifests[0].pack
    settings: Settings = {
        name: first[name]
        for name in _KEPT_SETTINGS
        if name in first and all(name in each.pack and each.pack[name] == first[name] for each in manifests)
    }
    return settings | count_tiled(manifests)


def count_tiled(manifests: Sequence[Manifest]) -> Settings:
    """Return the number of tiled samples of several datasets as a setting; nothing if it is unknown."""
    counts = [manifest.pack.get("num_tiled") for manifest in manifests]
    known = [count for count in counts if isinstance(count, int)]
    return {"num_tiled": sum(known)} if len(known) == len(counts) else {}


def refuse_duplicates(tables: Sequence[ShardTable]) -> None:
    """Raise PackError if two samples of some datasets have the same key."""
    if found := find_duplicate(tables):
        key, first, second = found
        prefix = "" if first == second else ", or put the tar's name before each key: shardio pack --prefix-keys"
        raise PackError(
            f"two samples have the key {key!r}: one in {first}, one in {second}. Keys must differ, because readers "
            f"take adjacent members with one key for one sample: rename or remove one of them{prefix}"
        )


def describe(table: ShardTable) -> str:
    """Return a dataset's name for messages."""
    return str(table.tars[0].folder) if len(table.tars) > 1 else str(table.tars[0])
