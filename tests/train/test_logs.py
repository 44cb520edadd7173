from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardio.errors import StateError
from shardio.train import TrainConfig, train
from shardio.train.callbacks import read_log
from tests.train.small_data import make_batches, make_linear

pytestmark = pytest.mark.usefixtures("no_report")


def _train(directory: Path, **options: Any) -> None:
    config = TrainConfig(
        **{"epochs": 2, "precision": "fp32", "device": "cpu", "directory": directory, "log_every": 2, **options}
    )
    train(make_linear(), make_batches([4] * 5), config, val_loader=make_batches([4]))


def test_the_log_has_a_line_every_log_every_steps_and_every_epoch(tmp_path: Path) -> None:
    _train(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["step"], line["epoch"]) for line in lines] == [
        ("steps", 2, 0),
        ("steps", 4, 0),
        ("steps", 5, 0),
        ("epoch", 5, 0),
        ("steps", 6, 1),
        ("steps", 8, 1),
        ("steps", 10, 1),
        ("epoch", 10, 1),
    ]
    assert list(read_log(tmp_path / "log.jsonl")) == lines
    for line in lines:
        assert line["loss"] > 0
        assert line["lr"] > 0


def test_a_truncated_line_is_skipped(tmp_path: Path) -> None:
    _train(tmp_path)
    log = tmp_path / "log.jsonl"
    whole = list(read_log(log))
    log.write_bytes(log.read_bytes()[:-10])
    assert list(read_log(log)) == whole[:-1]
    log.write_bytes(b"")
    assert list(read_log(log)) == []
    assert list(read_log(tmp_path / "nowhere.jsonl")) == []


FOREIGN = {
    "another tool's": b'{"loss": 0.5, "step": 3}\n',
    "of another kind": b'{"kind": "validation", "epoch": 0, "step": 3}\n',
    "an epoch that is not a number": b'{"kind": "epoch", "epoch": "1", "step": 3}\n',
    "without a step": b'{"kind": "steps", "epoch": 1}\n',
    "a list": b"[1, 2]\n",
    "a number": b"3\n",
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("names", [[], ["last.pt", "best.pt"]], ids=["log", "checkpoints"])
def test_the_log_of_another_tool_is_refused_and_nothing_is_removed(
    tmp_path: Path, content: bytes, resume: bool, names: list[str]
) -> None:
    _train(tmp_path, epochs=1)
    for path in tmp_path.iterdir():
        if path.name not in names:
            path.unlink()
    (tmp_path / "log.jsonl").write_bytes(b"\n" + content)
    (tmp_path / ".last.pt.1.partial").write_bytes(b"")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(StateError, match=r"log\.jsonl is not the log of a training run, because line 2 ") as caught:
        _train(tmp_path, resume=resume)
    assert "move the file, or use another directory" in str(caught.value)
    (tmp_path / ".run.lock").unlink()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_tensorboard_gets_the_same_figures(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    _train(tmp_path)
    _train(tmp_path, epochs=3, schedule="onecycle")
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    lines = list(read_log(tmp_path / "log.jsonl"))
    for kind in ("steps", "epoch"):
        found = {event.step: event.value for event in events.Scalars(f"{kind}/loss")}
        assert found == pytest.approx({line["step"]: line["loss"] for line in lines if line["kind"] == kind})
