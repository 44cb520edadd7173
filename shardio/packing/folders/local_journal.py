"""The journal of an unfinished pack in a local directory: one line of JSON for each finished shard."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardio.json_text import parse_json
from shardio.packing.packed_shard import PackedShard
from shardio.storage import parse_location
from shardio.whole_writes import naming

JOURNAL_NAME = ".shardio-pack.journal"


class LocalJournal:
    """Records finished shards, each durably before the next.

    A run that is killed may leave a torn last line. It counts as missing, as do other damaged lines: their shards are
    packed again.

    Attributes:
        finished: The shards that earlier runs finished, by name.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor
        self.finished = dict[str, PackedShard]()
        content = parse_location(path).read_whole()
        for line in content.splitlines():
            try:
                shard = PackedShard.load(parse_json(line))
            except (ValueError, TypeError, KeyError):
                continue
            self.finished[shard.entry.name] = shard
        if content and not content.endswith(b"\n"):
            self._append(b"\n")

    def add(self, shard: PackedShard) -> None:
        """Record a shard."""
        self._append(json.dumps(shard.dump()).encode() + b"\n")

    def _append(self, content: bytes) -> None:
        with naming(self._path):
            while content:
                content = content[os.write(self._descriptor, content) :]
            os.fsync(self._descriptor)


@contextmanager
def open_journal(folder: Path) -> Iterator[LocalJournal]:
    """Open the journal of a pack; create it if there is none."""
    path = folder / JOURNAL_NAME
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        yield LocalJournal(path, descriptor)
    finally:
        os.close(descriptor)
