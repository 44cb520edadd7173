"""``shardio train``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from shardio.cli.console import check_png_path, require_matplotlib, value_errors_as_usage_errors
from shardio.cli.loading import (
    BatchSize,
    NumWorkers,
    OnError,
    make_loader_options,
    report_rank,
    suggest_on_error,
)
from shardio.cli.terminal import echo
from shardio.images import DEFAULT_MAX_PIXELS

OptimizerName = Literal["adamw", "adam", "sgd", "rmsprop"]
ScheduleName = Literal["onecycle", "cosine", "cyclic", "step", "plateau", "constant"]
Precision = Literal["bf16", "fp16", "fp32"]

DATA, MODEL, LEARNING, RUNNING = "Data", "Model", "Learning", "The run"
"""Panels of ``--help``."""


def train(
    source: Annotated[
        Path, typer.Argument(help="A packed directory, a manifest, a directory of tars, or of class folders.")
    ],
    val: Annotated[Path | None, typer.Option(help="Another such source to validate on.", rich_help_panel=DATA)] = None,
    val_share: Annotated[
        float | None,
        typer.Option(
            help="Without --val, the share of SOURCE's samples to validate on, 0 for none.  [default: 0.2]",
            rich_help_panel=DATA,
        ),
    ] = None,
    batch_size: BatchSize = 32,
    image_size: Annotated[
        int, typer.Option(min=8, max=4096, help="Side of the square images in pixels.", rich_help_panel=DATA)
    ] = 64,
    num_workers: NumWorkers = 2,
    on_error: OnError = "raise",
    max_pixels: Annotated[
        int, typer.Option(min=1, help="An image of more pixels is an error.", rich_help_panel=DATA)
    ] = DEFAULT_MAX_PIXELS,
    model: Annotated[
        str,
        typer.Option(
            help="small, a residual network; torchvision:NAME or timm:NAME, where they are installed; or "
            "module:function or file.py:function, called with num_classes.",
            rich_help_panel=MODEL,
        ),
    ] = "small",
    pretrained: Annotated[
        bool, typer.Option("--pretrained", help="Begin with torchvision's or timm's weights.", rich_help_panel=MODEL)
    ] = False,
    compile_model: Annotated[
        bool, typer.Option("--compile", help="Compile the model by torch.compile.", rich_help_panel=MODEL)
    ] = False,
    script: Annotated[
        bool,
        typer.Option("--script", help="Make TorchScript of the model (before Python 3.14).", rich_help_panel=MODEL),
    ] = False,
    channels_last: Annotated[
        bool, typer.Option(help="Lay images and weights out channels last.", rich_help_panel=MODEL)
    ] = True,
    epochs: Annotated[int, typer.Option(min=1, help="How many epochs.", rich_help_panel=LEARNING)] = 10,
    accumulate: Annotated[
        int, typer.Option(min=1, help="Batches of one optimiser step.", rich_help_panel=LEARNING)
    ] = 1,
    lr: Annotated[float, typer.Option(help="The highest learning rate.", rich_help_panel=LEARNING)] = 2e-3,
    optimizer: Annotated[OptimizerName, typer.Option(help="As in torch.optim.", rich_help_panel=LEARNING)] = "adamw",
    weight_decay: Annotated[float, typer.Option(min=0, help="Of the optimiser.", rich_help_panel=LEARNING)] = 0.05,
    momentum: Annotated[float, typer.Option(min=0, help="Of sgd and rmsprop.", rich_help_panel=LEARNING)] = 0.9,
    schedule: Annotated[
        ScheduleName, typer.Option(help="How the learning rate goes.", rich_help_panel=LEARNING)
    ] = "onecycle",
    warmup: Annotated[
        float, typer.Option(help="Share of the steps in which onecycle and cosine rise.", rich_help_panel=LEARNING)
    ] = 0.3,
    period: Annotated[
        float | None,
        typer.Option(
            help="Epochs of a cycle of cyclic, between two cuts of step, without progress before one of plateau.  "
            "[default: a third of all]",
            rich_help_panel=LEARNING,
        ),
    ] = None,
    precision: Annotated[
        Precision, typer.Option(help="fp16 is for CUDA, with a GradScaler.", rich_help_panel=LEARNING)
    ] = "bf16",
    clip_norm: Annotated[
        float | None, typer.Option(help="The largest norm of all gradients.", rich_help_panel=LEARNING)
    ] = None,
    clip_value: Annotated[
        float | None, typer.Option(help="The largest magnitude of each gradient.", rich_help_panel=LEARNING)
    ] = None,
    gradient_penalty: Annotated[
        float | None, typer.Option(help="Weight of the gradient's norm in the loss.", rich_help_panel=LEARNING)
    ] = None,
    patience: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many epochs without progress.", rich_help_panel=LEARNING)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory for checkpoints, log and report. The same command again goes on where it was stopped.",
            rich_help_panel=RUNNING,
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin anew, whatever lies in the directory.", rich_help_panel=RUNNING)
    ] = False,
    checkpoint_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between checkpoints within an epoch.", rich_help_panel=RUNNING)
    ] = None,
    log_every: Annotated[
        int, typer.Option(min=1, help="Steps between two lines of the log.", rich_help_panel=RUNNING)
    ] = 10,
    plot: Annotated[
        Path | None,
        typer.Option(
            callback=check_png_path,
            metavar="FILE.png",
            help="Draw the learning rates, planned and taken.",
            rich_help_panel=RUNNING,
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            min=0, max=2**63 - 1, help="Of the weights, the order, the crops and the split.", rich_help_panel=RUNNING
        ),
    ] = 0,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Only algorithms that repeat every bit.", rich_help_panel=RUNNING)
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(help="Such as cuda or cpu; by default the best there is.", rich_help_panel=RUNNING),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Threads in which torch computes on the CPU.  [default: processors less workers, at least 1]",
            rich_help_panel=RUNNING,
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress bar.", rich_help_panel=RUNNING)] = False,
) -> None:
    """Train a classifier, and say how fast and how well.

    By several ranks: torchrun --nproc-per-node 2 -m shardio.train SOURCE …
    """
    import torch

    from shardio.cli import training

    if threads is not None:
        torch.set_num_threads(threads)
    num_threads = torch.get_num_threads()
    if plot is not None:
        require_matplotlib()
    if val is not None and val_share is not None:
        raise typer.BadParameter("validate on --val, or on a part of SOURCE, not both", param_hint="--val-share")
    share = 0.2 if val_share is None else val_share
    if not 0 <= share < 1:
        raise typer.BadParameter(f"must be at least 0 and below 1, got {share}", param_hint="--val-share")
    from shardio.train import Callback, Compile, GradientPenalty, RatePlot, TrainConfig, count_steps, seed_everything
    from shardio.train import train as train_model
    from shardio.train.ranks import failures_told, pick_device
    from shardio.train.threads import set_threads
    from shardio.world import find_world

    with value_errors_as_usage_errors():
        config = TrainConfig(
            epochs=epochs,
            optimizer=optimizer,
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            schedule=schedule,
            warmup=warmup,
            period=period,
            precision=precision,
            accumulate=accumulate,
            clip_norm=clip_norm,
            clip_value=clip_value,
            patience=patience,
            seed=seed,
            deterministic=deterministic,
            channels_last=channels_last,
            device=device,
            directory=out,
            resume=not fresh,
            checkpoint_every=checkpoint_every,
            log_every=log_every,
            data={"image_size": image_size, "val_share": 0.0 if val is not None else share},
        )
    report_rank()
    with failures_told(), suggest_on_error(on_error):
        data = training.open_data(source, val, share, image_size, seed, max_pixels)
        loader, val_loader = data.make_loaders(make_loader_options(batch_size, num_workers, on_error))
        seed_everything(seed)
        with value_errors_as_usage_errors():
            network = training.make_network(
                model, data.num_classes, image_size, pretrained=pretrained, is_scripted=script
            )
        if threads is None:
            done = set_threads(num_workers, pick_device(config.device), num_threads)
            if done is not None and find_world().rank == 0:
                echo(done, err=True)
        callbacks: list[Callback] = [] if plot is None else [RatePlot(plot, config, count_steps(loader, config))]
        if compile_model:
            callbacks.append(Compile())
        if gradient_penalty is not None:
            callbacks.append(GradientPenalty(gradient_penalty))
        with training.EpochBar(len(loader), is_shown=sys.stderr.isatty() and not quiet) as bar:
            train_model(network, loader, config, val_loader=val_loader, callbacks=[*callbacks, bar])
