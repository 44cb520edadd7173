"""Write the shards of a plan in parallel, and keep those that an earlier run finished."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from shardio.errors import PackError
from shardio.packing.destination import remove_shard
from shardio.packing.finished import FinishedShard, find_finished, record_finished
from shardio.packing.jpegs import JpegTally, Rewrite, rewrite_sample
from shardio.packing.plan import ShardPlan
from shardio.packing.scan import SourceSample
from shardio.packing.sources import FileChangedError, FileProblem, read_unchanged
from shardio.processors import count_processors
from shardio.sample import Sample
from shardio.shards import LABEL_FIELD, write_shard
from shardio.storage import parse_location

OnChanged = Literal["raise", "skip"]
"""What to do with samples whose files change during the pack."""

MAX_WORKERS = 4
"""The maximum number of threads that write shards, unless the caller chooses a number."""


class PackProgress:
    """Receives progress reports during a pack and ignores them. Subclasses override methods, which threads call."""

    def planned(self, num_samples: int, num_bytes: int) -> None:
        """Receive the totals; called once, before the first shard is written."""

    def packed(self, num_samples: int, num_bytes: int) -> None:
        """Receive the number of packed samples and bytes; called for each sample, or once for a kept shard."""


class ShardWriter:
    """Writes the missing shards of a plan in parallel. After an error in one thread, the others stop soon.

    Attributes:
        changed: Files that changed during the pack. Their samples were left out.
        damaged: Shards that were damaged after an earlier run had finished them. They were packed again.
    """

    def __init__(
        self, dst: Path, rewrite: Rewrite, strict: bool, on_changed: OnChanged, progress: PackProgress
    ) -> None:
        self._dst, self._rewrite = dst, rewrite
        self._strict, self._on_changed, self._progress = strict, on_changed, progress
        self.changed: list[FileProblem] = []
        self.damaged: list[FileProblem] = []
        self._stopped = threading.Event()
        self._failures: list[Exception] = []

    def write_all(self, shards: Sequence[ShardPlan], num_workers: int | None) -> list[FinishedShard]:
        """Write the shards and return them, without those that have no samples left."""
        num_threads = num_workers or min(MAX_WORKERS, count_processors())
        with ThreadPoolExecutor(num_threads, thread_name_prefix="shardio-pack") as pool:
            try:
                return [shard for shard in pool.map(self._write, shards) if shard is not None]
            except Exception as error:
                first = self._failures[0]  # It made the other threads stop.
                if first is error:
                    raise
                raise first from first.__cause__
            finally:
                self._stopped.set()
                pool.shutdown(wait=True, cancel_futures=True)

    def _write(self, plan: ShardPlan) -> FinishedShard | None:
        try:
            found = find_finished(self._dst, plan)
            if isinstance(found, FinishedShard):
                self._check(found.jpegs)
                self._progress.packed(len(plan.samples), found.entry.num_bytes)
                return found
            if found is not None:
                self.damaged.append(found)
            return self._write_new(plan)
        except Exception as error:
            self._failures.append(error)
            self._stopped.set()
            raise

    def _write_new(self, plan: ShardPlan) -> FinishedShard | None:
        path, tally = self._dst / plan.name, JpegTally()
        entry, fields = write_shard(parse_location(path), self._read_samples(plan, tally))
        if not entry.num_samples:  # The files of all its samples changed.
            remove_shard(path)
            return None
        record_finished(path, tally)
        return FinishedShard(entry=entry, fields=fields, jpegs=tally, was_kept=False)

    def _check(self, tally: JpegTally) -> None:
        if self._strict and tally.damaged:
            problem = f"{tally.damaged[0].path} {tally.damaged[0].what}"
            raise PackError(f"{problem}: replace or remove the file, or omit --strict (strict=True)")

    def _read_samples(self, plan: ShardPlan, tally: JpegTally) -> Iterator[Sample]:
        for source in plan.samples:
            if self._stopped.is_set():
                raise PackError(f"{plan.name} is unfinished because another shard failed")
            try:
                sample = _read_files(source)
            except FileChangedError as change:
                if self._on_changed == "raise":
                    raise
                self.changed.append(change.problem)
                continue
            rewritten = rewrite_sample(self._rewrite, source, sample, tally)
            self._check(tally)
            yield rewritten
            self._progress.packed(1, sum(map(len, sample.fields.values())))


def _read_files(sample: SourceSample) -> Sample:
    label = {} if sample.label is None else {LABEL_FIELD: str(sample.label).encode()}
    files = {field: read_unchanged(file) for field, file in sample.files.items()}
    return Sample(key=sample.key, fields=dict(sorted({**label, **files}.items())), origin=sample.key)
