"""The buffers and worker processes of a loader, as the operating system sees them, and batches to compare."""

from __future__ import annotations

import gc
import hashlib
import io
import os
import time
import traceback
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import shardio
from shardio import DataLoader, ShardDataset
from shardio.transforms import RandomResizedCrop
from tests.sources import write_images

PROGRAM = b"from shardio.loader.chunk_worker import main; gc.enable(); main()"
"""The end of a fork server's command, which identifies the process."""

NUM_SAMPLES = 100
BATCH_SIZE = 8  # An epoch has 12 full batches and one of 4 samples.
PREFETCH = 4
NUM_BUFFERS = PREFETCH + 2  # Two more buffers hold the user's next batch and the batch that it replaces.


def pack_pictures(root: Path, num_samples: int = NUM_SAMPLES) -> Path:
    """Pack images whose crops, of 48 * 48 * 3 bytes, are large enough for buffers."""
    write_images(root / "images", classes=4, per_class=num_samples // 4, width=64, height=56)
    shardio.pack(root / "images", root / "packed", max_shard_samples=40)
    return root / "packed"


def save_npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def make_loader(packed: Path, *, num_workers: int = 1, **options: Any) -> DataLoader:
    dataset = ShardDataset(
        packed, fields=("image", "label", "key"), shuffle=True, seed=5, transform=RandomResizedCrop(48)
    )
    ahead = {"prefetch_factor": PREFETCH} if num_workers else {}
    return DataLoader(dataset, num_workers=num_workers, **{"batch_size": BATCH_SIZE, **ahead, **options})


def make_oracle(packed: Path, **options: Any) -> DataLoader:
    """Make a loader that delivers the same batches but decodes in the training process, so it uses no buffers."""
    return make_loader(packed, num_workers=0, **options)


def assert_same(got: Any, expected: Any) -> None:
    """Compare batches, or lists of batches: types, dtypes, shapes and contents."""
    if isinstance(expected, list | tuple):
        assert type(got) is type(expected)
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
        return
    assert type(got) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert torch.equal(got, expected)
    elif isinstance(expected, np.ndarray):
        assert (got.dtype, got.shape, got.strides) == (expected.dtype, expected.shape, expected.strides)
        assert np.array_equal(got, expected)
    elif isinstance(expected, dict | UserDict):
        assert_same(list(got), list(expected))
        assert_same(list(got.values()), list(expected.values()))
    else:
        assert got == expected


def find_buffers(process_id: int | None = None) -> set[int]:
    """Return the inodes of the buffers that a process, by default this one, has mapped."""
    return {inode for _, _, inode in _read_mappings(process_id or os.getpid())}


def buffer_of(tensor: torch.Tensor) -> int | None:
    address = tensor.data_ptr()
    inodes = [inode for start, stop, inode in _read_mappings(os.getpid()) if start <= address < stop]
    return inodes[0] if inodes else None


def buffers_of(batches: Iterable[Any]) -> set[int | None]:
    """Return the buffers that hold the batches' images. Each batch is released before the next one is requested."""
    buffers = set()
    for images, *_ in batches:
        buffers.add(buffer_of(images))
        del images, _
    return buffers


def find_fork_servers() -> set[int]:
    """Return the ids of the fork servers that this process started and that have not ended."""
    return {
        process_id
        for process_id, parent, command in list_processes()
        if parent == os.getpid() and command[1:2] == [b"-c"] and command[2].endswith(PROGRAM)
    }


def has_ended(server: int) -> bool:
    """Return whether a child is a zombie. A child's command line disappears shortly before it becomes a zombie."""
    return Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def find_worker_processes() -> set[int]:
    servers = find_fork_servers()
    return {process_id for process_id, parent, _ in list_processes() if parent in servers}


def list_processes() -> Iterator[tuple[int, int, list[bytes]]]:
    """Yield the id, the parent's id, and the command line of each process that is not a zombie."""
    for process_id in sorted(int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
        try:
            status = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
            command = Path(f"/proc/{process_id}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # It has ended.
        if status[0] not in "ZX":
            yield process_id, int(status[1]), command


def wait_until(is_so: Callable[[], object], what: str = "other processes have done it") -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, f"timed out while waiting until {what}"
        time.sleep(0.005)  # Polling without a pause would take the processor from the other processes.


def fork(work: Callable[[], object]) -> Callable[[], str]:
    """Fork a child; return a function that has it call ``work``, waits until the child ends, and returns the answer."""
    requests, request = os.pipe()
    answers, answer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(request)
        try:
            assert os.read(requests, 1), "the parent has failed"
            os.write(answer, str(work()).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    os.close(requests)
    os.close(answer)

    def ask() -> str:
        os.write(request, b"!")
        os.close(request)
        with os.fdopen(answers) as file:
            text = file.read()
        assert os.waitpid(child, 0)[1] == 0
        return text

    return ask


def digest(batches: Any) -> str:
    sha = hashlib.sha256()
    for images, labels, keys in batches:
        sha.update(images.numpy().tobytes() + labels.numpy().tobytes() + repr(list(keys)).encode())
    return sha.hexdigest()


@contextmanager
def without_collector() -> Iterator[None]:
    """Disable the garbage collector, to show that memory is freed without it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _read_mappings(process_id: int) -> Iterator[tuple[int, int, int]]:
    for line in Path(f"/proc/{process_id}/maps").read_text().splitlines():
        if "memfd:shardio" in line:
            addresses, _, _, _, inode, *_ = line.split()
            start, stop = addresses.split("-")
            yield int(start, 16), int(stop, 16), int(inode)
