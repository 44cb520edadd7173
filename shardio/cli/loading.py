"""Options, messages and checks that are shared by the commands that load batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shardio.cli.console import value_errors_as_usage_errors
from shardio.errors import SampleError

if TYPE_CHECKING:
    from shardio.storage import Location, RemoteAccess

OnErrorPolicy = Literal["raise", "replace", "skip"]

BatchSize = Annotated[int, typer.Option(min=1, help="Samples per batch on each rank.")]
NumWorkers = Annotated[
    int, typer.Option(min=0, help="Number of workers that decode; 0 decodes in the training process.")
]
OnError = Annotated[
    OnErrorPolicy,
    typer.Option(
        help="What to do with unreadable samples: raise an error, replace them with other samples, or skip them, which "
        "makes batches smaller. Replaced and skipped samples are listed in quarantine.jsonl.",
    ),
]


def make_loader_options(batch_size: int, num_workers: int, on_error: OnErrorPolicy) -> dict[str, Any]:
    """Return the arguments of DataLoader for these options."""
    return {
        "batch_size": batch_size,
        "num_workers": num_workers,
        "persistent_workers": num_workers > 0,
        "on_error": on_error,
    }


def report_rank() -> None:
    """Report the rank on standard error if there are several. RANK and WORLD_SIZE may be left over from a launcher."""
    from shardio.world import find_world

    with value_errors_as_usage_errors():
        world = find_world()
    if world.world_size > 1:
        typer.echo(
            f"rank {world.rank} of {world.world_size}: this process loads only its share of the samples. If no "
            "launcher started it, unset RANK and WORLD_SIZE",
            err=True,
        )


@contextmanager
def suggest_on_error(on_error: OnErrorPolicy) -> Iterator[None]:
    """Add to an error about an unreadable sample the option that continues without it."""
    try:
        yield
    except SampleError as error:
        if on_error != "raise":
            raise
        raise SampleError(f"{str(error).strip()} (to continue without it, pass --on-error skip or replace)") from error


def has_class_folders(source: Path, access: RemoteAccess | None = None) -> bool:
    """Return whether a directory, or a folder of an object store, holds class folders rather than shards.

    Raises:
        FormatError: If it holds both.
    """
    from shardio.looking import holds_shards
    from shardio.shards import MANIFEST_NAME
    from shardio.storage import parse_location

    location = parse_location(source, access)
    if (location / MANIFEST_NAME).exists():
        return False  # Before anything is listed, which the credentials may not allow.
    return location.is_folder() and not holds_shards(location) and bool(find_class_folders(location))


def find_class_folders(folder: Location) -> list[str]:
    """Return the names of the folders in a folder, except hidden ones."""
    return [name[:-1] for name in folder.list() if name.endswith("/") and not name.startswith(".")]
