"""A run's directory, and its checkpoints, which hold the state needed to resume the run.

A checkpoint is one file, written atomically.
"""

from __future__ import annotations

import fcntl
import logging
import os
import random
import socket
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardio.errors import BusyError, FormatError, StateError
from shardio.files import remove_unfinished, write_whole
from shardio.process import call_at_fork
from shardio.train.callbacks import LOG, read_log
from shardio.train.config import TrainConfig
from shardio.train.report import PAGE
from shardio.train.step import gather, on_rank_0

FORMAT = 1
"""The version of the format, which increases when older files can no longer be read."""

PARTS: dict[str, type] = {
    "config": dict,
    "model": dict,
    "step": dict,
    "results": list,
    "is_within_epoch": bool,
    "times": dict,
    "ranks": list,
}
"""The parts of a run's checkpoint, and their types."""

_SEED, _GENERATORS = "_base_seed", "_generators"
"""Keys in the states of shardio's loaders. The states of torchdata's loaders have only the first key."""

_LOADABLE = {
    *(type(None), bool, int, float, complex, str, bytes, bytearray),
    *(torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype, torch.device),
}
"""Types of indivisible values that torch loads without executing code."""

LAST, BEST = "last.pt", "best.pt"


def seed_everything(*words: int) -> None:
    """Seed torch, numpy and Python's ``random`` with integers, such as seed, rank and epoch.

    >>> seed_everything(7)
    >>> first = torch.rand(3), np.random.rand(), random.random()
    >>> seed_everything(7)
    >>> bool((torch.rand(3) == first[0]).all()), np.random.rand() == first[1], random.random() == first[2]
    (True, True, True)
    """
    seeds = np.random.SeedSequence(words).generate_state(3)
    torch.manual_seed(int(seeds[0]))
    np.random.seed(seeds[1])
    random.seed(int(seeds[2]))


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of the generators of torch (CPU and CUDA), numpy and Python."""
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict), "legacy=False returns a dict"
    state = numpy_state["state"]
    return {
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        # Use a plain list, because loading a checkpoint must not execute code.
        "numpy": {**numpy_state, "state": {"key": state["key"].tolist(), "pos": int(state["pos"])}},
        "python": random.getstate(),
    }


def load_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Restore the generators to the states that :func:`random_states` returned."""
    torch.set_rng_state(states["torch"].cpu())
    if states["device"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["device"].cpu(), device)
    state = states["numpy"]["state"]
    np.random.set_state({**states["numpy"], "state": {**state, "key": np.array(state["key"], dtype=np.uint32)}})
    random.setstate(states["python"])


@contextmanager
def algorithms(*, deterministic: bool, tf32: bool = False) -> Iterator[None]:
    """Use only deterministic algorithms, or enable cuDNN's search for the fastest ones; optionally allow TF32."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    warned_only, was_benchmark = torch.is_deterministic_algorithms_warn_only_enabled(), torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = not deterministic
    if deterministic:
        # cuBLAS reads this variable at its first use: docs.nvidia.com/cuda/cublas, "Results reproducibility".
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        with _tf32_products() if tf32 else nullcontext():
            yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic, warn_only=warned_only)
        torch.backends.cudnn.benchmark = was_benchmark


@contextmanager
def _tf32_products() -> Iterator[None]:
    allowed, set_precision = "high", torch.set_float32_matmul_precision
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch rejects this call if the user has set its newer precision settings.
        matmul: Any = torch.backends.cuda.matmul
        before, allowed, set_precision = matmul.fp32_precision, "tf32", partial(setattr, matmul, "fp32_precision")
    set_precision(allowed)
    try:
        yield
    finally:
        set_precision(before)


def save_checkpoint(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write a state to a file.

    The state may contain tensors, numpy arrays, numbers, strings, and containers of these.

    Raises:
        OSError: If the file cannot be written, for example because the disk is full. The previous file is kept.
    """
    path = Path(path)
    try:
        with write_whole(path) as file, _checksums():
            torch.save({"format": FORMAT, **state}, file)
    except (OSError, RuntimeError) as failure:
        # torch hides the operating system's error in a RuntimeError.
        error = failure if isinstance(failure, OSError) else failure.__context__
        if not isinstance(error, OSError):
            raise
        what = error.strerror or error
        remedy = "fix the cause (if the disk is full, free some space) and rerun the same command to resume"
        raise OSError(error.errno, f"{what}. Any previous checkpoint is kept: {remedy}", str(path)) from error


@contextmanager
def _checksums() -> Iterator[None]:
    # Loading verifies the checksums, so torch must write them even if the user has turned them off.
    are_written = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(are_written)


def load_checkpoint(path: str | os.PathLike[str], map_location: str | torch.device | None = "cpu") -> dict[str, Any]:
    """Load the state that :func:`save_checkpoint` wrote. No code in the file is executed.

    ``load_checkpoint("run/best.pt")["model"]`` is the ``state_dict`` of the model without its wrappers.

    Args:
        path: The file.
        map_location: The device to load tensors to.

    Raises:
        FormatError: If the file is not a checkpoint, is damaged, or has a different format.
    """
    with Path(path).open("rb") as file:
        if not zipfile.is_zipfile(file):
            raise FormatError(f"{path} is not a checkpoint, or is truncated: use another checkpoint or start a new run")
    try:
        with zipfile.ZipFile(path) as archive:  # torch writes checksums, but does not verify them.
            if (name := archive.testzip()) is not None:
                raise ValueError(f"the part {name} is damaged")
        with torch.serialization.safe_globals(_find_safe_globals()):
            state: dict[str, Any] = torch.load(path, map_location=map_location, weights_only=True)
        if not isinstance(state, dict):
            raise TypeError(f"it contains an object of type {type(state).__name__}, not a dict")
    except MemoryError:
        raise
    except Exception as error:  # A damaged file may cause errors of nearly any type.
        raise FormatError(
            f"{path} cannot be read as a checkpoint ({error}): use another file or start a new run"
        ) from error
    if "format" not in state:
        raise FormatError(
            f"{path} has no 'format', so it was not written by save_checkpoint: use another file or start a new run"
        )
    found = state["format"]
    if type(found) is not int or found != FORMAT:
        raise FormatError(
            f"{path} has format {found}, but this version of shardio reads format {FORMAT}: use another "
            "checkpoint or start a new run"
        )
    return state


def _find_safe_globals() -> list[Any]:
    """Return the functions and types that load numpy's arrays and scalars, which users' states may contain."""
    functions = {"_reconstruct": np.empty(0).__reduce__()[0], "scalar": np.float64(0).__reduce__()[0]}
    named = [
        (function, f"numpy.{core}.multiarray.{name}")  # numpy 2 renamed the module.
        for name, function in functions.items()
        for core in ("core", "_core")
    ]
    return [np.ndarray, np.dtype, *{type(np.dtype(code)) for code in np.typecodes["All"]}, *named]


def check_loadable(value: Any, name: str) -> None:
    """Check that a value in a checkpoint can be loaded without executing code.

    Raises:
        TypeError: If the value cannot be loaded in this way. The message names it, or a part such as ``name[0]``.
    """
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return
    if type(value) in (dict, OrderedDict, Counter):
        for key, part in value.items():
            check_loadable(key, f"the key {key!r} of {name}")
            check_loadable(part, f"{name}[{key!r}]")
    elif type(value) in (list, tuple, set):
        for number, part in enumerate(value):
            check_loadable(part, f"{name}[{number}]")
    elif type(value) not in _LOADABLE:
        raise TypeError(
            f"{name} is of type {type(value).__qualname__}, which checkpoints cannot hold: use tensors, numpy arrays, "
            "numbers, strings, and dicts, lists, tuples or sets of these"
        )


def check_parts(state: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Raise FormatError if a run's state lacks a part or a part has the wrong type."""
    for name, kind in PARTS.items():
        if not isinstance(state.get(name), kind):
            raise FormatError(
                f"{path} is not a checkpoint of a training run, or is damaged ({name!r} must be a {kind.__name__}, got "
                f"{type(state.get(name)).__name__}): use another checkpoint or start a new run"
            )


def are_equal(one: Any, other: Any) -> bool:
    """Return whether two values of checkpoints are equal."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(are_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(are_equal, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return type(one) is type(other) and bool(one == other)


def find_shared_state(states: Sequence[Any]) -> Any:
    """Return the state that loaders on any number of ranks can load to begin an epoch; None if no state fits all ranks.

    Without shardio's order, the ranks' states differ in their seeds and generators, which are not compared.

    Args:
        states: The states of all ranks at the end of an epoch.
    """
    compared = [_leave_out_draws(state, keeps_generators=False) for state in states]
    if not all(are_equal(compared[0], other) for other in compared):
        return None
    return _leave_out_draws(states[0], keeps_generators=True)


def _leave_out_draws(state: Any, *, keeps_generators: bool) -> Any:
    if not isinstance(state, dict):
        return state
    changed = {key: _leave_out_draws(part, keeps_generators=keeps_generators) for key, part in state.items()}
    if _SEED in state and (_GENERATORS in state or not keeps_generators):
        changed[_SEED] = None  # shardio's loader then draws a new seed. torchdata's loader needs a seed.
    if not keeps_generators and isinstance(generators := state.get(_GENERATORS), dict):
        changed[_GENERATORS] = generators.get("own")
    return changed


LOCK = ".run.lock"

_log = logging.getLogger("shardio")


@contextmanager
def claimed(directory: Path | None) -> Iterator[None]:
    """Hold the lock on a run's directory, and create the directory if it is missing.

    Without a directory, do nothing. Rank 0 holds the lock for all ranks. If rank 0 cannot take the lock, all ranks
    raise the error. The lock is released when the block, or the process of rank 0, ends. Worker processes that torch
    forks close their copy of the lock's descriptor, so a killed run can be resumed while its workers still exist. On
    NFS, the lock works between machines if the server has a lock service. On a file system without locks, a warning is
    logged.

    Raises:
        BusyError: If another run holds the lock.
        OSError: If the directory cannot be created or written to.
    """
    lock = _Lock()  # Only rank 0 takes the lock.
    try:
        if directory is not None:
            on_rank_0(lambda: lock.take(directory))
        yield
    finally:
        lock.release()


class _Lock:
    """The lock on a run's directory.

    A forked child releases its copy, which would otherwise hold the lock until the child ends.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None
        call_at_fork(self, after_in_child=_Lock.release)

    def take(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 256, 0).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise BusyError(
                f"{directory} is in use by {holder}, which is training there: wait for it to end, or use another "
                "directory"
            ) from None
        except OSError as error:
            os.close(descriptor)
            message = "%s is on a file system without locks (%s): do not start a second run that writes there"
            _log.warning(message, directory, error)
            return
        self._descriptor = descriptor
        with suppress(OSError):  # On a full disk, the lock works even if the holder's name is not written.
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)

    def release(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def prepare_directory(directory: Path, config: TrainConfig) -> bool:
    """Remove outdated files, and return whether there is a checkpoint to resume from.

    Raises:
        StateError: If ranks see different directories, or the directory holds another tool's log or a run without its
            last checkpoint. In these cases, nothing is removed.
        FormatError: If the best checkpoint cannot be read.
    """
    last = directory / LAST
    if len(set(gather(last.exists()))) > 1:
        raise StateError(f"only some ranks see {last}: use a directory that all ranks share")
    return on_rank_0(lambda: _prepare(directory, config))


def _prepare(directory: Path, config: TrainConfig) -> bool:
    last_epoch = max((line["epoch"] for line in read_log(directory / LOG)), default=None)
    has_last = (directory / LAST).exists()
    if config.resume and not has_last and not _may_start_over(directory / BEST, config, last_epoch):
        found = BEST if (directory / BEST).exists() else f"{LOG} (up to epoch {last_epoch})"
        raise StateError(
            f"{directory} contains the {found} of an earlier run, but no {LAST} to resume from: restore {LAST}, use "
            "another directory, or replace the earlier run with resume=False (--fresh)"
        )
    remove_unfinished(directory, (LAST, BEST, LOG, PAGE))
    for name in () if config.resume else (LAST, BEST):
        (directory / name).unlink(missing_ok=True)
    return has_last and config.resume


def _may_start_over(best: Path, config: TrainConfig, last_epoch: int | None) -> bool:
    """Return whether a run without its last checkpoint was killed in its first epoch, before it could write one.

    The log of a run that was killed in its first epoch ends in epoch 0. The best checkpoint, which is written before
    the last one, contains only epoch 0, and its settings equal ``config``.
    """
    if not best.exists():
        return not last_epoch
    if last_epoch != 0:
        return False
    state = load_checkpoint(best)
    return len(state["results"]) == 1 and not config.find_differences(state["config"])
