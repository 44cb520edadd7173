"""The loader. Its classes are imported on first use, so that worker processes start without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardio.lazy import import_on_use

if TYPE_CHECKING:
    from shardio.loader.data_loader import DataLoader
    from shardio.loader.stats import LoaderStats

__all__ = ["DataLoader", "LoaderStats"]

__getattr__ = import_on_use(__name__, {".data_loader": "DataLoader", ".stats": "LoaderStats"})
