"""What the commands that load batches have in common: options, and what they say of samples that cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from shardio.cli.console import wrong_values_are_wrong_usage
from shardio.errors import SampleError

OnErrorPolicy = Literal["raise", "replace", "skip"]

BatchSize = Annotated[int, typer.Option(min=1, help="Samples of a batch.")]
NumWorkers = Annotated[int, typer.Option(min=0, help="Workers that decode; 0 decodes in the training process.")]
OnError = Annotated[
    OnErrorPolicy,
    typer.Option(
        help="What becomes of samples that cannot be read: an error; or another sample in their place, or a smaller "
        "batch, and a line in quarantine.jsonl.",
    ),
]


def make_loader_options(batch_size: int, num_workers: int, on_error: OnErrorPolicy) -> dict[str, Any]:
    """Return the arguments of DataLoader that these options mean."""
    return {
        "batch_size": batch_size,
        "num_workers": num_workers,
        "persistent_workers": num_workers > 0,
        "on_error": on_error,
    }


def tell_of_the_share() -> None:
    """Say on standard error which rank this is, where there are several: the variables may be a former launcher's."""
    from shardio.world import find_world

    with wrong_values_are_wrong_usage():
        world = find_world()
    if world.world_size > 1:
        typer.echo(
            f"rank {world.rank} of {world.world_size}: this process loads only its share of the samples. If no "
            "launcher started it, unset RANK and WORLD_SIZE",
            err=True,
        )


@contextmanager
def bad_samples_name_the_option(on_error: OnErrorPolicy) -> Iterator[None]:
    """Add to the error of a sample that cannot be read which option loads the rest without it."""
    try:
        yield
    except SampleError as error:
        if on_error != "raise":
            raise
        raise SampleError(f"{str(error).strip()} (continue without it by --on-error skip or replace)") from error


def has_class_folders(source: Path) -> bool:
    """Say whether a directory holds folders of images, and no shards."""
    from shardio.shards import MANIFEST_NAME

    if not source.is_dir() or (source / MANIFEST_NAME).exists() or any(source.glob("*.tar")):
        return False
    return bool(find_class_folders(source))


def find_class_folders(source: Path) -> list[Path]:
    """Return the folders in a directory that are not hidden."""
    return [entry for entry in source.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
