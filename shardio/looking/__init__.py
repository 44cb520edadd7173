"""Show what a dataset contains: counts, histograms, thumbnails and duplicates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardio.lazy import import_on_use

if TYPE_CHECKING:
    from shardio.looking.duplicates import (
        Copy,
        DuplicateGroup,
        DuplicateReport,
        find_duplicates,
    )
    from shardio.looking.duplicates_page import describe_labels, make_duplicates_page
    from shardio.looking.overview import Overview, Thumbnail, look_at
    from shardio.looking.overview_page import make_overview_page
    from shardio.looking.sizes import format_bytes
    from shardio.looking.source import ImageSource, holds_shards, open_source
    from shardio.looking.thresholds import DEFAULT_THRESHOLD, MAX_THRESHOLD

__all__ = [
    "DEFAULT_THRESHOLD",
    "MAX_THRESHOLD",
    "Copy",
    "DuplicateGroup",
    "DuplicateReport",
    "ImageSource",
    "Overview",
    "Thumbnail",
    "describe_labels",
    "find_duplicates",
    "format_bytes",
    "holds_shards",
    "look_at",
    "make_duplicates_page",
    "make_overview_page",
    "open_source",
]

__getattr__ = import_on_use(
    __name__,
    {
        ".duplicates": "Copy DuplicateGroup DuplicateReport find_duplicates",
        ".duplicates_page": "describe_labels make_duplicates_page",
        ".overview": "Overview Thumbnail look_at",
        ".overview_page": "make_overview_page",
        ".sizes": "format_bytes",
        ".source": "ImageSource holds_shards open_source",
        ".thresholds": "DEFAULT_THRESHOLD MAX_THRESHOLD",
    },
)
