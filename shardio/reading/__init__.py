"""Read the bytes of samples, given their indices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardio.lazy import import_on_use

if TYPE_CHECKING:
    from shardio.reading.files import FileReader, LabelledFile
    from shardio.reading.joined import JoinedReader, LocatedSample, Reader
    from shardio.reading.read_ahead import (
        RemoteSamples,
        read_batches_ahead,
        read_nothing_ahead,
        read_stretches_ahead,
    )
    from shardio.reading.reader import SampleReader
    from shardio.reading.remote_files import RemoteFiles
    from shardio.reading.remote_parts import RemoteParts
    from shardio.reading.remote_shards import find_remote_shards
    from shardio.reading.seen import Verify
    from shardio.reading.stored import StoredSamples

__all__ = [
    "FileReader",
    "JoinedReader",
    "LabelledFile",
    "LocatedSample",
    "Reader",
    "RemoteFiles",
    "RemoteParts",
    "RemoteSamples",
    "SampleReader",
    "StoredSamples",
    "Verify",
    "find_remote_shards",
    "read_batches_ahead",
    "read_nothing_ahead",
    "read_stretches_ahead",
]

__getattr__ = import_on_use(
    __name__,
    {
        ".files": "FileReader LabelledFile",
        ".joined": "JoinedReader LocatedSample Reader",
        ".read_ahead": "RemoteSamples read_batches_ahead read_nothing_ahead read_stretches_ahead",
        ".reader": "SampleReader",
        ".remote_files": "RemoteFiles",
        ".remote_parts": "RemoteParts",
        ".remote_shards": "find_remote_shards",
        ".seen": "Verify",
        ".stored": "StoredSamples",
    },
)
