"""The loader. Its classes are imported lazily, so that worker processes start without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardio.loader.data_loader import DataLoader as DataLoader
    from shardio.loader.stats import LoaderStats as LoaderStats

__all__ = ["DataLoader", "LoaderStats"]


def __getattr__(name: str) -> Any:
    if name == "DataLoader":
        from shardio.loader.data_loader import DataLoader

        return DataLoader
    if name == "LoaderStats":
        from shardio.loader.stats import LoaderStats

        return LoaderStats
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
