"""The code of each rank in a test of mixtures with Accelerate, Hugging Face's Trainer and Lightning."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from shardio import DataLoader
from shardio.world import find_world
from tests.frameworks import with_accelerate, with_lightning, with_transformers
from tests.frameworks.launch import record_epochs
from tests.frameworks.mixtures import MAKERS, STOP


def make_loader(packed: str, kind: str, stop: Any = "all-once") -> DataLoader:
    return DataLoader(MAKERS[kind](packed, stop=stop), batch_size=4, num_workers=1)


def with_prepare(folder: Path, packed: str) -> dict[str, list[str]]:
    """Record two epochs with Accelerate, of which the second one is resumed. Return those with another stop."""
    found = {}
    for kind in MAKERS:
        assert with_accelerate.deliver(folder / kind, partial(make_loader, kind=kind), packed, {}) == 4
        make = partial(make_loader, packed, kind, STOP)
        loader = with_accelerate.prepare(make())
        batches = list(loader)
        loader.set_epoch(1)
        batches += with_accelerate.interrupt(loader, partial(_prepare, make))
        found[kind] = [key for _, keys in batches for key in keys]
    return found


def _prepare(make: Callable[[], DataLoader]) -> Any:
    return with_accelerate.prepare(make())


class MixtureTrainer(with_transformers.ShardTrainer):
    """A Trainer that trains with a shardio.DataLoader over a mixture."""

    def get_train_dataloader(self) -> Any:
        arguments = self.args
        loader = DataLoader(
            self.train_dataset,
            batch_size=arguments.train_batch_size,
            num_workers=arguments.dataloader_num_workers,
            collate_fn=self.data_collator,
        )
        return self.accelerator.prepare(loader)


def with_trainer(folder: Path, packed: str) -> None:
    """Train for two epochs, with a checkpoint after two batches of the second epoch, then resume from it."""
    with_transformers.ShardTrainer = MixtureTrainer  # type: ignore[misc]  # The functions below train with it.
    for kind, make in MAKERS.items():
        mixed = make(packed, stop="all-once")
        steps = -(-mixed.num_all_samples // (4 * find_world().world_size))
        whole = with_transformers.train(MixtureTrainer, folder / kind / "run", mixed, save_steps=steps + 2)
        record_epochs(folder / kind / "training", [whole[:steps], whole[steps:]])
        checkpoint = folder / kind / "run" / f"checkpoint-{steps + 2}"
        rest = with_transformers.train(
            MixtureTrainer, folder / kind / "run", mixed, checkpoint=checkpoint, ignore_data_skip=True
        )
        record_epochs(folder / kind / "resumed", [whole[:steps], whole[steps : steps + 2] + rest])


def with_fit(folder: Path, packed: str) -> None:
    """Train and validate with Lightning for two epochs, then resume within the second epoch."""
    for kind, make in MAKERS.items():

        def make_loaders(packed: str, make: Any = make) -> tuple[DataLoader, DataLoader]:
            training, validation = make(packed, stop="all-once"), make(packed, stop="all-once", shuffle=False)
            return DataLoader(training, batch_size=4, num_workers=1), DataLoader(validation, batch_size=4)

        with_lightning.MAKERS[kind] = make_loaders
        with_lightning.fit(folder, packed, kind)


def run(folder: Path, packed: str) -> dict[str, list[str]]:
    with_fit(folder / "lightning", packed)
    with_trainer(folder / "trainer", packed)
    return with_prepare(folder / "accelerate", packed)
