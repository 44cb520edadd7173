"""Rewrite JPEGs so that parts of them can be decoded on their own."""

from shardio.images.tiling.certainty import decodes_if_tileable
from shardio.images.tiling.reencode import reencode_jpeg
from shardio.images.tiling.transcode import NotTileable, tile_jpeg, untile_jpeg

__all__ = ["NotTileable", "decodes_if_tileable", "reencode_jpeg", "tile_jpeg", "untile_jpeg"]
