"""Checks for repeated and lost samples, for any iterable of batches."""

from shardio.check.coverage import Coverage, Delivery
from shardio.check.exactly_once import assert_exactly_once
from shardio.check.frozen import find_frozen_orders
from shardio.check.guard import guard
from shardio.check.merging import merge_recordings
from shardio.check.recorder import CoverageRecorder
from shardio.check.recording import record
from shardio.check.report import CoverageReport, ExpectedSamples, make_report
from shardio.check.verdict import judge

__all__ = [
    "Coverage",
    "CoverageRecorder",
    "CoverageReport",
    "Delivery",
    "ExpectedSamples",
    "assert_exactly_once",
    "find_frozen_orders",
    "guard",
    "judge",
    "make_report",
    "merge_recordings",
    "record",
]
