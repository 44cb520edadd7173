from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardio.train import TrainConfig, train
from shardio.train.logs import read_log
from tests.train.toys import make_batches, make_linear


def _train(directory: Path, **options: Any) -> None:
    config = TrainConfig(
        **{"epochs": 2, "precision": "fp32", "device": "cpu", "directory": directory, "log_every": 2, **options}
    )
    train(make_linear(), make_batches([4] * 5), config, val_loader=make_batches([4]))


def test_the_log_has_a_line_for_every_so_many_steps_and_for_every_epoch(tmp_path: Path) -> None:
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


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    _train(tmp_path)
    log = tmp_path / "log.jsonl"
    whole = list(read_log(log))
    log.write_bytes(log.read_bytes()[:-10])
    assert list(read_log(log)) == whole[:-1]
    log.write_bytes(b"")
    assert list(read_log(log)) == []
    assert list(read_log(tmp_path / "nowhere.jsonl")) == []


def test_tensorboard_is_told_the_same(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    _train(tmp_path)
    _train(tmp_path, epochs=3, schedule="onecycle")
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    lines = list(read_log(tmp_path / "log.jsonl"))
    for kind in ("steps", "epoch"):
        found = {event.step: event.value for event in events.Scalars(f"{kind}/loss")}
        assert found == pytest.approx({line["step"]: line["loss"] for line in lines if line["kind"] == kind})
