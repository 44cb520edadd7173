"""Packs with the usual settings, what happens during them, and what they hold."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import shardio
from shardio import PackError
from shardio.packing import PackOptions, PackResult, pack_source
from shardio.progress import WorkProgress
from tests.processes import forkserver_context
from tests.raising import assert_raises
from tests.sources import PILLOW_FORMATS, encode
from tests.tars import by_key


def write(root: Path, names: Iterable[str]) -> Path:
    """Write a file under each name: an image if the suffix is an image's, otherwise a text. Return the directory."""
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
    """Pack in this process, with large shards, and return the result with its details."""
    return pack_source(source, out, PackOptions(**{"max_shard_size": 1 << 30, "num_workers": 1} | options), progress)


def read_packed(out: Path) -> dict[str, dict[str, bytes]]:
    return by_key(*sorted(out.glob("*.tar")))


class Interrupt(WorkProgress):
    """Interrupts a pack after more than some samples, as Ctrl-C does."""

    def __init__(self, after: int) -> None:
        self._num_left = after

    def advance(self, num_done: int, num_bytes: int = 0, num_samples: int = 0) -> None:
        self._num_left -= num_done
        if self._num_left < 0:
            raise KeyboardInterrupt


class Change(WorkProgress):
    """Changes something once the pack is planned: after the scan, and before files are read."""

    def __init__(self, change: Callable[[], object]) -> None:
        self._change = change

    def start(self, total: int, num_bytes: int | None = None) -> None:
        self._change()


def assert_refused(message: str, source: Any, out: str | Path, **options: Any) -> None:
    assert_raises(PackError, message, shardio.pack, source, out, **options)


def assert_change_is_refused(source: Path, out: Path, change: Callable[[Path], object], message: str) -> None:
    assert_raises(PackError, message, pack, source, out, Change(lambda: change(source)))


def exit_code_if_killed(
    n: int, moment: str, call: Callable[..., object], *arguments: Path, **options: Any
) -> int | None:
    """Call a function in a process that is killed right before or after the n-th time that it gives a file a name."""
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
