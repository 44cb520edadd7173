"""Implement ``shardio train``."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import numpy as np
import typer

from shardio.cli.options import (
    BatchSize,
    CacheFolder,
    CacheShared,
    CacheSize,
    NumWorkers,
    OnError,
    RemoteArguments,
    StorageOptionTexts,
    has_class_folders,
    make_loader_options,
    make_transform,
    parse_size_option,
    read_remote_arguments,
    report_rank,
    suggest_on_error,
)
from shardio.cli.terminal import (
    check_png_path,
    echo,
    make_bar,
    name_of,
    printable,
    require_matplotlib,
    value_errors_as_usage_errors,
)
from shardio.errors import FormatError
from shardio.images import DEFAULT_MAX_PIXELS
from shardio.order import make_rng_key, permute
from shardio.process import count_processors
from shardio.shards import open_table
from shardio.storage import make_access
from shardio.train import TrainConfig
from shardio.values import count
from shardio.world import find_local_world_size, find_world

if TYPE_CHECKING:
    import torch

    from shardio.datasets import ImageFolder, ShardMapDataset

DATA, MODEL, LEARNING, RUN = "Data", "Model", "Learning", "Running"
"""The panels of ``--help``."""

in_data, in_model, in_learning, in_run = (
    partial(typer.Option, rich_help_panel=panel) for panel in (DATA, MODEL, LEARNING, RUN)
)
"""Functions that create an option in a panel."""

PANELS = {"channels_last": MODEL, "checkpoint_every": RUN, "log_every": RUN, "deterministic": RUN, "device": RUN}
"""The help panels of options that are created from TrainConfig; all other such options are in LEARNING."""

DEFAULTS = {"lr": 2e-3}
"""Defaults that differ from those of TrainConfig: this learning rate suits the small model."""

OTHERWISE = {"directory": "--out", "resume": "--fresh", "seed": "--seed"}
"""Settings of TrainConfig whose options are parameters of ``train``."""

NO_OPTIONS = ("steps_per_epoch", "num_classes", "mean", "std", "data")
"""Settings of TrainConfig that have no option."""


def train(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="A packed directory with classes, its manifest, or class folders of images."
        ),
    ],
    *,
    val: Annotated[
        str | None, in_data(metavar="SOURCE", help="The validation data, in any form that SOURCE accepts.")
    ] = None,
    val_share: Annotated[
        float | None,
        in_data(
            help="Without --val, the share of SOURCE's samples to validate on; 0 disables validation (default: 0.2)."
        ),
    ] = None,
    batch_size: BatchSize = 32,
    image_size: Annotated[int, in_data(min=8, max=4096, help="Side length of the square images in pixels.")] = 64,
    recipe: Annotated[
        str | None,
        in_data(
            metavar="NAME",
            help="Augment with a recipe from shardio.transforms.recipes, such as trivial_augment (default: crops and "
            "flips). shardio augment shows the results.",
        ),
    ] = None,
    transform: Annotated[
        str | None,
        in_data(
            metavar="MODULE:NAME", help="Augment with your own transform: package.module:name or path/to/file.py:name."
        ),
    ] = None,
    num_workers: NumWorkers = 2,
    on_error: OnError = "raise",
    max_pixels: Annotated[
        int, in_data(min=1, help="Maximum number of pixels in an image; a larger image raises an error.")
    ] = DEFAULT_MAX_PIXELS,
    decoded_cache: Annotated[
        int | None,
        in_data(
            parser=parse_size_option,
            metavar="SIZE",
            help="Memory, such as 64GB, for keeping decoded JPEGs, so that later epochs only crop and resize.",
        ),
    ] = None,
    storage_option: StorageOptionTexts = None,
    cache: CacheFolder = None,
    cache_size: CacheSize = None,
    cache_shared: CacheShared = False,
    model: Annotated[
        str,
        in_model(
            help="small (a residual network), torchvision:NAME or timm:NAME (if installed), or your own "
            "module:function or file.py:function. Your function receives num_classes, image_size and pretrained if it "
            "has parameters with these names."
        ),
    ] = "small",
    pretrained: Annotated[
        bool, in_model("--pretrained", help="Start from pretrained weights (torchvision, timm, or your own function).")
    ] = False,
    compile_model: Annotated[bool, in_model("--compile", help="Compile the model with torch.compile.")] = False,
    script: Annotated[
        bool, in_model("--script", help="Convert the model to TorchScript (needs Python 3.13 or older).")
    ] = False,
    gradient_penalty: Annotated[
        float | None, in_learning(help="Weight with which the gradient norm is added to the loss.")
    ] = None,
    out: Annotated[
        Path | None,
        in_run(help="Directory for checkpoints, log and report. Rerun the same command to resume an interrupted run."),
    ] = None,
    fresh: Annotated[bool, in_run("--fresh", help="Start a new run, replacing an earlier one in --out.")] = False,
    plot: Annotated[
        Path | None,
        in_run(
            callback=check_png_path,
            metavar="FILE.png",
            help="Plot the planned and the actual learning rates to this file.",
        ),
    ] = None,
    seed: Annotated[
        int, in_run(min=0, max=2**63 - 1, help="Seed of the weights, the order, the crops and the split.")
    ] = 0,
    threads: Annotated[
        int | None,
        in_run(min=1, help="Number of CPU threads for torch (default on a CPU: processors minus workers, at least 1)."),
    ] = None,
    quiet: Annotated[bool, in_run("--quiet", help="Show no progress bar.")] = False,
    **settings: Any,
) -> None:
    """Train a classifier, and print how fast and how well it learns.

    With several ranks: torchrun --nproc-per-node 2 -m shardio train SOURCE …

    Example: shardio train packed/train --val packed/val --recipe imagenet_train
    """
    import torch

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
    from shardio.datasets import EpochSampler
    from shardio.loader import DataLoader
    from shardio.train import (
        Callback,
        Compile,
        GradientPenalty,
        PrintEpochs,
        RatePlot,
        count_steps,
        make_model,
        seed_everything,
        train as train_model,
    )
    from shardio.train.callbacks import EpochBar
    from shardio.train.step import reported_failures, use_device

    remote = read_remote_arguments(storage_option, cache, cache_size, cache_shared)
    with value_errors_as_usage_errors():
        transforms = choose_transforms(recipe, transform, image_size)
    data_settings: dict[str, float | str] = {
        "image_size": image_size,
        "val_share": 0.0 if val is not None else share,
        "recipe": recipe or transform or "",
    }
    with _errors_name_the_option():
        config = TrainConfig(**settings, seed=seed, directory=out, resume=not fresh, data=data_settings)
    report_rank()
    with reported_failures(), suggest_on_error(on_error):
        open_source = partial(_open_source, max_pixels=max_pixels, decoded_cache=decoded_cache, remote=remote)
        training, validation, num_classes = open_data(source, val, share, transforms, seed, open_source)
        options = make_loader_options(batch_size, num_workers, on_error)
        loader, val_loader = DataLoader(training, sampler=EpochSampler(training, seed=seed), **options), None
        if validation is not None:
            # Repeated samples are marked, so the validation is exact on any number of ranks.
            sampler = EpochSampler(validation, shuffle=False, remainder="mask")
            val_loader = DataLoader(validation, sampler=sampler, **options)
        seed_everything(seed)
        with value_errors_as_usage_errors():
            network = make_model(model, num_classes=num_classes, image_size=image_size, pretrained=pretrained)
            network = torch.jit.script(network) if script else network
        if threads is None:
            done = leave_processors_to_workers(num_workers, use_device(config.device), num_threads)
            if done is not None and find_world().rank == 0:
                echo(done, err=True)
        callbacks: list[Callback] = [] if plot is None else [RatePlot(plot, config, count_steps(loader, config))]
        if compile_model:
            callbacks.append(Compile())
        if gradient_penalty is not None:
            callbacks.append(GradientPenalty(gradient_penalty))
        bar = make_bar() if sys.stderr.isatty() and not quiet and find_world().rank == 0 else None
        callbacks.append(PrintEpochs(echo if bar is None else partial(bar.console.print, highlight=False)))
        if bar is not None:
            callbacks.append(EpochBar(bar, len(loader)))
        with bar or nullcontext():
            train_model(network, loader, config, val_loader=val_loader, callbacks=callbacks)


def _make_options() -> list[inspect.Parameter]:
    """Return an option for each setting of TrainConfig: its name, type, default and help text."""
    texts = dict(re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", inspect.getdoc(TrainConfig) or "", re.MULTILINE))
    types = get_type_hints(TrainConfig)
    options = []
    for setting in dataclasses.fields(TrainConfig):
        name = setting.name
        if name in OTHERWISE or name in NO_OPTIONS:
            continue
        flag = [_option_of(name)] if setting.default is False else []  # Without an explicit name, typer adds --no-NAME.
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
    """Turn TrainConfig's errors, which start with a setting's name, into usage errors about the setting's option."""
    try:
        yield
    except ValueError as error:
        setting, _, what = str(error).partition(" ")
        raise typer.BadParameter(printable(what), param_hint=_option_of(setting)) from error


VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""The environment variables that set torch's number of threads. torchrun sets the first one to 1 if it starts several
ranks."""


def choose_threads(num_processors: int, num_ranks: int, num_workers: int) -> int:
    """Return the number of torch threads for each rank: its share of the processors minus its workers, at least 1.

    By default, torch uses all processors. After each operation, torch's threads wait in a busy loop until all of them
    have finished, so one thread on a busy processor delays all others.

    >>> choose_threads(8, 1, 2), choose_threads(8, 2, 2), choose_threads(2, 1, 2)
    (6, 2, 1)
    """
    return max(1, num_processors // num_ranks - num_workers)


def leave_processors_to_workers(num_workers: int, device: torch.device, num_before: int) -> str | None:
    """Make torch use fewer threads if it computes on a CPU, unless the user has set the number of threads.

    Args:
        num_workers: The number of the loader's workers.
        device: The device on which torch computes.
        num_before: torch's number of threads when the process started, to detect a change by the user.

    Returns:
        A message about the change; None if nothing changed.
    """
    import torch

    if device.type != "cpu" or torch.get_num_threads() != num_before or any(map(os.environ.get, VARIABLES)):
        return None
    num_processors, num_ranks = count_processors(), find_local_world_size()
    num_threads = choose_threads(num_processors, num_ranks, num_workers)
    if num_threads >= num_before:  # torch counts cores, which may have two processors each.
        return None
    torch.set_num_threads(num_threads)
    return (
        f"torch uses {num_threads} of its {num_before} threads and leaves processors to the loader (processors: "
        f"{num_processors}, ranks: {num_ranks}, workers: {num_workers}): change this with --threads or OMP_NUM_THREADS"
    )


ImageTransform = Callable[[Any], Any]


def choose_transforms(
    recipe: str | None, transform: str | None, image_size: int
) -> tuple[ImageTransform, ImageTransform]:
    """Return the transforms for training images and for validation images.

    ``--recipe`` or ``--transform`` names the transforms. By default, the transforms are crops and flips.

    Raises:
        ValueError: If the named transform does not exist, or makes several crops of an image.
    """
    from shardio.transforms import (
        CenterCrop,
        Compose,
        RandomHorizontalFlip,
        RandomResizedCrop,
        Resize,
        count_crops,
        recipes,
    )

    if recipe is None and transform is None:
        augmented = Compose([RandomResizedCrop(image_size, scale=(0.25, 1.0)), RandomHorizontalFlip()])
        return augmented, Compose([Resize(image_size * 8 // 7), CenterCrop(image_size)])
    made = make_transform(recipe, transform, image_size)
    if count_crops(made) is not None:
        raise ValueError(f"{recipe or transform} makes several crops of each image, but a classifier needs one")
    validation = recipes.cifar_eval if recipe == "cifar" else recipes.imagenet_eval
    return made, validation(image_size)


def open_data(
    source: str,
    val_source: str | None,
    val_share: float,
    transforms: tuple[ImageTransform, ImageTransform],
    seed: int,
    open_source: Callable[..., ImageFolder | ShardMapDataset],
) -> tuple[Any, Any, int]:
    """Return the training data, the validation data and the number of classes.

    The validation data is a separate source, a share of the same source, or None.
    """
    from torch.utils.data import Subset

    training, central = open_source(source, transforms[0]), transforms[1]
    num_classes = len(training.classes)
    if val_source is not None:
        try:
            return training, open_source(val_source, central, classes=training), num_classes
        except ValueError as error:
            raise FormatError(
                f"the validation data {name_of(val_source)} does not fit the classes of the training data "
                f"{name_of(source)}: {error}"
            ) from error
    if not val_share:
        return training, None, num_classes
    num_val = round(len(training) * val_share)
    if not 0 < num_val < len(training):
        raise FormatError(
            f"{name_of(source)} has {count(len(training), 'sample')}, too few to set aside a share of {val_share:g} "
            "for validation: pass a different --val-share, --val DATA, or --val-share 0 to train without validation"
        )
    chosen = permute(np.arange(len(training)), np.array([len(training)]), make_rng_key(seed, "split")).tolist()
    validation = Subset(open_source(source, central), sorted(chosen[:num_val]))
    return Subset(training, sorted(chosen[num_val:])), validation, num_classes


def _open_source(
    source: str,
    transform: ImageTransform,
    *,
    max_pixels: int,
    decoded_cache: int | None,
    remote: RemoteArguments,
    classes: ImageFolder | ShardMapDataset | None = None,
) -> ImageFolder | ShardMapDataset:
    from shardio.datasets import ImageFolder, ShardMapDataset

    access = make_access(**remote)
    settings: dict[str, Any] = {"transform": transform, "max_pixels": max_pixels, "classes": classes}
    settings |= {"decoded_cache": decoded_cache, **remote}
    if has_class_folders(source, access):
        return ImageFolder(source, **settings)
    if not open_table(source, access).manifest.classes:
        raise FormatError(
            f"{name_of(source)} has no class names: pass class folders of images, or a dataset that shardio packed "
            "from them (shardio pack IMAGES OUT)"
        )
    fields = ("image", "label", "key")
    return ShardMapDataset(source, fields=fields, **settings)


train.__signature__ = _with_options()  # type: ignore[attr-defined]  # Python's own protocol: PEP 362
