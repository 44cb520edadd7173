"""Tars for tests: written by the standard library, and read by it, by GNU tar and by WebDataset."""

from __future__ import annotations

import gc
import io
import json
import subprocess
import tarfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors

from shardio.shards import Shard
from shardio.storage import Location, StoredFile, parse_location

Member = tuple[str, bytes]

Samples = list[tuple[str, dict[str, bytes]]]
"""Samples in order, each with its key and its contents by field."""


def write_tar(path: Path, members: Iterable[Member], *, tar_format: int = tarfile.PAX_FORMAT) -> None:
    """Write a plain tar of regular files."""
    with tarfile.open(path, "w", format=tar_format) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def read_members(path: Path) -> list[Member]:
    members = []
    with tarfile.open(path, "r:") as tar:
        for info in tar:
            file = tar.extractfile(info) if info.isreg() else None
            if file is not None:
                members.append((info.name, file.read()))
    return members


def extract_with_gnu_tar(path: Path, into: Path) -> dict[str, bytes]:
    into.mkdir()
    subprocess.run(["tar", "-xf", path, "-C", into], check=True, env={"LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin"})
    return {str(file.relative_to(into)): file.read_bytes() for file in into.rglob("*") if file.is_file()}


def read_with_webdataset(*paths: Path) -> Samples:
    """Return the samples that WebDataset reads.

    Raises:
        ValueError: If WebDataset rejects a tar.
    """
    webdataset = pytest.importorskip("webdataset")
    samples, refusal = [], ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # WebDataset does not close files.
        try:
            samples = list(webdataset.WebDataset([str(path) for path in paths], shardshuffle=False, empty_check=False))
        except ValueError as error:
            refusal = str(error)
        if refusal:
            gc.collect()
            raise ValueError(refusal)
    return [(sample["__key__"], {k: v for k, v in sample.items() if not k.startswith("__")}) for sample in samples]


def by_key(*paths: Path) -> dict[str, dict[str, bytes]]:
    return dict(read_with_webdataset(*paths))


def paths_of(locations: Iterable[Location]) -> list[Path]:
    return [Path(location.key) for location in locations]


def index_of(tar: Path) -> Path:
    return tar.with_name(tar.name + ".idx")


def change_layout(index: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """Return an index with a changed JSON header, which locates the tensors."""
    start = 8 + int.from_bytes(index[:8], "little")
    layout = json.loads(index[8:start])
    change(layout)
    header = json.dumps(layout).encode()
    return len(header).to_bytes(8, "little") + header + index[start:]


def change_metadata(index: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """Return an index with changed metadata."""

    def change_text(layout: dict[str, Any]) -> None:
        values = json.loads(layout["__metadata__"]["shardio"])
        change(values)
        layout["__metadata__"]["shardio"] = json.dumps(values)

    return change_layout(index, change_text)


def read_metadata(tar: Path) -> dict[str, Any]:
    with safetensors.safe_open(index_of(tar), framework="numpy") as file:
        values: dict[str, Any] = json.loads(file.metadata()["shardio"])
    return values


def open_shard(tar: Path) -> Shard:
    """Open a tar with the index beside it."""
    return Shard(parse_location(tar), parse_location(index_of(tar)))


@contextmanager
def open_file(path: Path) -> Iterator[StoredFile]:
    """Open a local file as readers do."""
    with closing(parse_location(path).open()) as file:
        yield file
