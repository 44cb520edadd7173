"""Pack the shards of a plan in this process, in worker processes or on Ray. Each shard depends only on its job."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from shardio.errors import FormatError, PackError, StoreError
from shardio.packing.folders import DatasetFolder, explain_foreign
from shardio.packing.pack_call import PackOptions
from shardio.packing.preparing import PackedShard, Preparation
from shardio.packing.sources.records import close_records
from shardio.packing.sources.source import FileChangedError, SourceSample
from shardio.process import WorkProgress, count_processors, ignore_pillows_warnings, start_process
from shardio.sample import Sample
from shardio.shards import index_location, list_names, split_name, write_shard
from shardio.storage import Location, find_path

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

MAX_WORKERS = 16
"""The maximum number of worker processes, unless the caller chooses a number."""

BYTES_PER_WORKER = {"copied": 128 * 2**20, "decoded": 16 * 2**20}
"""The number of source bytes that justify starting another worker process. A process spends most of its start-up
time importing modules."""

END_WITHIN_S = 10.0
"""The time in seconds within which a worker process must end after its connection is closed. The process only has to
remove one unfinished file."""

SILENT_S, LAST_CHANCE_S = 60.0, 20.0
"""A worker process is considered suspended if it does not report for SILENT_S seconds, and then for another
LAST_CHANCE_S seconds. If this process was itself suspended, a worker can still report within these
LAST_CHANCE_S seconds. An active worker reports every few seconds."""

REPORT_EVERY_S = 0.1
"""The time in seconds between reports. A report also shows that the parent process still exists."""

ALIVE_EVERY_S = 2.0
"""The time in seconds between empty reports, which show that a worker process is not suspended."""

Report = Callable[[int, int], None]
"""A function that receives the numbers of samples and bytes packed since the last call."""


def _find_finished(
    folder: DatasetFolder, tar: Location, samples: Sequence[SourceSample], earlier: PackedShard | None
) -> PackedShard | str | None:
    """Return an earlier run's shard if it can be kept, a description of its damage if it is damaged, or else None."""
    damage = None
    if earlier is not None:
        if earlier.findings.changed:
            return None  # The shard lacks samples whose files had changed, but the files may have been restored.
        damage = folder.find_damage(tar, earlier) if earlier.entry.num_samples else None
        if damage is None:
            return replace(earlier, was_kept=True)
    _refuse_foreign(tar, samples, is_recorded=damage is not None)
    return damage


def _refuse_foreign(tar: Location, samples: Sequence[SourceSample], *, is_recorded: bool) -> None:
    try:
        with closing(tar.open()) as file:
            names = [split_name(name) for name in list_names(file)]
    except StoreError:  # The tar did not cause this error.
        raise
    except (FormatError, OSError) as error:
        if is_recorded or _is_absent(tar, error):
            return
        raise PackError(explain_foreign(tar, f"it is not a readable tar ({error})")) from error
    planned = {sample.key for sample in samples}
    for name in names:
        if name is None:
            raise PackError(explain_foreign(tar, "it holds a member whose name has no key"))
        if name[0] not in planned:
            raise PackError(explain_foreign(tar, f"this pack does not put the sample {name[0]!r} there"))


def _is_absent(tar: Location, error: Exception) -> bool:
    path = find_path(tar)
    return isinstance(error, FileNotFoundError) and (path is None or not os.path.lexists(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardJob:
    """A shard to pack.

    Attributes:
        number: The shard's number in the plan.
        folder: The folder to write the shard to.
        name: The shard's file name.
        root: The slash-terminated prefix of the source's file names.
        samples: The shard's samples in order.
        options: The options of the pack.
        earlier: The shard that an earlier run finished, or None if no run did.
    """

    number: int
    folder: DatasetFolder
    name: str
    root: str
    samples: Sequence[SourceSample]
    options: PackOptions
    earlier: PackedShard | None


def pack_shard(job: ShardJob, report: Report) -> PackedShard:
    """Write a shard and its index, unless an earlier run finished the shard.

    Each file appears whole or not at all. The bytes depend only on the job.

    Raises:
        PackError: If a sample cannot be packed, or a different file already has the shard's name.
        FileChangedError: If a file has changed since the scan.
        OSError: If the shard cannot be written.
    """
    tar = job.folder.location / job.name
    found = _find_finished(job.folder, tar, job.samples, job.earlier)
    if isinstance(found, PackedShard):
        if job.options.strict:
            found.findings.refuse_problems(job.root)
        report(len(job.samples), found.entry.num_bytes)
        return found
    preparation = Preparation(job.options, job.root)
    entry, fields = write_shard(tar, _make_samples(job, preparation, report))
    if not entry.num_samples:
        for each in tar, index_location(tar):
            each.remove()
    return PackedShard(
        entry=entry,
        fields=fields,
        identity=job.folder.identify(tar) if entry.num_samples else "",
        findings=preparation.findings,
        damage=found or "",
    )


def _make_samples(job: ShardJob, preparation: Preparation, report: Report) -> Iterator[Sample]:
    for source in job.samples:
        try:
            sample = source.read()
        except FileChangedError as change:
            if job.options.on_changed == "raise":
                raise
            preparation.findings.changed.append(change.problem)
            continue
        if (stored := preparation.prepare(source, sample)) is not None:
            yield stored
        report(1, sum(map(len, sample.fields.values())))


class PackExecutor(Protocol):
    """Packs shards."""

    def __call__(self, jobs: Iterator[ShardJob], progress: WorkProgress) -> Generator[tuple[int, PackedShard]]:
        """Pack shards. Yield each shard with its number when it is finished, in any order.

        Jobs are created on demand. After the iterator is closed or raises an error, no process is packing.

        Raises:
            PackError, FileChangedError, OSError: The first error that a job raises.
        """


def _pack_here(jobs: Iterator[ShardJob], progress: WorkProgress) -> Generator[tuple[int, PackedShard]]:
    try:
        for job in jobs:
            yield job.number, pack_shard(job, progress.advance)
    finally:
        close_records()


def choose_executor(options: PackOptions, num_shards: int, num_bytes: int) -> PackExecutor:
    """Return the executor for a pack, given the number of shards and the number of bytes in the source."""
    num_workers = options.num_workers
    if options.engine == "ray":
        _import_ray()
        return partial(_pack_on_ray, options.ray_address, num_workers)
    if num_workers is None:
        does_decode = options.check or options.jpeg != "copy" or options.convert_to is not None
        worth = num_bytes // BYTES_PER_WORKER["decoded" if does_decode else "copied"]
        num_workers = min(MAX_WORKERS, count_processors(), worth)
    num_workers = min(num_workers, num_shards)
    return _pack_here if num_workers <= 1 else partial(_pack_in_processes, num_workers)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection


def _pack_in_processes(
    num_workers: int, jobs: Iterator[ShardJob], progress: WorkProgress
) -> Generator[tuple[int, PackedShard]]:
    workers = list[_Worker]()
    try:
        for job in islice(jobs, num_workers):
            workers.append(_start_worker())
            workers[-1].connection.send(job)
        yield from _run_in_processes(workers, jobs, progress)
    finally:
        _end(workers)


def _run_in_processes(
    workers: list[_Worker], jobs: Iterator[ShardJob], progress: WorkProgress
) -> Generator[tuple[int, PackedShard]]:
    """Send each worker its next job when it finishes one, until all jobs are done."""
    from multiprocessing.connection import wait

    busy: dict[Any, _Worker] = {worker.connection: worker for worker in workers}
    heard_at = dict.fromkeys(busy, time.monotonic())
    while busy:
        for connection in wait(list(busy), SILENT_S):
            worker, heard_at[connection] = busy[connection], time.monotonic()
            kind, *values = _receive(worker)
            if kind == "report":
                progress.advance(*values)
                continue
            if kind == "error":
                raise values[0]
            if (job := next(jobs, None)) is not None:
                worker.connection.send(job)
            else:
                del busy[connection]
            yield values[0], values[1]
        for connection, worker in busy.items():
            if time.monotonic() - heard_at[connection] > SILENT_S and not connection.poll(LAST_CHANCE_S):
                worker.process.kill()
                raise PackError(
                    f"the worker process {worker.process.pid} has not reported for more than {SILENT_S:g} s, so it was "
                    "killed: it had been suspended, or was waiting for a disk. Rerun the same command to resume: "
                    "finished shards are kept"
                )


def _start_worker() -> _Worker:
    from multiprocessing.connection import Connection  # Imported only if worker processes are used.

    ours, theirs = socket.socketpair()
    with theirs:
        process = start_process("shardio.packing.executors:main", [theirs.fileno()], descriptors=[theirs.fileno()])
    return _Worker(process=process, connection=Connection(ours.detach()))


def _receive(worker: _Worker) -> Any:
    try:
        return worker.connection.recv()
    except (EOFError, ConnectionError) as error:
        code = worker.process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise PackError(
            f"a worker process {how}. If the system ran out of memory, use fewer workers (--num-workers, num_workers). "
            "Rerun the same command to resume: finished shards are kept"
        ) from error


def _end(workers: list[_Worker]) -> None:
    """End the worker processes. A worker that is packing removes its unfinished file before it ends."""
    for worker in workers:
        worker.connection.close()
    deadline = time.monotonic() + END_WITHIN_S
    for worker in workers:
        with suppress(subprocess.TimeoutExpired):
            worker.process.wait(max(0.0, deadline - time.monotonic()))
        if worker.process.returncode is None:
            worker.process.kill()
            worker.process.wait()


class _Parent:
    """The connection to the parent process; several threads use it. Reports are added up before they are sent."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self._num_samples = self._num_bytes = 0
        self._last = time.monotonic()

    def send(self, message: tuple[object, ...]) -> None:
        with self._lock:
            self._connection.send(message)

    def show_life(self) -> None:
        with suppress(OSError):
            while True:
                self.send(("report", 0, 0))
                time.sleep(ALIVE_EVERY_S)  # A silent worker is considered suspended: see SILENT_S.

    def report(self, num_samples: int, num_bytes: int) -> None:
        self._num_samples += num_samples
        self._num_bytes += num_bytes
        if time.monotonic() - self._last >= REPORT_EVERY_S:
            self.send_report()

    def send_report(self) -> None:
        """Send the sums of the reports. Exit if the parent process has ended or has closed the connection."""
        try:
            self.send(("report", self._num_samples, self._num_bytes))
        except OSError:
            sys.exit()
        self._num_samples = self._num_bytes = 0
        self._last = time.monotonic()


def main() -> None:
    """Run a worker process: pack shards until the connection is closed."""
    from multiprocessing.connection import Connection

    ignore_pillows_warnings()
    with Connection(int(sys.argv[1])) as connection, suppress(EOFError, ConnectionError):
        parent = _Parent(connection)
        threading.Thread(target=parent.show_life, daemon=True).start()
        while True:
            parent.send(_pack_and_report(connection.recv(), parent))


def _pack_and_report(job: ShardJob, parent: _Parent) -> tuple[object, ...]:
    try:
        shard = pack_shard(job, parent.report)
    except Exception as error:  # The parent process raises this error.
        return "error", _picklable(error)
    parent.send_report()
    return "packed", job.number, shard


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))  # Safe: this process created the pickle.
    except Exception:  # The error's text can always be sent.
        return PackError(f"{type(error).__name__}: {error}")
    return error


def _pack_on_ray(
    address: str | None, num_workers: int | None, jobs: Iterator[ShardJob], progress: WorkProgress
) -> Generator[tuple[int, PackedShard]]:
    """Pack on the cluster that this process is connected to, or connect to a cluster first.

    All machines of the cluster must see the source and the destination at the same paths, and have the same version
    of shardio.
    """
    ray = _import_ray()
    is_ours = not ray.is_initialized()
    if is_ours:
        _connect(ray, address)
    try:
        num_at_once = num_workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        yield from _run_on_ray(ray, num_at_once, jobs, progress)
    finally:
        if is_ours:
            ray.shutdown()


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise PackError(
            f"--engine ray (engine='ray') needs Ray ({error}): pip install 'shardio-loader[ray]'"
        ) from error
    return ray


def _connect(ray: Any, address: str | None) -> None:
    options = {"address": address} if address else {"include_dashboard": False}
    try:
        ray.init(**options, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise PackError(f"cannot connect to the Ray cluster {address or 'on this machine'}: {error}") from error


def _run_on_ray(
    ray: Any, num_at_once: int, jobs: Iterator[ShardJob], progress: WorkProgress
) -> Generator[tuple[int, PackedShard]]:
    """Keep ``num_at_once`` tasks in flight until all jobs are done."""
    task = ray.remote(num_cpus=1)(_run_task)
    in_flight = {task.remote(job): job for job in islice(jobs, num_at_once)}
    try:
        while in_flight:
            (done,), _ = ray.wait(list(in_flight), num_returns=1)
            job = in_flight.pop(done)
            shard = _get(ray, done)
            if (following := next(jobs, None)) is not None:
                in_flight[task.remote(following)] = following
            progress.advance(len(job.samples), shard.entry.num_bytes)
            yield job.number, shard
    finally:
        for each in in_flight:
            ray.cancel(each, force=True)


def _run_task(job: ShardJob) -> PackedShard:
    return pack_shard(job, lambda num_samples, num_bytes: None)


def _get(ray: Any, done: Any) -> PackedShard:
    try:
        return ray.get(done)  # type: ignore[no-any-return]  # Ray has no types.
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise PackError(
            f"a Ray task failed: {error}. Rerun the same command to resume: finished shards are kept"
        ) from error
