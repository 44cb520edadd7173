"""Checks for repeated and lost samples, for any iterable of batches."""

from shardio.check.coverage import Coverage, Delivery
from shardio.check.exactly_once import assert_exactly_once, find_frozen_orders, guard, judge
from shardio.check.mixture import MixtureReport, SourceReport, check_mixture
from shardio.check.ranks import CoverageRecorder, merge_recordings
from shardio.check.recording import record
from shardio.check.report import CoverageReport, ExpectedSamples, make_report

__all__ = [
    "Coverage",
    "CoverageRecorder",
    "CoverageReport",
    "Delivery",
    "ExpectedSamples",
    "MixtureReport",
    "SourceReport",
    "assert_exactly_once",
    "check_mixture",
    "find_frozen_orders",
    "guard",
    "judge",
    "make_report",
    "merge_recordings",
    "record",
]
