"""What a run writes of itself while it goes on: a log for programs, and one for TensorBoard."""

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
    """Writes ``log.jsonl``: each line a JSON object, a StepRecord (of kind ``steps``) or an EpochResult (``epoch``).

    When a run is gone on with, the lines of what will be done again are taken out first.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / LOG

    def on_start(self, num_epochs: int, num_steps: int) -> None:
        kept = [line for line in read_log(self.path) if _is_before(line, num_epochs, num_steps)]
        with write_whole(self.path) as file:
            file.writelines(_dump(line) for line in kept)

    def on_log(self, record: StepRecord) -> None:
        self._append({"kind": "steps", **dataclasses.asdict(record)})

    def on_epoch(self, result: EpochResult) -> None:
        self._append({"kind": "epoch", **dataclasses.asdict(result)})

    def _append(self, line: dict[str, Any]) -> None:
        with naming(self.path), self.path.open("ab") as file:
            file.write(_dump(line))


class TensorBoardLog(Callback):
    """Writes the same for TensorBoard."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: Any = None

    def on_start(self, num_epochs: int, num_steps: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._directory), purge_step=num_steps + 1)

    def on_log(self, record: StepRecord) -> None:
        self._write(record, record.step, "steps")

    def on_epoch(self, result: EpochResult) -> None:
        self._write(result, result.step, "epoch")
        self._writer.flush()

    def on_end(self, results: list[EpochResult]) -> None:
        self._writer.close()

    def _write(self, figures: StepRecord | EpochResult, step: int, kind: str) -> None:
        for name, value in dataclasses.asdict(figures).items():
            if value is not None and name not in ("step", "epoch"):
                self._writer.add_scalar(f"{kind}/{name}", float(value), step)


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a log; what was half-written when a process or a machine stopped is left out.

    Raises:
        StateError: If a line is not one that a training run writes.
    """
    if not path.exists():
        return
    for number, text in enumerate(path.read_bytes().split(b"\n"), start=1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if not _is_of_run(line):
            raise StateError(
                f"{path} is not the log of a training run: its line {number} lacks the kind, epoch or step that "
                "shardio writes: move it away, or name another directory"
            )
        yield line


def explain_foreign_log(directory: Path) -> str | None:
    """Return why a run must not write its log into a directory, which holds another tool's; None if it may."""
    try:
        for _ in read_log(directory / LOG):
            pass
    except StateError as error:
        return str(error)
    return None


def _is_of_run(line: Any) -> bool:
    return (
        isinstance(line, dict)
        and line.get("kind") in ("steps", "epoch")
        and all(type(line.get(name)) is int for name in ("epoch", "step"))
    )


def _is_before(line: dict[str, Any], num_epochs: int, num_steps: int) -> bool:
    return bool(line["epoch"] < num_epochs if line["kind"] == "epoch" else line["step"] <= num_steps)


def _dump(line: dict[str, Any]) -> bytes:
    return json.dumps(line).encode() + b"\n"
