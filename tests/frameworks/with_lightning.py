"""The code that each rank runs in a test of Lightning."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardio import DataLoader, EpochSampler, ShardDataset, ShardMapDataset
from shardio.libraries import import_library
from shardio.world import find_world
from tests.frameworks.launch import record_epochs
from tests.frameworks.samples import FIELDS, Own, make_mixed

import_library("torchvision")  # Lightning imports torchvision, which may not be compatible with torch.
from lightning.pytorch import LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.utilities import CombinedLoader  # noqa: E402


def make_loaders(packed: str) -> tuple[DataLoader, DataLoader]:
    training = ShardDataset(packed, fields=("label", "key"), shuffle=True)
    validation = ShardDataset(packed, fields=("label", "key"))
    return DataLoader(training, batch_size=4, num_workers=1), DataLoader(validation, batch_size=4)


def make_mixtures(packed: str) -> tuple[DataLoader, DataLoader]:
    training, validation = make_mixed(packed), make_mixed(packed, shuffle=False)
    return DataLoader(training, batch_size=4, num_workers=1), DataLoader(validation, batch_size=4)


def make_sampled(packed: str) -> tuple[DataLoader, DataLoader]:
    dataset = ShardMapDataset(packed, fields=FIELDS)
    validation = DataLoader(dataset, batch_size=4, sampler=EpochSampler(dataset, shuffle=False))
    return DataLoader(dataset, batch_size=4, sampler=EpochSampler(dataset)), validation


def make_own(packed: str, **options: Any) -> tuple[DataLoader, DataLoader]:
    return DataLoader(Own(), batch_size=4, shuffle=True, num_workers=2, **options), DataLoader(Own(), batch_size=4)


MAKERS: dict[str, Callable[[str], tuple[DataLoader, DataLoader]]] = {
    "shards": make_loaders,
    "sampled": make_sampled,
    "mixed": make_mixtures,
    "own": make_own,
    "in threads": partial(make_own, worker_method="thread"),
}


def keys_of(batch: Any) -> list[str]:
    """Return the keys in a batch of labels and keys, or of keys only."""
    return list(batch if isinstance(batch[0], str) else batch[1])


class Recorded(LightningModule):
    """A module that records the epoch, the number and the keys of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(1, 1)
        self.training_batches: list[tuple[int, int, list[str]]] = []
        self.validation_batches: list[tuple[int, int, list[str]]] = []

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        self.training_batches.append((self.current_epoch, number, keys_of(batch)))
        loss: torch.Tensor = self.weight(torch.ones(1, 1)).square().mean()
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.validation_batches.append((self.current_epoch, number, keys_of(batch)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(folder: Path, packed: str, kind: str) -> None:
    """Train for two epochs, with a checkpoint after two batches of the second epoch, then resume from the checkpoint.

    Record the batches in ``training``, ``validation`` and ``resumed``; the last includes those before the checkpoint.
    """
    make = MAKERS[kind]
    whole, rest = Recorded(), Recorded()
    loaders = make(packed)
    num_shares = 1 if loaders[0].has_order else find_world().world_size  # Lightning splits other loaders.
    step = len(loaders[0]) // num_shares + 2
    saved = ModelCheckpoint(folder, kind, every_n_train_steps=step, save_top_k=-1)
    trainer(folder, callbacks=[saved]).fit(whole, *loaders)
    checkpoint = f"{folder / kind}.ckpt"
    trainer(folder, enable_checkpointing=False).fit(rest, *make(packed), ckpt_path=checkpoint)
    before = whole.training_batches[:step]
    assert before[-1][:2] == (1, 1)
    for name, batches in {
        "training": whole.training_batches,
        "validation": whole.validation_batches,
        "resumed": before + rest.training_batches,
    }.items():
        epochs = [[keys for each, _, keys in batches if each == epoch] for epoch in range(2)]
        record_epochs(folder / f"{kind}-{name}", epochs)


class Reloading(Recorded):
    def __init__(self, packed: str) -> None:
        super().__init__()
        self.packed = packed

    def train_dataloader(self) -> DataLoader:
        return make_loaders(self.packed)[0]


def reload(folder: Path, packed: str) -> list[list[str]]:
    """Train for two epochs, each with its own loader. Return the keys of both epochs."""
    model = Reloading(packed)
    trainer(folder, enable_checkpointing=False, reload_dataloaders_every_n_epochs=1).fit(model)
    epochs = [[keys for each, _, keys in model.training_batches if each == epoch] for epoch in range(2)]
    record_epochs(folder / "shards-reloaded", epochs)
    return [[key for keys in epoch for key in keys] for epoch in epochs]


def trainer(folder: Path, **options: Any) -> Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    world: dict[str, Any] = {"accelerator": "cpu", "devices": find_world().world_size, "strategy": "ddp"}
    return Trainer(num_sanity_val_steps=0, default_root_dir=folder, max_epochs=2, **quiet, **world, **options)


def copy_combined(packed: str) -> None:
    """Copy combined loaders in the middle of an epoch, without their iterators, as Lightning's loops do."""
    for make in MAKERS.values():
        loaders = make(packed)
        combined = CombinedLoader(list(loaders), "min_size")
        next(iter(combined))
        assert len(list(copy.deepcopy(combined))) == min(map(len, loaders))


def run(folder: Path, packed: str) -> list[list[str]]:
    copy_combined(packed)
    for kind in MAKERS:
        fit(folder, packed, kind)
    return reload(folder, packed)
