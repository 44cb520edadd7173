"""``shardio train``."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from shardio.cli.options import (
    BatchSize,
    CacheFolder,
    CacheShared,
    CacheSize,
    NumWorkers,
    OnError,
    StorageOptionTexts,
    make_loader_options,
    read_remote_arguments,
    report_rank,
    suggest_on_error,
)
from shardio.cli.terminal import check_png_path, echo, printable, require_matplotlib, value_errors_as_usage_errors
from shardio.images import DEFAULT_MAX_PIXELS
from shardio.train import TrainConfig

DATA, MODEL, LEARNING, RUN = "Data", "Model", "Learning", "The run"
"""The panels of ``--help``."""

PANELS = {"channels_last": MODEL, "checkpoint_every": RUN, "log_every": RUN, "deterministic": RUN, "device": RUN}
"""The panels of the options that are made from TrainConfig, except those in LEARNING."""

DEFAULTS = {"lr": 2e-3}
"""Defaults that differ from those of TrainConfig: this learning rate suits the small model."""

OTHERWISE = {"directory": "--out", "resume": "--fresh", "seed": "--seed"}
"""Settings of TrainConfig whose options are parameters of ``train``."""

NO_OPTIONS = ("steps_per_epoch", "num_classes", "mean", "std", "data")
"""Settings of TrainConfig that have no option."""


def train(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE", help="A packed directory with classes, its manifest, or class folders of images."
        ),
    ],
    *,
    val: Annotated[
        Path | None,
        typer.Option(help="The validation data, in any form that SOURCE accepts.", rich_help_panel=DATA),
    ] = None,
    val_share: Annotated[
        float | None,
        typer.Option(
            help="Without --val, the share of SOURCE's samples to validate on; 0 disables validation (default: 0.2).",
            rich_help_panel=DATA,
        ),
    ] = None,
    batch_size: BatchSize = 32,
    image_size: Annotated[
        int, typer.Option(min=8, max=4096, help="Side length of the square images in pixels.", rich_help_panel=DATA)
    ] = 64,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Augment by a recipe of shardio.transforms.recipes, such as trivial_augment (default: crops and "
            "flips). shardio augment shows what it does.",
            rich_help_panel=DATA,
        ),
    ] = None,
    transform: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="Augment by your own transform, as package.module:name or path/to/file.py:name.",
            rich_help_panel=DATA,
        ),
    ] = None,
    num_workers: NumWorkers = 2,
    on_error: OnError = "raise",
    max_pixels: Annotated[
        int,
        typer.Option(
            min=1, help="Maximum number of pixels in an image; a larger image is an error.", rich_help_panel=DATA
        ),
    ] = DEFAULT_MAX_PIXELS,
    storage_option: StorageOptionTexts = None,
    cache: CacheFolder = None,
    cache_size: CacheSize = None,
    cache_shared: CacheShared = False,
    model: Annotated[
        str,
        typer.Option(
            help="small (a residual network), torchvision:NAME or timm:NAME (if installed), or your own "
            "module:function or file.py:function, which is called with those of num_classes, image_size and pretrained "
            "that it has parameters for.",
            rich_help_panel=MODEL,
        ),
    ] = "small",
    pretrained: Annotated[
        bool,
        typer.Option(
            "--pretrained",
            help="Start from pretrained weights (torchvision, timm, or your own function).",
            rich_help_panel=MODEL,
        ),
    ] = False,
    compile_model: Annotated[
        bool, typer.Option("--compile", help="Compile the model with torch.compile.", rich_help_panel=MODEL)
    ] = False,
    script: Annotated[
        bool,
        typer.Option(
            "--script", help="Convert the model to TorchScript (needs Python 3.13 or older).", rich_help_panel=MODEL
        ),
    ] = False,
    gradient_penalty: Annotated[
        float | None, typer.Option(help="Weight of the gradient norm to add to the loss.", rich_help_panel=LEARNING)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory for checkpoints, log and report. Rerun the same command to resume an interrupted run.",
            rich_help_panel=RUN,
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start a new run, replacing an earlier one in --out.", rich_help_panel=RUN)
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            callback=check_png_path,
            metavar="FILE.png",
            help="Plot the planned and the actual learning rates to this file.",
            rich_help_panel=RUN,
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            min=0, max=2**63 - 1, help="Seed of the weights, the order, the crops and the split.", rich_help_panel=RUN
        ),
    ] = 0,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of torch's CPU threads (default on a CPU: processors minus workers, at least 1).",
            rich_help_panel=RUN,
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress bar.", rich_help_panel=RUN)] = False,
    **settings: Any,
) -> None:
    """Train a classifier, and print how fast and how well it learns.

    On several ranks: torchrun --nproc-per-node 2 -m shardio train SOURCE …

    Example: shardio train packed/train --val packed/val --model torchvision:resnet50 --recipe imagenet_train
    """
    import torch

    from shardio.cli import training
    from shardio.cli.training import leave_processors_to_workers

    if threads is not None:
        torch.set_num_threads(threads)
    num_threads = torch.get_num_threads()
    if plot is not None:
        require_matplotlib()
    if val is not None and val_share is not None:
        raise typer.BadParameter("pass either --val or --val-share, not both", param_hint="--val-share")
    share = 0.2 if val_share is None else val_share
    if not 0 <= share < 1:
        raise typer.BadParameter(f"must be at least 0 and below 1, got {share}", param_hint="--val-share")
    from shardio.train import (
        Callback,
        Compile,
        GradientPenalty,
        RatePlot,
        count_steps,
        seed_everything,
        train as train_model,
    )
    from shardio.train.step import reported_failures, use_device
    from shardio.world import find_world

    remote = read_remote_arguments(storage_option, cache, cache_size, cache_shared)
    with value_errors_as_usage_errors():
        transforms = training.choose_transforms(recipe, transform, image_size)
    data_settings: dict[str, float | str] = {
        "image_size": image_size,
        "val_share": 0.0 if val is not None else share,
        "recipe": recipe or transform or "",
    }
    with _errors_name_the_option():
        config = TrainConfig(**settings, seed=seed, directory=out, resume=not fresh, data=data_settings)
    report_rank()
    with reported_failures(), suggest_on_error(on_error):
        data = training.open_data(source, val, share, transforms, seed, max_pixels, remote)
        loader, val_loader = data.make_loaders(make_loader_options(batch_size, num_workers, on_error))
        seed_everything(seed)
        with value_errors_as_usage_errors():
            network = training.make_network(
                model, data.num_classes, image_size, pretrained=pretrained, is_scripted=script
            )
        if threads is None:
            done = leave_processors_to_workers(num_workers, use_device(config.device), num_threads)
            if done is not None and find_world().rank == 0:
                echo(done, err=True)
        callbacks: list[Callback] = [] if plot is None else [RatePlot(plot, config, count_steps(loader, config))]
        if compile_model:
            callbacks.append(Compile())
        if gradient_penalty is not None:
            callbacks.append(GradientPenalty(gradient_penalty))
        with training.EpochBar(len(loader), is_shown=sys.stderr.isatty() and not quiet) as bar:
            train_model(network, loader, config, val_loader=val_loader, callbacks=[*callbacks, bar])


def _make_options() -> list[inspect.Parameter]:
    """Return an option for each setting of TrainConfig: its name, type, default and help text."""
    texts = dict(re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", inspect.getdoc(TrainConfig) or "", re.MULTILINE))
    types = get_type_hints(TrainConfig)
    options = []
    for setting in dataclasses.fields(TrainConfig):
        name = setting.name
        if name in OTHERWISE or name in NO_OPTIONS:
            continue
        flag = [_option_of(name)] if setting.default is False else []  # Without this, typer would add --no-NAME.
        help_text, panel = " ".join(texts.get(name, "").split()), PANELS.get(name, LEARNING)
        default = DEFAULTS.get(name, setting.default)
        option = typer.Option(default, *flag, help=help_text, rich_help_panel=panel)
        options.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=types[name]))
    return options


def _option_of(setting: str) -> str:
    return OTHERWISE.get(setting, f"--{setting.replace('_', '-')}")


def _with_options() -> inspect.Signature:
    """Return the command's signature for typer, with the settings of TrainConfig in place of ``**settings``."""
    signature = inspect.signature(train, eval_str=True)
    *parameters, _ = signature.parameters.values()
    place = [parameter.name for parameter in parameters].index("gradient_penalty")
    return signature.replace(parameters=[*parameters[:place], *_make_options(), *parameters[place:]])


@contextmanager
def _errors_name_the_option() -> Iterator[None]:
    """Turn TrainConfig's errors, which start with the name of a setting, into usage errors about its option."""
    try:
        yield
    except ValueError as error:
        setting, _, what = str(error).partition(" ")
        raise typer.BadParameter(printable(what), param_hint=_option_of(setting)) from error


train.__signature__ = _with_options()  # type: ignore[attr-defined]  # Python's own protocol: PEP 362
