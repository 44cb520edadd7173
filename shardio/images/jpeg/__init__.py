"""JPEG files: constants of the standard, segments, tile tables, and decoding of parts."""

from shardio.images.jpeg.head import read_head
from shardio.images.jpeg.standard import APP9, SOS
from shardio.images.jpeg.tile_table import SIGNATURE, read_tiles

__all__ = ["has_tiles"]


def has_tiles(content: bytes) -> bool:
    """Return whether a JPEG has a tile table that matches it."""
    if not _may_have_tiles(content):  # This is nearly always so, and much faster than reading the segments.
        return False
    try:
        return read_tiles(content, read_head(content)) is not None
    except ValueError:
        return False


def _may_have_tiles(content: bytes) -> bool:
    """Return whether a segment before the first scan begins like a tile table; True if the segments are unusual."""
    offset = 2
    while content[offset : offset + 1] == b"\xff" and offset + 4 <= len(content):
        marker = content[offset + 1]
        if marker == SOS:
            return False
        if marker == APP9 and content.startswith(SIGNATURE, offset + 4):
            return True
        offset += 2 + int.from_bytes(content[offset + 2 : offset + 4], "big")
    return SIGNATURE in content
