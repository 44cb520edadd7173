"""``shardio train``."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import typer

from shardio.cli.console import make_bar, wrong_values_are_wrong_usage
from shardio.cli.loading import BatchSize, NumWorkers, OnError, bad_samples_name_the_option, make_loader_options
from shardio.images import DEFAULT_MAX_PIXELS

OptimizerName = Literal["adamw", "sgd"]
Precision = Literal["bf16", "fp16", "fp32"]

if TYPE_CHECKING:
    from shardio.loader import DataLoader
    from shardio.train import EpochResult
    from shardio.train.meters import Score


def train(
    source: Annotated[Path, typer.Argument(help="A packed directory, a manifest, or a directory of tars.")],
    epochs: Annotated[int, typer.Option(min=1, help="How many epochs.")] = 10,
    batch_size: BatchSize = 32,
    accumulate: Annotated[int, typer.Option(min=1, help="Batches of one optimiser step.")] = 1,
    image_size: Annotated[int, typer.Option(min=8, help="Side of the square images in pixels.")] = 64,
    lr: Annotated[float, typer.Option(help="The highest learning rate of the OneCycle schedule.")] = 2e-3,
    optimizer: Annotated[OptimizerName, typer.Option(help="AdamW, or SGD with momentum.")] = "adamw",
    weight_decay: Annotated[float, typer.Option(min=0, help="Of the optimiser.")] = 0.05,
    precision: Annotated[Precision, typer.Option(help="fp16 is for CUDA, with a GradScaler.")] = "bf16",
    val_share: Annotated[float, typer.Option(help="Share of the samples that is held out to validate on.")] = 0.2,
    num_workers: NumWorkers = 2,
    on_error: OnError = "raise",
    max_pixels: Annotated[int, typer.Option(min=1, help="An image of more pixels is an error.")] = DEFAULT_MAX_PIXELS,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Of the weights, the order, the crops and the split.")
    ] = 0,
    device: Annotated[str | None, typer.Option(help="Such as cuda or cpu; by default the best there is.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress bar.")] = False,
) -> None:
    """Train a small residual network on a packed dataset, and say how fast and how well."""
    import torch

    from shardio.train import TrainConfig, small_resnet
    from shardio.train import train as run

    if not 0 < val_share < 1:
        raise typer.BadParameter(f"must lie between 0 and 1, got {val_share}", param_hint="--val-share")
    with wrong_values_are_wrong_usage():
        config = TrainConfig(
            epochs=epochs,
            optimizer=optimizer,
            lr=lr,
            weight_decay=weight_decay,
            precision=precision,
            accumulate=accumulate,
            device=device,
        )
    torch.manual_seed(seed)
    options = make_loader_options(batch_size, num_workers, on_error)
    loader, val_loader, num_classes = _make_loaders(source, image_size, val_share, seed, max_pixels, options)
    is_shown = sys.stderr.isatty() and not quiet
    with bad_samples_name_the_option(on_error), _EpochBar(len(loader), is_shown=is_shown) as bar:
        run(
            small_resnet(num_classes, image_size),
            loader,
            config,
            val_loader=val_loader,
            on_batch=bar.advance,
            on_epoch=bar.finish_epoch,
        )


def _make_loaders(
    source: Path, image_size: int, val_share: float, seed: int, max_pixels: int, options: dict[str, Any]
) -> tuple[DataLoader, DataLoader, int]:
    """Return the training loader, the validation loader and the number of classes."""
    from torch.utils.data import Subset

    from shardio.datasets import EpochSampler, ShardMapDataset
    from shardio.errors import FormatError
    from shardio.loader import DataLoader
    from shardio.order import make_key, permute
    from shardio.shards import open_table
    from shardio.transforms import CenterCrop, Compose, RandomHorizontalFlip, RandomResizedCrop, Resize

    augmented = Compose([RandomResizedCrop(image_size, scale=(0.25, 1.0)), RandomHorizontalFlip()])
    central = Compose([Resize(image_size * 8 // 7), CenterCrop(image_size)])
    if not open_table(source).manifest.classes:
        raise FormatError(f"{source} has no classes: pack it from class folders (IMAGES/class/name.jpg)")
    training = ShardMapDataset(source, transform=augmented, max_pixels=max_pixels)
    validation = ShardMapDataset(source, transform=central, max_pixels=max_pixels)
    num_val = round(len(training) * val_share)
    if not 0 < num_val < len(training):
        raise FormatError(f"{source} has {len(training)} samples, too few to hold out {val_share:.0%} for validation")
    chosen = permute(np.arange(len(training)), np.array([len(training)]), make_key(seed, "split")).tolist()
    train_set, val_set = Subset(training, chosen[num_val:]), Subset(validation, sorted(chosen[:num_val]))
    sampler, val_sampler = EpochSampler(train_set, seed=seed), EpochSampler(val_set, shuffle=False)
    return (
        DataLoader(train_set, sampler=sampler, **options),
        DataLoader(val_set, sampler=val_sampler, **options),
        len(training.classes),
    )


class _EpochBar:
    """One line an epoch, and a bar within it on a terminal."""

    def __init__(self, num_batches: int, *, is_shown: bool) -> None:
        self._bar = make_bar() if is_shown else None
        self._start = time.perf_counter()
        if self._bar is not None:
            self._bar.add_task("epoch 0", total=num_batches, rate="")

    def advance(self, number: int, score: Score) -> None:
        if self._bar is not None:
            rate = score.num_images / (time.perf_counter() - self._start)
            self._bar.update(self._bar.task_ids[0], completed=number + 1, rate=f"{rate:.0f} images/s")

    def finish_epoch(self, result: EpochResult) -> None:
        line = (
            f"epoch {result.epoch}  loss {result.loss:.3f}  accuracy {result.accuracy:.1%}  "
            f"val loss {result.val_loss:.3f}  val accuracy {result.val_accuracy:.1%}  "
            f"{result.images_per_s:.0f} images/s  waiting for data {result.data_wait_share:.0%}"
        )
        if self._bar is None:
            typer.echo(line)
        else:
            self._bar.console.print(line, highlight=False)
            self._bar.update(self._bar.task_ids[0], completed=0, description=f"epoch {result.epoch + 1}")
        self._start = time.perf_counter()

    def __enter__(self) -> _EpochBar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
