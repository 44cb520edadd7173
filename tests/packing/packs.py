"""Packs with usual settings; interruptions and changes during packs; and the same images in several kinds of source."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import shardio
from shardio import PackError
from shardio.libraries import import_torchvision
from shardio.packing import PackOptions, PackResult, pack_source
from shardio.process import WorkProgress
from shardio.storage import Location
from tests.processes import forkserver_context
from tests.raising import assert_raises
from tests.sources import PILLOW_FORMATS, encode
from tests.tars import by_key


def write(root: Path, names: Iterable[str]) -> Path:
    """Write a file under each name: an image if the suffix names a format, otherwise text. Return the directory."""
    for i, name in enumerate(names):
        suffix = Path(name).suffix[1:].lower().replace("tiff", "tif")
        write_files(root, {name: encode(i, suffix=suffix) if suffix in PILLOW_FORMATS else name.encode()})
    return root


def write_files(root: Path, files: Mapping[str, bytes]) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def pack(source: Path, out: Path, progress: WorkProgress | None = None, **options: Any) -> PackResult:
    """Pack in this process, by default into one shard, and return the detailed result."""
    return pack_source(source, out, PackOptions(**{"max_shard_size": 1 << 30, "num_workers": 1} | options), progress)


def write_all(out: str | Path | Location, samples: Iterable[Mapping[str, Any]], **options: Any) -> Any:
    """Write samples with a ShardWriter. Return the manifest."""
    with shardio.ShardWriter(str(out), **options) as writer:
        for sample in samples:
            writer.write(sample)
    return writer.manifest


def read_packed(out: Path) -> dict[str, dict[str, bytes]]:
    return by_key(*sorted(out.glob("*.tar")))


class Interrupt(WorkProgress):
    """A progress display that interrupts the pack after a number of samples, as Ctrl-C does."""

    def __init__(self, after: int) -> None:
        self._num_left = after

    def advance(self, num_done: int, num_bytes: int = 0, num_samples: int = 0) -> None:
        self._num_left -= num_done
        if self._num_left < 0:
            raise KeyboardInterrupt


class Change(WorkProgress):
    """A progress display that calls a function after the scan, before files are read."""

    def __init__(self, change: Callable[[], object]) -> None:
        self._change = change

    def start(self, total: int, num_bytes: int | None = None) -> None:
        self._change()


def assert_refused(pattern: str, source: Any, out: str | Path | None = None, **options: Any) -> str:
    """Check that packing fails with a matching message and writes nothing to the default output. Return the message."""
    with TemporaryDirectory() as folder:
        message = str(assert_raises(PackError, pattern, shardio.pack, source, out or f"{folder}/out", **options))
        assert not list(Path(folder).iterdir())
    return message


def exit_code_if_killed(
    n: int, moment: str, call: Callable[..., object], *arguments: Path, **options: Any
) -> int | None:
    """Call a function in a process that is killed immediately before or after it renames or links its n-th file."""
    process = forkserver_context().Process(target=_call_and_die, args=(n, moment, call, arguments, options))
    process.start()
    process.join()
    return process.exitcode


def _call_and_die(n: int, moment: str, call: Callable[..., object], arguments: Any, options: dict[str, Any]) -> None:
    num_names = 0

    def dying(function: Callable[..., Any]) -> Any:
        def name_file(*paths: Any) -> Any:
            nonlocal num_names
            num_names += 1
            if (num_names, moment) == (n, "before"):
                os.kill(os.getpid(), signal.SIGKILL)
            found = function(*paths)
            if (num_names, moment) == (n, "after"):
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        return name_file

    Path.replace = dying(Path.replace)  # type: ignore[method-assign]  # in a process of its own
    os.link = dying(os.link)
    call(*arguments, **options)


Write = Callable[[Mapping[str, bytes], Path], Path]
"""A function that writes images, given by key, below a folder, and returns the source to pack."""


def write_lmdb(images: Mapping[str, bytes], folder: Path) -> Path:
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(folder / "in"), map_size=1 << 24) as environment, environment.begin(write=True) as transaction:
        for key, content in images.items():
            transaction.put(f"{key}.jpg".encode(), content)
    return folder / "in"


def write_tars(images: Mapping[str, bytes], folder: Path) -> Path:
    shardio.pack(folder / "images", folder / "in", max_shard_samples=5, check=False)
    return folder / "in"


def write_table(images: Mapping[str, bytes], folder: Path) -> Path:
    (folder / "in.csv").write_text("\n".join(["path,rank", *(f"images/{key}.jpg,{len(key)}" for key in images)]))
    return folder / "in.csv"


def write_parquet(images: Mapping[str, bytes], folder: Path) -> Path:
    pytest.importorskip("datasets")
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"image": list(images.values())}), folder / "in.parquet")
    return folder / "in.parquet"


def write_saved(images: Mapping[str, bytes], folder: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    rows = {"image": [{"bytes": content, "path": None} for content in images.values()], "key": list(images)}
    dataset = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    dataset.save_to_disk(str(folder / "in"), num_shards=2)
    return folder / "in"


def write_mds(images: Mapping[str, bytes], folder: Path) -> Path:
    import_torchvision()  # Streaming imports it.
    streaming = pytest.importorskip("streaming")
    options = {"columns": {"x": "jpeg"}, "size_limit": 1 << 12, "compression": "gz"}
    with streaming.MDSWriter(out=str(folder / "in"), **options) as mds:
        for content in images.values():
            mds.write({"x": content})
    return folder / "in"


def write_litdata(images: Mapping[str, bytes], folder: Path) -> Path:
    writers = pytest.importorskip("litdata.streaming.writer")
    (folder / "in").mkdir()
    compressed = {"compression": "zstd", "compression_level": "chunk"}
    writer = writers.BinaryWriter(str(folder / "in"), chunk_size=5, **compressed)
    for number, content in enumerate(images.values()):
        writer[number] = content
    writer.done()
    writer.merge(1)
    return folder / "in"


def write_folders(images: Mapping[str, bytes], folder: Path) -> Path:
    return folder / "images"
