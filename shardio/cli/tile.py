"""``shardio tile``."""

from __future__ import annotations

from shardio.cli.tiling import Files, Out, rewrite_all


def tile(files: Files, out: Out = None) -> None:
    """Show how lossless tiling would change JPEG files; pass --out to write the results.

    Example: shardio tile photo.jpg --out tiled
    """
    from shardio.images.tiling import tile_jpeg

    rewrite_all(files, out, tile_jpeg)
