"""Does a loader repeat or lose samples? For any loader whose batches carry keys."""

from shardio.check.coverage import Coverage, CoverageReport, Delivery
from shardio.check.recording import assert_exactly_once, record

__all__ = ["Coverage", "CoverageReport", "Delivery", "assert_exactly_once", "record"]
