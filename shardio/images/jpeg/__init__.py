"""JPEG files: constants of the standard, segments, tile tables, and decoding of parts."""

from shardio.images.jpeg.head import read_head
from shardio.images.jpeg.tile_table import SIGNATURE, read_tiles

__all__ = ["has_tiles"]


def has_tiles(content: bytes) -> bool:
    """Return whether a JPEG has a tile table that matches it."""
    if SIGNATURE not in content:  # Nearly always, and much faster than reading the segments.
        return False
    try:
        return read_tiles(content, read_head(content)) is not None
    except ValueError:
        return False
