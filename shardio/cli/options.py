"""Define the options that several commands share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

import typer

from shardio.cli.terminal import printable, value_errors_as_usage_errors
from shardio.errors import SampleError
from shardio.sample import check_classes
from shardio.shards import open_table
from shardio.storage import RemoteAccess, StorageOptions, make_access, make_direct_access, parse_location, read_as_utf8
from shardio.values import load_function, parse_size

if TYPE_CHECKING:
    from shardio.storage import Location


def parse_size_option(text: str | int) -> int:
    """Return the number of bytes in a size such as ``256MiB``; raise a usage error for anything else."""
    try:
        return parse_size("it", text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


SHARDS, LOADING, STORAGE = "Shards", "Loading", "Storage"
"""Panels of ``--help``."""

MaxShardSize = Annotated[
    int,
    typer.Option(
        rich_help_panel=SHARDS,
        parser=parse_size_option,
        metavar="SIZE",
        show_default="256MiB",
        help="Maximum size of a shard, such as 256MiB or 1GB.",
    ),
]


DatasetPath = Annotated[
    str, typer.Argument(metavar="SOURCE", help="A packed directory, a manifest, a tar, or a directory of tars.")
]

StorageOptionTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        rich_help_panel=STORAGE,
        metavar="NAME=VALUE",
        help="Set an option of a URL's object store, such as endpoint=https://… or region=…; may be repeated. Keep "
        "credentials in the environment.",
    ),
]

CacheFolder = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        rich_help_panel=STORAGE,
        metavar="FOLDER",
        help="Cache the data of a URL in this local folder, which other processes and later runs share (default: a "
        "private folder, which is removed when the program ends).",
    ),
]

CacheSize = Annotated[
    int | None,
    typer.Option(
        "--cache-size",
        rich_help_panel=STORAGE,
        parser=parse_size_option,
        metavar="SIZE",
        help="Maximum size of the cache, such as 200GB (default: a fifth of the free space).",
    ),
]

CacheShared = Annotated[
    bool,
    typer.Option("--cache-shared", rich_help_panel=STORAGE, help="Trust other users who share the folder of --cache."),
]


class RemoteArguments(TypedDict):
    """The arguments of a dataset that control the cache and the access to a remote source."""

    storage_options: StorageOptions
    cache: Path | None
    cache_size: int | None
    cache_shared: bool


def read_options(texts: list[str] | None) -> StorageOptions:
    """Return the settings that options of the form NAME=VALUE describe, as for ``storage_options=``.

    Raises:
        typer.BadParameter: If an option does not have this form, or a value is out of range.
    """
    options = dict[str, str | int | float]()
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not name or not equals:
            shown = name + equals + ("…" if value else "")  # The value may be a credential.
            raise _wrong(f"must be NAME=VALUE, got {shown!r}")
        options[name] = _read_value(value)
    try:
        make_direct_access(options)
    except (TypeError, ValueError) as error:
        raise _wrong(str(error)) from error
    return options


def read_access(texts: list[str] | None) -> RemoteAccess:
    """Return a RemoteAccess for the stores of a command's URLs, without a cache.

    Raises:
        typer.BadParameter: For the same reasons as :func:`read_options`.
    """
    return make_direct_access(read_options(texts))


def read_remote_arguments(
    texts: list[str] | None, cache: Path | None, cache_size: int | None, cache_shared: bool
) -> RemoteArguments:
    """Return a dataset's arguments, given the values of a command's four options.

    Raises:
        typer.BadParameter: If a value is invalid.
    """
    options = read_options(texts)
    try:
        make_access(options, cache, cache_size, cache_shared)
    except ValueError as error:
        raise typer.BadParameter(printable(error), param_hint="--cache") from error
    return RemoteArguments(storage_options=options, cache=cache, cache_size=cache_size, cache_shared=cache_shared)


def _wrong(message: str) -> typer.BadParameter:
    return typer.BadParameter(printable(message), param_hint="--storage-option")


def _read_value(text: str) -> str | int | float:
    """Convert text to a number if the number would be printed as the same text; otherwise, return the text.

    For example, ``007`` remains text.
    """
    for kind in (int, float):
        with suppress(ValueError):
            if str(kind(text)) == text:
                return kind(text)
    return text


OnErrorPolicy = Literal["raise", "replace", "skip"]

BatchSize = Annotated[int, typer.Option(min=1, rich_help_panel=LOADING, help="Samples per batch on each rank.")]
NumWorkers = Annotated[
    int, typer.Option(min=0, rich_help_panel=LOADING, help="Number of workers; 0 decodes in the training process.")
]
OnError = Annotated[
    OnErrorPolicy,
    typer.Option(
        rich_help_panel=LOADING,
        help="Policy for unreadable samples: raise an error, replace them with other samples, or skip them, which "
        "makes batches smaller. Replaced and skipped samples are listed in quarantine.jsonl.",
    ),
]


def make_loader_options(batch_size: int, num_workers: int, on_error: OnErrorPolicy) -> dict[str, Any]:
    """Return the arguments for DataLoader that these options set."""
    workers = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    return {"batch_size": batch_size, "on_error": on_error, **workers}


def report_rank() -> None:
    """If there are several ranks, print this rank on standard error: RANK and WORLD_SIZE may be from an earlier run."""
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
    """Add a hint to an error about an unreadable sample: the option that continues without the sample."""
    try:
        yield
    except SampleError as error:
        if on_error != "raise":
            raise
        raise SampleError(f"{str(error).strip()} (to continue without it, pass --on-error skip or replace)") from error


def has_class_folders(source: str | Path, access: RemoteAccess | None = None) -> bool:
    """Return whether a directory, or a folder in an object store, holds class folders rather than shards.

    Raises:
        FormatError: If the directory holds both class folders and shards.
    """
    from shardio.shards import MANIFEST_NAME
    from shardio.storage import parse_location
    from shardio.viewer import holds_shards

    location = parse_location(source, access)
    if (location / MANIFEST_NAME).exists():
        return False  # The credentials might not permit the listing on the next line.
    return location.is_folder() and not holds_shards(location) and bool(find_class_folders(location))


def find_class_folders(folder: Location) -> list[str]:
    """Return the names of the folders in a folder, except hidden ones."""
    return [name[:-1] for name in folder.list() if name.endswith("/") and not name.startswith(".")]


def read_classes(source: str | Path, access: RemoteAccess | None = None) -> tuple[str, ...]:
    """Return the class names from a text file or a dataset."""
    if (path := Path(source)).is_file() and path.suffix != ".json":
        return check_classes(_read_lines(path))
    if has_class_folders(source, access):
        return check_classes(sorted(map(read_as_utf8, find_class_folders(parse_location(source, access)))))
    return check_classes(open_table(source, access).manifest)


def _read_lines(path: Path) -> list[str]:
    """Return a text file's lines, without the empty lines at its end.

    Raises:
        ValueError: If any other line is empty, or the file is not UTF-8.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not a UTF-8 text file: pass a text file with one class name per line, a packed directory, or "
            "class folders"
        ) from error
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    while lines and not lines[-1].strip():
        lines.pop()
    for line_number, line in enumerate(lines, 1):
        if not line.strip():
            raise ValueError(
                f"line {line_number} of {path} is empty, but each line defines a label: delete it or write a class name"
            )
    return lines


def make_transform(recipe: str | None, transform: str | None, size: int | None) -> Callable[[Any], Any]:
    """Return the transform that ``--recipe`` or ``--transform`` names.

    ``--transform`` names a transform of any library, or a function of an image, as ``package.module:name`` or
    ``path/to/file.py:name``. If the name refers to a class, or to a function that needs no arguments other than
    ``size``, it is called and must return the transform. The call passes ``size`` if there is a parameter of this name.

    Args:
        recipe: A name in RECIPES, or None.
        transform: The name of the user's own transform, or None.
        size: The size of the images in pixels; None for the default of the recipe or function.

    Raises:
        ValueError: If both names or neither name is given, or if the transform does not exist.
    """
    from shardio.transforms.recipes import RECIPES  # Commands that copy files need no transforms.

    if recipe is not None and transform is None:
        return _make_recipe(recipe, size)
    if transform is not None and recipe is None:
        return _make_own(transform, size)
    raise ValueError(f"pass either --recipe or --transform. The recipes are {', '.join(RECIPES)}")


def _make_recipe(name: str, size: int | None) -> Callable[[Any], Any]:
    from shardio.transforms.recipes import RECIPES

    if name not in RECIPES:
        near = get_close_matches(name, RECIPES)
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(f"there is no recipe {name!r}: {meant}The recipes are {', '.join(RECIPES)}")
    make: Callable[..., Callable[[Any], Any]] = RECIPES[name]
    return make() if size is None else make(size)


def _make_own(name: str, size: int | None) -> Callable[[Any], Any]:
    try:
        found = load_function(name)
    except ValueError as error:
        raise ValueError(f"there is no transform {name!r}: {error}") from error
    if not inspect.isclass(found) and not inspect.isfunction(found):
        return found
    parameters = inspect.signature(found).parameters
    required = {key for key, parameter in parameters.items() if _is_required(parameter)}
    if inspect.isfunction(found) and not required <= {"size"}:
        return found
    offered = {} if size is None or "size" not in parameters else {"size": size}
    if missing := sorted(required - set(offered)):
        raise ValueError(
            f"{name} needs values for {', '.join(missing)}: name a function that returns the finished transform"
            f"{', or pass a size' if missing == ['size'] else ''}"
        )
    made = found(**offered)
    if not callable(made):
        raise ValueError(f"{name} must return a transform (a callable), but it returned {type(made).__name__}")
    return made  # type: ignore[no-any-return]  # mypy does not narrow Any by callable().


def _is_required(parameter: inspect.Parameter) -> bool:
    """Return whether a call needs this parameter. True for ``*args``, which a transform's wrapper may have."""
    return parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
