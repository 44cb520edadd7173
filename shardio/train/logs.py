"""The logs of a run: ``log.jsonl`` for programs, and one for TensorBoard."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardio.errors import StateError
from shardio.train.callbacks import Callback
from shardio.train.meters import EpochResult, StepRecord
from shardio.whole_writes import naming, write_whole

LOG = "log.jsonl"


class JsonLog(Callback):
    """A callback that writes ``log.jsonl``.

    Each line is a JSON object: a StepRecord (kind ``steps``) or an EpochResult (kind ``epoch``). A
    resumed run first removes the lines of the steps that it repeats.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / LOG

    def on_start(self, num_epochs: int, num_steps: int) -> None:
        kept = [
            line
            for line in read_log(self.path)
            if (line["epoch"] < num_epochs if line["kind"] == "epoch" else line["step"] <= num_steps)
        ]
        with write_whole(self.path) as file:
            file.writelines(_dump(line) for line in kept)

    def on_log(self, record: StepRecord) -> None:
        self._append("steps", record)

    def on_epoch(self, result: EpochResult) -> None:
        self._append("epoch", result)

    def _append(self, kind: str, figures: StepRecord | EpochResult) -> None:
        with naming(self.path), self.path.open("ab") as file:
            file.write(_dump({"kind": kind, **dataclasses.asdict(figures)}))


class TensorBoardLog(Callback):
    """A callback that writes the same metrics for TensorBoard."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: Any = None

    def on_start(self, num_epochs: int, num_steps: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._directory), purge_step=num_steps + 1)

    def on_log(self, record: StepRecord) -> None:
        self._write("steps", record)

    def on_epoch(self, result: EpochResult) -> None:
        self._write("epoch", result)
        self._writer.flush()

    def on_end(self, results: list[EpochResult]) -> None:
        self._writer.close()

    def _write(self, kind: str, figures: StepRecord | EpochResult) -> None:
        for name, value in dataclasses.asdict(figures).items():
            if value is not None and name not in ("step", "epoch"):
                self._writer.add_scalar(f"{kind}/{name}", float(value), figures.step)


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a log, without lines that were cut off while being written.

    Raises:
        StateError: If a line was not written by a training run.
    """
    if not path.exists():
        return
    for number, text in enumerate(path.read_bytes().split(b"\n"), start=1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if not (
            isinstance(line, dict)
            and line.get("kind") in ("steps", "epoch")
            and all(type(line.get(name)) is int for name in ("epoch", "step"))
        ):
            raise StateError(
                f"{path} is not the log of a training run, because line {number} lacks 'kind', 'epoch' or 'step': move "
                "the file, or use another directory"
            )
        yield line


def _dump(line: dict[str, Any]) -> bytes:
    return json.dumps(line).encode() + b"\n"
