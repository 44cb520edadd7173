"""CoverageRecorder: notes, from inside a training run, which samples a rank received; one small file a rank.

A recording is a safetensors file with, for each epoch ``e``, the tensors ``ids.e`` (uint64 [n]), ``batches.e`` (uint32
[n]) and ``workers.e`` (int16 [n], -1 for an unknown worker), and one metadata key, ``recording``, with a JSON object:
its format, the rank, the number of epochs, the keys' names where they are few, and for each epoch what the loader's
remainder policy asks for, where that was found out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import safetensors
import safetensors.numpy

from shardio.check.allowance import Allowance
from shardio.check.coverage import Coverage, Delivery
from shardio.check.identity import Key, content_ids, keys_in
from shardio.errors import FormatError
from shardio.world import find_world

RECORDING_FORMAT = 1
COLUMNS = {"ids": "<u8", "batches": "<u4", "workers": "<i2"}
"""What a recording says of each delivery: 14 bytes."""

MAX_SAVED_NAMES = 20_000
"""Keys that a recording names; in a larger one, strings are known by their hash."""


class CoverageRecorder:
    """Write down which samples this rank receives. A context manager; the file is written after each epoch.

    >>> with CoverageRecorder("run", key=2) as recorder:  # doctest: +SKIP
    ...     for epoch in range(10):
    ...         for images, labels, keys in recorder.watch(loader): ...

    ``shardio check --merge run/*.cov`` judges the recordings of all ranks.

    Args:
        directory: Where the file ``rank-00000.cov`` goes; made if it is not there.
        key: Where a batch has its keys, as for :func:`shardio.check.assert_exactly_once`.
        rank: This process; by default torch.distributed's or torchrun's rank.
    """

    def __init__(self, directory: str | Path, *, key: Key = None, rank: int | None = None) -> None:
        self.rank = find_world().rank if rank is None else rank
        self.path = Path(directory) / f"rank-{self.rank:05d}.cov"
        self.epochs: list[Coverage] = []
        self._key = key

    def watch(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Pass on the batches of one epoch and note their samples."""
        coverage = Coverage()
        self.epochs.append(coverage)
        try:
            for number, batch in enumerate(loader):
                keys = keys_in(batch, self._key)
                delivery = Delivery(rank=self.rank, worker=None, batch=number)
                if keys is None:
                    coverage.add_ids(content_ids(batch), delivery)
                else:
                    coverage.add(keys, delivery)
                yield batch
        finally:
            self.close()

    def gather(self) -> list[Coverage]:
        """Return the coverage of each epoch over all ranks, by torch.distributed; each rank must call it."""
        import torch.distributed

        mine = [coverage.arrays() for coverage in self.epochs], [coverage.names for coverage in self.epochs]
        parts: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, mine)
        merged = [Coverage() for _ in range(max(len(epochs) for epochs, _ in parts))]
        for rank, (epochs, names) in enumerate(parts):
            for coverage, arrays, names_of_epoch in zip(merged, epochs, names, strict=False):
                coverage.add_arrays(rank, *arrays)
                coverage.names.update(names_of_epoch)
        return merged

    def close(self) -> None:
        """Write what was noted so far."""
        write_recording(self.path, self.rank, self.epochs)

    def __enter__(self) -> CoverageRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_recording(path: Path, rank: int, epochs: Sequence[Coverage]) -> None:
    """Write the coverage of a rank's epochs; the file is there whole or as it was."""
    tensors, names = {}, {}
    for epoch, coverage in enumerate(epochs):
        for (name, dtype), column in zip(COLUMNS.items(), coverage.arrays(), strict=True):
            tensors[f"{name}.{epoch}"] = column.astype(dtype)
        names.update(coverage.names)
    shown = {f"{identity:016x}": str(name) for identity, name in names.items()} if len(names) <= MAX_SAVED_NAMES else {}
    allowances = [None if coverage.allowance is None else asdict(coverage.allowance) for coverage in epochs]
    header = {"format": RECORDING_FORMAT, "rank": rank, "epochs": len(epochs), "names": shown, "allowances": allowances}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(safetensors.numpy.save(tensors, {"recording": json.dumps(header)}))
    partial.replace(path)


def merge_recordings(paths: Iterable[Path]) -> list[Coverage]:
    """Return the coverage of each epoch over the recordings of all ranks.

    Raises:
        FormatError: If a file is not a recording, or two are of the same rank.
    """
    merged: list[Coverage] = []
    seen: dict[int, Path] = {}
    for path in paths:
        try:
            with safetensors.safe_open(path, "numpy") as file:
                header = json.loads(file.metadata()["recording"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dict
        except (OSError, safetensors.SafetensorError, TypeError, KeyError, ValueError) as error:
            raise FormatError(f"{path} is not a recording of CoverageRecorder: {error}") from error
        rank = header["rank"]
        if rank in seen:
            raise FormatError(f"{path} and {seen[rank]} are both recordings of rank {rank}: merge those of one run")
        seen[rank] = path
        merged += [Coverage() for _ in range(header["epochs"] - len(merged))]
        allowances = header.get("allowances", [None] * header["epochs"])  # Recordings had none at first.
        for epoch in range(header["epochs"]):
            merged[epoch].add_arrays(rank, *(tensors[f"{name}.{epoch}"] for name in COLUMNS))
            merged[epoch].names.update({int(identity, 16): name for identity, name in header["names"].items()})
            if (allowance := allowances[epoch]) is not None:
                merged[epoch].allowance = Allowance(**allowance)
    return merged
