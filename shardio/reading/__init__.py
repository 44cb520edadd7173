"""Read the bytes of samples, given their indices."""

from shardio.reading.files import FileReader, LabelledFile
from shardio.reading.joined import JoinedReader, LocatedSample, Reader
from shardio.reading.reader import SampleReader
from shardio.reading.seen import Verify
from shardio.reading.stored import StoredSamples

__all__ = [
    "FileReader",
    "JoinedReader",
    "LabelledFile",
    "LocatedSample",
    "Reader",
    "SampleReader",
    "StoredSamples",
    "Verify",
]
