"""The code that each rank runs in a test of Hugging Face's Trainer. The classes are those in docs/frameworks.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader as TorchLoader

from shardio import DataLoader, EpochSampler, ShardDataset, ShardMapDataset
from shardio.libraries import import_library
from shardio.world import find_world
from tests.frameworks.launch import error_of, record_epochs
from tests.frameworks.samples import FIELDS, collate, make_mixed

import_library("torchvision")  # Transformers imports torchvision, which may not match torch.
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402
from transformers.trainer_pt_utils import IterableDatasetShard  # noqa: E402


class ShardTrainer(Trainer):
    """A Trainer that trains with a shardio.DataLoader."""

    def get_train_dataloader(self) -> Any:
        dataset: Any = self.train_dataset
        arguments = self.args
        loader = DataLoader(
            dataset,
            batch_size=arguments.train_batch_size,
            sampler=None if isinstance(dataset, ShardDataset) else EpochSampler(dataset, seed=arguments.seed),
            num_workers=arguments.dataloader_num_workers,
            collate_fn=self.data_collator,
        )
        return self.accelerator.prepare(loader)


class LoaderState(TrainerCallback):
    """Save the loader's state with each checkpoint, and load it when training resumes."""

    def on_save(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **others: Any) -> None:
        if state.is_world_process_zero:
            self.path(args, state).write_text(json.dumps(train_dataloader.state_dict()))

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **others: Any) -> None:
        if state.global_step:
            train_dataloader.load_state_dict(json.loads(self.path(args, state).read_text()))

    def path(self, args: Any, state: Any) -> Path:
        return Path(args.output_dir, f"checkpoint-{state.global_step}", "loader.json")


class Recorded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(1, 1)
        self.batches: list[list[int]] = []

    def forward(self, labels: torch.Tensor, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
        self.batches.append(numbers.tolist())
        return {"loss": self.weight(labels.float()[:, None]).square().mean()}


class MixtureTrainer(ShardTrainer):
    def get_train_dataloader(self) -> Any:
        arguments: Any = self.args
        options = {"num_workers": arguments.dataloader_num_workers, "collate_fn": self.data_collator}
        return self.accelerator.prepare(DataLoader(self.train_dataset, arguments.train_batch_size, **options))


def run(folder: Path, packed: str) -> dict[str, Any]:
    shards, sampled = ShardDataset(packed, fields=FIELDS, shuffle=True), ShardMapDataset(packed, fields=FIELDS)
    fit(folder / "shards", shards)
    fit(folder / "sampled", sampled)
    fit(folder / "mixed", make_mixed(packed), MixtureTrainer)
    shares = {"accelerator_config": {"dispatch_batches": False}}
    alone = ShardDataset(packed, fields=FIELDS, shuffle=True, rank=0, world_size=1)
    return {
        # With workers, torch would wait 5 s for them after the error.
        "skipped": error_of(lambda: resume(folder / "shards", shards, ignore_data_skip=False, num_workers=0)),
        "not split": error_of(lambda: plain(folder / "not-split", alone, **shares)),
        "dispatched": error_of(lambda: plain(folder / "dispatched", shards)),
        "shared": error_of(lambda: plain(folder / "shared", shards, **shares)),
        "map-style": error_of(lambda: plain(folder / "map-style", sampled)),
        "by hand": error_of(lambda: by_hand(packed)),
    }


def fit(folder: Path, dataset: Any, kind: type[Any] = ShardTrainer) -> None:
    """Train for two epochs, with a checkpoint after two batches of the second, then resume from the checkpoint."""
    steps = steps_of(dataset)
    whole = train(kind, folder / "run", dataset, save_steps=steps + 2)
    record_epochs(folder / "training", [whole[:steps], whole[steps:]])
    rest = resume(folder, dataset, kind, ignore_data_skip=True)
    record_epochs(folder / "resumed", [whole[:steps], whole[steps : steps + 2] + rest])


def resume(folder: Path, dataset: Any, kind: type[Any] = ShardTrainer, **options: Any) -> list[list[int]]:
    checkpoint = folder / "run" / f"checkpoint-{steps_of(dataset) + 2}"
    return train(kind, folder / "run", dataset, checkpoint=checkpoint, **options)


def steps_of(dataset: Any) -> int:
    num_samples = len(dataset) if isinstance(dataset, ShardMapDataset) else dataset.num_all_samples
    return -(-num_samples // (4 * find_world().world_size))


def plain(folder: Path, dataset: Any, **options: Any) -> None:
    batches = train(Trainer, folder / "run", dataset, **options)
    record_epochs(folder / "training", [batches[: len(batches) // 2], batches[len(batches) // 2 :]])


def train(
    kind: type[Any], folder: Path, dataset: Any, *, checkpoint: Path | None = None, num_workers: int = 1, **options: Any
) -> list[list[int]]:
    model, is_ours = Recorded(), issubclass(kind, ShardTrainer)
    arguments = TrainingArguments(
        str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=4,
        dataloader_num_workers=num_workers if is_ours else 0,
        remove_unused_columns=False,
        save_strategy="steps" if "save_steps" in options else "no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    callbacks = [LoaderState()] if is_ours else []
    trainer = kind(model, arguments, data_collator=collate, train_dataset=dataset, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return model.batches


def by_hand(packed: str) -> None:
    """Wrap the dataset of one of two ranks as older versions of Trainer do."""
    dataset = ShardDataset(packed, fields="label", rank=0, world_size=2)
    list(TorchLoader(IterableDatasetShard(dataset, 4, num_processes=2), 4))
