"""Start processes and describe their exits, handle forks and signals, and count processors.

Also preserve random number generators, and report the progress of long work.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path, PurePosixPath
from types import CodeType
from typing import IO, Any, TypeVar

Owner = TypeVar("Owner")


@contextmanager
def keep_generators() -> Iterator[None]:
    """Restore the global random number generators of torch (CPU), numpy and Python at the end of a ``with`` block."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    torch_state, numpy_state = torch and torch.get_rng_state(), numpy and numpy.random.get_state()
    python_state = random.getstate()
    try:
        yield
    finally:
        if torch is not None:
            torch.set_rng_state(torch_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        random.setstate(python_state)


def count_processors() -> int:
    """Return the number of processors that this process may use, at least 1.

    The limits are the affinity mask and the CPU quotas, rounded up, of the process's control group and its ancestors.
    A container with a quota of 2 CPUs sees all processors of its machine but gets the time of only 2.
    """
    if hasattr(os, "process_cpu_count"):  # Python 3.13 or later. The function also reads PYTHON_CPU_COUNT.
        available = os.process_cpu_count() or 1
    elif hasattr(os, "sched_getaffinity"):
        available = len(os.sched_getaffinity(0))
    else:
        available = os.cpu_count() or 1
    return min([available, *(max(1, -(-quota // period)) for quota, period in _quotas(Path("/")))])


def _quotas(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (quota, period) of this process's control groups, in microseconds.

    The formats are documented in cgroups(7), and in Linux's ``admin-guide/cgroup-v2`` (cpu.max) and
    ``scheduler/sched-bwc`` (cpu.cfs_quota_us). A container often sees its own group as the root.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # Not Linux.
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        group = PurePosixPath(name.lstrip("/"))
        for folder in dict.fromkeys([group, *group.parents]):
            text = _read(mount / folder, ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",))
            if len(values := [word for word in text.split() if word.isdigit()]) == 2:  # The quota is not "max" or -1.
                yield int(values[0]), int(values[1])


def _read(folder: Path, names: tuple[str, ...]) -> str:
    try:
        return " ".join((folder / name).read_text() for name in names)
    except OSError:  # Control groups may be invisible.
        return ""


@dataclass(frozen=True, slots=True)
class _Watch:
    """An object, and the functions to call with it at a fork."""

    owner: weakref.ref[Any]
    before: Callable[[Any], object] | None
    after_in_parent: Callable[[Any], object] | None
    after_in_child: Callable[[Any], object] | None


_watches: dict[int, _Watch] = {}
_serials = itertools.count()


def call_at_fork(
    owner: Owner,
    *,
    before: Callable[[Owner], object] | None = None,
    after_in_parent: Callable[[Owner], object] | None = None,
    after_in_child: Callable[[Owner], object] | None = None,
) -> None:
    """Register functions to call with ``owner`` whenever this process forks. ``owner`` is not kept alive.

    As with ``os.register_at_fork``, calls before a fork run in reverse order of registration, and calls after it in
    order. A function is unregistered when its ``owner`` is destroyed. An error in one function does not prevent the
    other calls; Python reports the errors through ``sys.unraisablehook``. Ctrl-C that arrives before the first call
    prevents all of them, so locks need :func:`hold_during_forks`.

    Args:
        owner: An object that can be weakly referenced.
        before: Called in the parent before the fork.
        after_in_parent: Called in the parent after the fork.
        after_in_child: Called in the child, in which only the thread that forked exists.
    """
    _register()
    serial = next(_serials)
    reference = weakref.ref(owner, partial(_forget, serial))
    _watches[serial] = _Watch(reference, before, after_in_parent, after_in_child)


def hold_during_forks(lock: threading.RLock) -> None:
    """Hold a lock whenever this process forks. The lock is kept alive until the process ends.

    Python calls the lock's own methods, which run no Python code, so Ctrl-C cannot skip the release. Ctrl-C can
    interrupt the wait for a lock that another thread holds. In this case, the process forks without the lock, and the
    subsequent release fails, because only the owner of an RLock can release it.
    """
    if hasattr(os, "register_at_fork"):  # Windows does not support forking.
        # As concurrent.futures does. The child gets a released lock, even if another thread of the parent held it.
        renew = lock._at_fork_reinit  # type: ignore[attr-defined]  # missing in typeshed
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=renew)


def _forget(serial: int, _: object) -> None:
    _watches.pop(serial, None)


@cache
def _register() -> None:
    if hasattr(os, "register_at_fork"):  # Windows does not support forking.
        os.register_at_fork(
            before=partial(_call, "before"),
            after_in_parent=partial(_call, "after_in_parent"),
            after_in_child=partial(_call, "after_in_child"),
        )


def _call(moment: str) -> None:
    watches = list(_watches.values())  # An atomic copy: other threads may register functions.
    _call_each(iter(watches[::-1] if moment == "before" else watches), moment)


def _call_each(watches: Iterator[_Watch], moment: str) -> None:
    """Call all functions, even if some raise errors, and raise the errors as a chain."""
    try:
        for watch in watches:
            owner, function = watch.owner(), getattr(watch, moment)
            if owner is not None and function is not None:
                function(owner)
    except BaseException:  # Even after Ctrl-C, the other watches must release their locks.
        _call_each(watches, moment)
        raise


class Owned:
    """A group of workers that belongs to the process that created it, and ends when that process closes or frees it.

    Args:
        end: A function that ends the workers and waits for them. The function must not refer to the Owned object.
    """

    def __init__(self, end: Callable[[], object]) -> None:
        self._owner_id = os.getpid()
        self._finalizer = weakref.finalize(self, _end_in, self._owner_id, end)

    @property
    def belongs_here(self) -> bool:
        """Whether this process created the group; false in a forked child."""
        return self._owner_id == os.getpid()

    def close(self) -> None:
        """End all workers and wait for them. Later calls do nothing."""
        self._finalizer()


def _end_in(owner_id: int, end: Callable[[], object]) -> None:
    if os.getpid() == owner_id:
        end()


def let_through(error: BaseException) -> None:
    """Re-raise an error if it is an interruption. Call this before attributing an error to a sample.

    A sample whose decoding was interrupted is not damaged, but the interrupted batch may be lost.
    """
    if is_interruption(error):
        raise error


def is_interruption(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, was raised by a signal handler."""
    handlers, seen = set(_codes_of_handlers()), set[int]()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:  # `raise error from error` creates a cycle.
        trace = cause.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code in handlers:
                return True
            trace = trace.tb_next
        seen.add(id(cause))
        cause = cause.__cause__
    return False


def describe_error(error: BaseException) -> str:
    """Return an error's class and message as text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def cut_short(by: str) -> RuntimeError:
    """Return the error for an epoch that cannot continue, given a description of what ended it."""
    return RuntimeError(
        f"this epoch ended before its last batch ({by}). The epoch cannot continue because a batch may have been lost: "
        "iterate over the loader again. To get the rest of this epoch from a shardio.DataLoader, call "
        "loader.load_state_dict(loader.state_dict()) first"
    )


def no_end(error: Exception) -> Exception:
    """Return the error, or a RuntimeError for StopIteration, which would end the epoch silently (PEP 479)."""
    if not isinstance(error, StopIteration):
        return error
    failure = RuntimeError("a dataset, decoder, transform or collate_fn raised StopIteration: raise a different error")
    failure.__cause__ = error
    return failure


def _codes_of_handlers() -> Iterator[CodeType]:
    for each in signal.valid_signals():
        handler: Any = signal.getsignal(each)
        if not callable(handler):  # Default or ignored.
            continue
        handler = getattr(handler, "func", handler)  # For a partial.
        code = getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
        if code is not None:
            yield code


def start_process(
    function: str,
    arguments: Sequence[object] = (),
    *,
    environment: Mapping[str, str] | None = None,
    descriptors: Sequence[int] = (),
    cwd: str | None = None,
    stdout: int | IO[bytes] | None = subprocess.DEVNULL,
    stderr: int | IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a Python process that calls a function without arguments and ends when the function returns.

    The new process has an empty standard input and its own session, so Ctrl-C in the terminal does not reach it. The
    process does not run the user's script.

    Args:
        function: ``package.module:function``.
        arguments: The new process's ``sys.argv[1:]``, converted to strings.
        environment: Environment variables to add to those of this process.
        descriptors: The file descriptors that the new process inherits.
        cwd: The new process's working directory; by default, that of this process.
        stdout: The new process's standard output, as in :class:`subprocess.Popen`.
        stderr: The new process's standard error; by default, that of this process.
    """
    return subprocess.Popen(
        [sys.executable, "-c", _write_program(function), repr(_absolute_module_path()), *map(str, arguments)],
        env={**os.environ, **(environment or {})},
        pass_fds=descriptors,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


def _write_program(function: str) -> str:
    module, _, name = function.partition(":")
    # Imports create few reference cycles, and searching for them takes a tenth of the import time.
    return (
        "import gc, sys; gc.disable(); sys.path[:] = eval(sys.argv.pop(1)); "
        f"from {module} import {name}; gc.enable(); {name}()"
    )


def _absolute_module_path() -> list[str]:
    """Return this process's module search path, without relative entries if the working directory is gone."""
    path = [*map(str, sys.path), str(Path(__file__).parents[1])]
    try:
        return list(map(os.path.abspath, path))
    except FileNotFoundError:
        return list(filter(os.path.isabs, path))


def is_stopped(process_id: int) -> bool:
    """Return whether a signal has stopped a process; false if the operating system does not report this."""
    return _find_state(process_id) == "T"


def has_ended(process_id: int) -> bool:
    """Return whether a process has ended, even if its exit status has not been collected."""
    try:
        os.kill(process_id, 0)
    except OSError as error:  # PermissionError, for example, if a process has changed its user.
        return isinstance(error, ProcessLookupError)
    return _find_state(process_id) == "Z"


def _find_state(process_id: int) -> str:
    with suppress(OSError):
        status = Path(f"/proc/{process_id}/stat").read_text("utf-8", "replace")
        return status.rpartition(")")[2].split()[0]  # proc(5): the state follows the name.
    return ""


def describe_exit(process: str, code: int) -> str:
    """Describe the end of a process in the words of torch's DataLoader, because programs search for these words.

    Args:
        process: The name of the process, such as ``DataLoader worker (pid 12)``.
        code: The exit code; negative if a signal ended the process.
    """
    if code >= 0:
        return f"{process} exited unexpectedly with exit code {code}"
    names = {each.value: f" ({each.name})" for each in signal.Signals}  # Real-time signals have no name.
    return f"{process} is killed by signal: {signal.strsignal(-code)}{names.get(-code, '')}"


def ignore_pillows_warnings() -> None:
    """From now on, ignore Pillow's warnings about files.

    These warnings concern metadata and do not name the file. Damaged pixels cause errors. The user's own filters take
    precedence. Call this only in shardio's own processes.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.", append=True)


class WorkProgress:
    """A receiver of progress reports that ignores them. Subclasses override its methods."""

    def start(self, total: int, num_bytes: int | None = None) -> None:
        """Receive the number of items to process and, if known, their size in bytes. Called once, at the start."""

    def advance(self, num_done: int, num_bytes: int = 0, num_samples: int = 0) -> None:
        """Receive the number of items done since the last call, their size in bytes, and their number of samples."""
