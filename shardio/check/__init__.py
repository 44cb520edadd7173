"""Does a loader repeat or lose samples? For any loader, shardio's or not."""

from shardio.check.coverage import Coverage, Delivery
from shardio.check.exactly_once import assert_exactly_once
from shardio.check.frozen import find_frozen_orders
from shardio.check.guard import guard
from shardio.check.merging import merge_recordings
from shardio.check.recorder import CoverageRecorder
from shardio.check.recording import record
from shardio.check.report import CoverageReport, Expected, make_report
from shardio.check.verdict import judge

__all__ = [
    "Coverage",
    "CoverageRecorder",
    "CoverageReport",
    "Delivery",
    "Expected",
    "assert_exactly_once",
    "find_frozen_orders",
    "guard",
    "judge",
    "make_report",
    "merge_recordings",
    "record",
]
