"""What subclasses of shardio's datasets override."""

from __future__ import annotations

from shardio.datasets.image_folder import ImageFolder
from shardio.datasets.shard_dataset import ShardDataset
from shardio.datasets.shard_map_dataset import ShardMapDataset

_OVERRIDABLE = frozenset(
    {
        *("__annotations__", "__dict__", "__doc__", "__firstlineno__", "__init__", "__module__", "__orig_bases__"),
        *("__parameters__", "__repr__", "__static_attributes__", "__str__", "__weakref__"),
    }
)
"""What a subclass may define without changing what is read."""


def find_overridden(kind: type) -> str:
    """Return the name of a member of shardio's datasets that a subclass of theirs overrides; "" if there is none.

    A subclass may choose its samples when it is made, and add members. Any other change is the user's own dataset.
    """
    ours = next(each for each in kind.__mro__ if each in (ShardDataset, ShardMapDataset, ImageFolder))
    added = {name: None for each in kind.__mro__[: kind.__mro__.index(ours)] for name in vars(each)}
    names = (name for name in added if hasattr(ours, name) and name not in _OVERRIDABLE)
    return next(names, "")
