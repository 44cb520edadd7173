"""Runs to report on, and the content of their pictures."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageColor

from shardio.train import Callback, EpochResult, StepRecord, TrainConfig, train
from shardio.train.callbacks import LOOKS
from tests.train.small_data import PLAIN, make_linear, make_separable_batches

STEPS_PER_EPOCH = 5


class Listener(Callback):
    """Keep the records; end a run that is to be killed after a step."""

    def __init__(self, dies_after: int | None = None) -> None:
        self.records: list[StepRecord] = []
        self.dies_after = dies_after

    def on_log(self, record: StepRecord) -> None:
        self.records.append(record)

    def on_batch(self, batch: Any) -> None:
        if self.dies_after is not None and len(self.records) == self.dies_after:
            raise KeyboardInterrupt


def make_report_config(directory: Path | None, **options: Any) -> TrainConfig:
    settings = {"epochs": 3, "precision": "fp32", "device": "cpu", "lr": 0.05, "log_every": 1, **PLAIN, **options}
    return TrainConfig(directory=directory, **settings)


def train_reported(config: TrainConfig, *callbacks: Callback, has_validation: bool = True) -> list[EpochResult]:
    validation = make_separable_batches(2, seed=1) if has_validation else None
    batches = make_separable_batches(STEPS_PER_EPOCH)
    return train(make_linear(), batches, config, val_loader=validation, callbacks=callbacks)


def train_until_killed(config: TrainConfig, after: int, *callbacks: Callback) -> list[StepRecord]:
    """Return what a run logged that was killed in the step after this many."""
    listener = Listener(dies_after=after)
    with pytest.raises(KeyboardInterrupt):
        train_reported(config, listener, *callbacks)
    assert len(listener.records) == after
    return listener.records


def size_and_curves(png: bytes) -> tuple[tuple[int, int], set[str]]:
    """Return the size of a picture, and the names of the curves whose colours it contains."""
    with Image.open(io.BytesIO(png)) as picture:
        assert picture.format == "PNG"
        pixels = np.asarray(picture.convert("RGB"))
    found = {
        name
        for name, look in LOOKS.items()
        if (pixels == np.array(ImageColor.getrgb(look["color"]), dtype=np.uint8)).all(axis=2).sum() >= 10
    }
    height, width = pixels.shape[:2]
    return (width, height), found


def hide_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
