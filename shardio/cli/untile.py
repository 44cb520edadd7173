"""``shardio untile``."""

from __future__ import annotations

from shardio.cli.tiling import Files, Out, rewrite_all


def untile(files: Files, out: Out = None) -> None:
    """Show how removing restart markers and tile tables would change JPEG files; pass --out to write the results.

    Example: shardio untile tiled/photo.jpg --out plain
    """
    from shardio.images.tiling import untile_jpeg

    rewrite_all(files, out, untile_jpeg)
