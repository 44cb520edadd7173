"""JPEG files: their vocabulary, segments and tiles, and decoding parts of their images."""

from shardio.images.jpeg.head import read_head
from shardio.images.jpeg.tile_table import read_tiles

__all__ = ["has_tiles"]


def has_tiles(content: bytes) -> bool:
    """Return whether a JPEG has a tile table that fits it."""
    try:
        return read_tiles(content, read_head(content)) is not None
    except ValueError:
        return False
