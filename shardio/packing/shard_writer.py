"""Writing the shards of a plan side by side; those that an earlier run finished are kept."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from shardio.errors import PackError
from shardio.packing.destination import remove_shard
from shardio.packing.finished import Written, find_finished, note_finished
from shardio.packing.jpegs import JpegTally, Rewrite, rewrite_sample
from shardio.packing.plan import ShardPlan
from shardio.packing.scan import SourceSample
from shardio.packing.sources import FileChangedError, Problem, read_unchanged
from shardio.processors import count_processors
from shardio.sample import Sample
from shardio.shards import LABEL_FIELD, write_shard
from shardio.storage import parse_location

OnChanged = Literal["raise", "skip"]
"""What becomes of samples whose files change while they are packed."""

MAX_WORKERS = 4
"""Threads that write shards, at the most, unless the caller says otherwise."""


class PackProgress:
    """What a caller is told while packing goes on; this one says nothing. Methods are called from threads."""

    def planned(self, num_samples: int, num_bytes: int) -> None:
        """Called once, before the first shard is written."""

    def packed(self, num_samples: int, num_bytes: int) -> None:
        """Called for each sample (or, where a shard is there already, for all of its samples at once)."""


class ShardWriter:
    """Writes the shards of a plan that are not there yet, side by side; after an error the others stop soon.

    Attributes:
        changed: Files that changed while they were packed; their samples were left out.
        damaged: Shards that an earlier run had finished and that were damaged since; they were packed again.
    """

    def __init__(
        self, dst: Path, rewrite: Rewrite, strict: bool, on_changed: OnChanged, progress: PackProgress
    ) -> None:
        self._dst, self._rewrite = dst, rewrite
        self._strict, self._on_changed, self._progress = strict, on_changed, progress
        self.changed: list[Problem] = []
        self.damaged: list[Problem] = []
        self._stopped = threading.Event()
        self._failures: list[Exception] = []

    def write_all(self, shards: Sequence[ShardPlan], num_workers: int | None) -> list[Written]:
        """Return what is in place of each shard of the plan; shards of which no sample is left are not there."""
        workers = num_workers or min(MAX_WORKERS, count_processors())
        with ThreadPoolExecutor(workers, thread_name_prefix="shardio-pack") as pool:
            try:
                return [written for written in pool.map(self._write, shards) if written is not None]
            except Exception as error:
                first = self._failures[0]  # The others stopped because of it.
                if first is error:
                    raise
                raise first from first.__cause__
            finally:
                self._stopped.set()
                pool.shutdown(wait=True, cancel_futures=True)

    def _write(self, plan: ShardPlan) -> Written | None:
        try:
            found = find_finished(self._dst, plan)
            if isinstance(found, Written):
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

    def _write_new(self, plan: ShardPlan) -> Written | None:
        path, tally = self._dst / plan.name, JpegTally()
        entry, fields = write_shard(parse_location(path), self._read_samples(plan, tally))
        if not entry.num_samples:  # The files of all of them changed.
            remove_shard(path)
            return None
        note_finished(path, tally)
        return Written(entry=entry, fields=fields, jpegs=tally, was_kept=False)

    def _check(self, tally: JpegTally) -> None:
        if self._strict and tally.damaged:
            raise PackError(f"{tally.damaged[0].path} {tally.damaged[0].what}")

    def _read_samples(self, plan: ShardPlan, tally: JpegTally) -> Iterator[Sample]:
        for source in plan.samples:
            if self._stopped.is_set():
                raise PackError(f"{plan.name} was left unfinished because another shard failed")
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
