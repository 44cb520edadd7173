"""Read the bytes of samples, given their indices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardio.lazy import import_on_use

if TYPE_CHECKING:
    from shardio.reading.files import FileReader, LabelledFile
    from shardio.reading.joined import JoinedReader, LocatedSample, Reader
    from shardio.reading.read_ahead import ReadAhead, ignore, start_reading_ahead
    from shardio.reading.reader import SampleReader
    from shardio.reading.seen import Verify
    from shardio.reading.stored import StoredSamples

__all__ = [
    "FileReader",
    "JoinedReader",
    "LabelledFile",
    "LocatedSample",
    "ReadAhead",
    "Reader",
    "SampleReader",
    "StoredSamples",
    "Verify",
    "ignore",
    "start_reading_ahead",
]

__getattr__ = import_on_use(
    __name__,
    {
        ".files": "FileReader LabelledFile",
        ".joined": "JoinedReader LocatedSample Reader",
        ".read_ahead": "ReadAhead ignore start_reading_ahead",
        ".reader": "SampleReader",
        ".seen": "Verify",
        ".stored": "StoredSamples",
    },
)
