"""Record the samples that each rank receives, in a training run or in one process per rank, and merge the recordings.

A recording is a safetensors file. For each epoch ``e``, the file has the tensors ``ids.e`` (uint64 [n]), ``batches.e``
(uint32 [n]) and ``workers.e`` (int16 [n], -1 for an unknown worker). Its metadata key ``recording`` is a JSON object
with the format, the rank, the number of ranks, the process, the times and, if they are few, the keys. For each epoch,
the object also has the fields of RankEpoch and of the loader's Allowance.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn

import safetensors
import safetensors.numpy

from shardio.check.coverage import Allowance, Coverage, Key, RankEpoch, Recording, merge
from shardio.check.exactly_once import needs_second_look
from shardio.check.recording import observe, record, resumes, source_of
from shardio.check.report import ExpectedSamples
from shardio.epochs import set_epoch
from shardio.errors import FormatError, IdentityError, ShardioError
from shardio.files import remove_unfinished, write_whole
from shardio.values import load_function, parse_json
from shardio.world import choose_world, find_data_world

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


RECORDING_FORMAT = 2
"""The version of the file format."""

COLUMNS = {"ids": "<u8", "batches": "<u4", "workers": "<i2"}
"""The columns of a recording and their types: 14 bytes per delivery."""

MAX_SAVED_NAMES = 20_000
"""The largest number of keys that a recording holds. If there are more keys, the recording holds only hashes."""

HEADER = ("rank", "world_size", "process", "started", "written")
"""The attributes of a Recording that its file's metadata holds."""

GRACE_S = 5.0
"""The longest time between SIGTERM and SIGKILL, in seconds."""

SHOWN_BYTES = 8192
"""The number of bytes that an error message shows from the end of a rank's standard error."""


class CoverageRecorder:
    """A context manager that records which samples this rank receives.

    The recorder writes its file after each epoch.

    >>> with CoverageRecorder("run", key=2) as recorder:  # doctest: +SKIP
    ...     for epoch in range(10):
    ...         for images, labels, keys in recorder.watch(loader): ...

    ``shardio check --merge run/*.cov`` checks the recordings of all ranks.

    Args:
        directory: The directory for each rank's file, such as ``rank-00000.cov``. A missing directory is created. The
            file of an earlier run is renamed, for example to ``rank-00000.cov.old``.
        key: The way to find a batch's keys, as in :func:`shardio.check.assert_exactly_once`.
        rank: The rank of this process; by default, from torch.distributed or torchrun.
        world_size: The number of ranks; by default, that of torch.distributed or torchrun, or unknown if ``rank`` is
            given.
        mesh: An alternative to ``rank`` and ``world_size``, as for the dataset. Groups along the mesh that do not
            contain rank 0 write files such as ``rank-00000.group-00001.replica``, named after their first rank.
        group: A process group, as an alternative to ``rank``, ``world_size`` and ``mesh``, as for the dataset.
        resume: The result of :meth:`state_dict` in the checkpoint that training resumes from. Recording continues in
            the existing file from that point; its later entries are removed.

    Raises:
        FormatError: If the file to resume is missing, ends before the checkpoint, or was recorded with a different
            number of ranks.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        key: Key = None,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: DeviceMesh | None = None,
        group: ProcessGroup | None = None,
        resume: Mapping[str, int] | None = None,
    ) -> None:
        if mesh is not None or group is not None:
            world = choose_world(rank, world_size, mesh=mesh, group=group)
            assert world is not None, "the user chose one"
            rank, world_size = world.rank, world.world_size
        elif rank is None:
            world = find_data_world()
            rank, world_size = world.rank, world.world_size if world_size is None else world_size
        self._group = group if mesh is None else mesh.get_group()
        self.recording = Recording(rank=rank, world_size=world_size)
        self.path = Path(directory) / f"rank-{rank:05d}{_find_suffix(self._group)}"
        self._key = key
        self._is_resumed = resume is not None
        if resume is not None:
            self._continue(resume)
        elif self.path.exists():
            self.path.replace(f"{self.path}.old")
        if self.path.parent.is_dir():
            remove_unfinished(self.path.parent, (self.path.name,))
        self.close()

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self.recording.rank

    @property
    def epochs(self) -> list[Coverage]:
        """The coverage of each epoch on this rank."""
        return self.recording.epochs

    def watch(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of one epoch and record their samples.

        Raises:
            IdentityError: If a key does not identify a sample, or a batch cannot be split into samples.
        """
        coverage = self._start_epoch(loader)
        world_size = self.recording.world_size or self.rank + 1
        try:
            yield from observe(loader, coverage, rank=self.rank, key=self._key, world_size=world_size)
        finally:
            if self.rank in coverage.rank_epochs:
                # A resumed epoch delivers only the remaining samples.
                coverage.rank_epochs[self.rank].may_be_fewer = True
            self.close()

    def gather(self) -> list[Coverage]:
        """Gather the coverage of each epoch from all ranks that read different samples.

        Every rank must call this method.

        Raises:
            FormatError: If the recordings are from different runs.
        """
        import torch.distributed

        parts: list[Any] = [None] * torch.distributed.get_world_size(self._group)
        torch.distributed.all_gather_object(parts, dump_recording(self.recording), group=self._group)
        return merge([load_recording(part, f"rank {rank}") for rank, part in enumerate(parts)], world_size=len(parts))

    def state_dict(self) -> dict[str, int]:
        """Write the recording to its file, and return the number of epochs and the last epoch's number of batches.

        Save the result in each checkpoint, together with the loader's state.
        """
        self.close()
        known = self.epochs[-1].rank_epochs.get(self.rank) if self.epochs else None
        return {"num_epochs": len(self.epochs), "num_batches": 0 if known is None else known.num_batches}

    def _continue(self, state: Mapping[str, int]) -> None:
        former = read_recording(self.path)
        if former.world_size != self.recording.world_size:
            raise FormatError(
                f"{self.path} was recorded with a world size of {former.world_size}, but training resumes with "
                f"{self.recording.world_size}: record the rest of the run in another directory"
            )
        num_epochs, num_batches = state["num_epochs"], state["num_batches"]
        epochs = former.epochs[:num_epochs]
        last = epochs[-1].rank_epochs.get(self.rank) if epochs else None
        if len(epochs) < num_epochs or (last is not None and last.num_batches < num_batches):
            raise FormatError(
                f"{self.path} ends before batch {num_batches} of epoch {num_epochs - 1}, where the checkpoint was "
                "written: it is from a different run. Use the file of the run that wrote the checkpoint"
            )
        self.recording.started = former.started
        self.epochs.extend(epochs)
        if last is not None and (last.num_batches > num_batches or not last.is_whole):
            self.epochs[-1] = self.epochs[-1].until(self.rank, num_batches)

    def _start_epoch(self, loader: Iterable[Any]) -> Coverage:
        last = self.epochs[-1].rank_epochs.get(self.rank) if self._is_resumed and self.epochs else None
        self._is_resumed = False
        if last is not None and not last.is_whole:
            is_resumed = resumes(source_of(loader), last.num_batches)
            if is_resumed:
                return self.epochs[-1]
            last.is_whole = is_resumed is None
        self.epochs.append(Coverage())
        return self.epochs[-1]

    def close(self) -> None:
        """Write the recording to its file."""
        write_recording(self.path, self.recording)

    def __enter__(self) -> CoverageRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _find_suffix(group: ProcessGroup | None) -> str:
    # ``run/*.cov`` must not match files of other groups, which receive the same samples.
    if group is None:
        return ".cov"
    import torch.distributed

    first = min(torch.distributed.get_process_group_ranks(group))
    return ".cov" if first == 0 else f".group-{first:05d}.replica"


def dump_recording(recording: Recording) -> bytes:
    """Return a recording as the bytes of its file."""
    tensors, names, epochs = {}, {}, []
    recording.written = time.time()
    for epoch, coverage in enumerate(recording.epochs):
        for (name, dtype), column in zip(COLUMNS.items(), coverage.arrays(), strict=True):
            tensors[f"{name}.{epoch}"] = column.astype(dtype)
        names.update(coverage.names)
        known, allowance = coverage.rank_epochs.get(recording.rank), coverage.allowance
        parts = {"known": known, "allowance": allowance}
        epochs.append({name: None if part is None else asdict(part) for name, part in parts.items()})
    shown = {f"{identity:016x}": str(name) for identity, name in names.items()} if len(names) <= MAX_SAVED_NAMES else {}
    header = {
        "format": RECORDING_FORMAT,
        **{name: getattr(recording, name) for name in HEADER},
        "epochs": epochs,
        "names": shown,
    }
    return safetensors.numpy.save(tensors, {"recording": json.dumps(header)})


def write_recording(path: Path, recording: Recording) -> None:
    """Write a recording atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_whole(path) as file:
        file.write(dump_recording(recording))


def read_recording(path: Path) -> Recording:
    """Read a recording from its file.

    Raises:
        FormatError: If the file cannot be read or is not a recording.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FormatError(f"the recording {path} cannot be read: {error}") from error
    return load_recording(content, str(path))


def load_recording(content: bytes, name: str) -> Recording:
    """Parse a recording from the bytes of its file.

    Args:
        content: The bytes of the file.
        name: The name of the recording, for messages.

    Raises:
        FormatError: If the content is not a recording.
    """
    try:
        tensors = safetensors.numpy.load(content)
        (length,) = struct.unpack("<Q", content[:8])
        header = parse_json(parse_json(content[8 : 8 + length])["__metadata__"]["recording"])
        if header["format"] != RECORDING_FORMAT:
            raise FormatError(
                f"{name} has format {header['format']}, but this version of shardio reads format {RECORDING_FORMAT}: "
                "record the run again"
            )
        names = {int(identity, 16): text for identity, text in header["names"].items()}
        recording = Recording(**{name: header[name] for name in HEADER})
        for number, epoch in enumerate(header["epochs"]):
            coverage = Coverage()
            coverage.add_arrays(recording.rank, *(tensors[f"{column}.{number}"] for column in COLUMNS))
            coverage.names.update(names)
            if epoch["known"] is not None:
                coverage.rank_epochs[recording.rank] = RankEpoch(**epoch["known"])
            if (allowance := epoch["allowance"]) is not None:
                samples = allowance.pop("samples")
                coverage.allowances[recording.rank] = Allowance(
                    samples=None if samples is None else tuple(samples), **allowance
                )
            recording.epochs.append(coverage)
    except (safetensors.SafetensorError, struct.error, TypeError, KeyError, ValueError) as error:
        raise FormatError(f"{name} is not a recording written by CoverageRecorder, or is damaged: {error}") from error
    return recording


def merge_recordings(paths: Iterable[Path], *, world_size: int | None = None) -> list[Coverage]:
    """Return the coverage of each epoch from the recordings of all ranks.

    Args:
        paths: The recordings, one file per rank.
        world_size: The number of ranks; by default, the number in the recordings.

    Raises:
        FormatError: If a file is not a recording, a rank has none or several, or the recordings are from different
            runs.
    """
    recordings = dict[int, tuple[Path, Recording]]()
    for path in paths:
        recording = read_recording(path)
        if recording.rank in recordings:
            raise FormatError(
                f"{path} and {recordings[recording.rank][0]} are both recordings of rank {recording.rank}: pass one "
                "recording per rank, all from the same run"
            )
        recordings[recording.rank] = path, recording
    return merge([recording for _, recording in recordings.values()], world_size=world_size)


def record_ranks(target: str, *, world_size: int, epochs: int, key: str | None) -> list[Coverage]:
    """Build a loader in ``world_size`` processes, read it, and return the coverage of each epoch.

    If samples are identified by content, one more epoch may be read for comparison.

    Args:
        target: ``path/to/script.py:function``. The function takes no arguments and returns a loader.
        world_size: The number of processes. Each process gets torchrun's environment variables.
        epochs: The number of epochs. Each epoch is set on the loader, or on its samplers and datasets.
        key: The name or index of the field that holds a batch's keys; None if there is no such field.

    Raises:
        ShardioError: If a process fails. The message names the first rank that failed, and ends with its output.
    """
    with tempfile.TemporaryDirectory(prefix="shardio-check-") as directory:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        program = "from shardio.check.ranks import main; main()"
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size))
        shared = {**sizes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        commands = [
            RankCommand(
                command=[sys.executable, "-c", program, target, directory, str(epochs), key or ""],
                environment={**shared, **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))},
                path=Path(directory, _file_name(rank)),
            )
            for rank in range(world_size)
        ]
        run_ranks(commands, target)
        return merge_recordings(sorted(Path(directory).glob("*.cov")), world_size=world_size)


def run_rank(target: str, directory: str, epochs: int, key: str | None) -> None:
    """Build the loader, read it, and write the recording of this process's rank."""
    loader = load_function(target)()
    if not isinstance(loader, Iterable):
        raise IdentityError(
            f"{target} must return a loader or another iterable of batches, got {type(loader).__name__}"
        )
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    recording = Recording(rank=rank, world_size=world_size)
    while len(recording.epochs) < epochs or (
        len(recording.epochs) == epochs == 1 and needs_second_look(recording.epochs, ExpectedSamples())
    ):
        set_epoch(loader, len(recording.epochs))
        coverage = Coverage()
        field = int(key) if key and key.lstrip("-").isdigit() else key or None
        record(loader, coverage, rank=rank, key=field, world_size=world_size)
        recording.epochs.append(coverage)
    write_recording(Path(directory) / f"{_file_name(rank)}.cov", recording)


def main() -> NoReturn:
    """Run the rank given by the environment. The command-line arguments are TARGET DIRECTORY EPOCHS KEY."""
    _, target, directory, epochs, key = sys.argv
    code = 0
    try:
        run_rank(target, directory, int(epochs), key or None)
    except BaseException as error:
        # Record the time first: the launcher names the rank that failed first, and may end this process at any time.
        failed_at = str(time.time_ns()).encode()
        with write_whole(Path(directory, f"{_file_name(int(os.environ['RANK']))}.failed")) as file:
            file.write(failed_at)
        code = 1
        if isinstance(error, IdentityError):
            sys.stderr.write(f"{error}\n")
        elif isinstance(error, SystemExit):
            called = f"the script called sys.exit({error.code})"
            sys.stderr.write(f"{error.code if isinstance(error.code, str) else called}\n")
        else:
            traceback.print_exc()
    # A thread that the script left running would otherwise keep the process alive.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCommand:
    """The command of one rank.

    Attributes:
        command: The program and its arguments.
        environment: Variables to add to this process's environment.
        path: The path of the rank's files, without a suffix. The file ``.err`` holds its standard error. If the rank
            fails, it creates ``.failed``, which holds the time in nanoseconds since 1970.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    path: Path


_Events = SimpleQueue[tuple[int | None, int]]
"""Events: either a rank and the time of its exit in nanoseconds, or None and the number of a signal."""


def run_ranks(ranks: Sequence[RankCommand], name: str) -> None:
    """Run all ranks until they end, as torchrun does. The ranks' standard output goes to this process's standard error.

    Each rank leads its own session, as in torch's elastic launcher, so a signal also reaches its worker processes. The
    first failure, Ctrl-C or SIGTERM ends all ranks, first with SIGTERM, then with SIGKILL. Signals and exits arrive in
    one queue, so a signal never interrupts the launcher in the middle of a step. The standard error of a rank goes to a
    file, because a full pipe would block the rank.

    Args:
        ranks: The command of each rank.
        name: The name of the program, for messages.

    Raises:
        ShardioError: If a rank fails. The message names the rank that failed first, and ends with its output.
        KeyboardInterrupt: After Ctrl-C, when all ranks have ended.
        SystemExit: After SIGTERM or SIGHUP, when all ranks have ended.
    """
    events: _Events = SimpleQueue()
    processes: list[subprocess.Popen[bytes]] = []
    exits: dict[int, int] = {}
    signalled = None
    with _signals_into(events):
        try:
            for number, rank in enumerate(ranks):
                processes.append(_start(rank))
                threading.Thread(target=_await, args=(number, processes[-1], events), daemon=True).start()
            while len(exits) < len(processes) and signalled is None:
                ended, value = events.get()
                if ended is None:
                    signalled = value
                    continue
                exits[ended] = value
                if processes[ended].returncode:
                    break
        finally:
            # Ranks that fail after this point may fail because the launcher ends them.
            failed = {number: when for number, when in exits.items() if processes[number].returncode}
            _end(processes, events)
    if signalled == signal.SIGINT:
        raise KeyboardInterrupt
    if signalled is not None:
        sys.exit(128 + signalled)
    if failed:
        raise ShardioError(_describe_first(ranks, processes, failed, name))


def _start(rank: RankCommand) -> subprocess.Popen[bytes]:
    with rank.path.with_suffix(".err").open("wb") as errors:
        return subprocess.Popen(
            rank.command,
            env={**os.environ, **rank.environment},
            stdin=subprocess.DEVNULL,
            stdout=2,
            stderr=errors,
            start_new_session=True,
        )


def _await(number: int, process: subprocess.Popen[bytes], events: _Events) -> None:
    process.wait()
    events.put((number, time.time_ns()))


def _end(processes: Sequence[subprocess.Popen[bytes]], events: _Events) -> None:
    """End all processes and their child processes; after a second signal, kill them immediately."""
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        _send(process, signal.SIGTERM)
    while any(_send(process, 0) for process in processes) and time.monotonic() < deadline:
        with suppress(Empty):  # Poll, because processes started by ranks are not children of this one.
            if events.get(timeout=0.02)[0] is None:
                break
    for process in processes:
        _send(process, signal.SIGKILL)
        process.wait()


def _send(process: subprocess.Popen[bytes], number: int) -> bool:
    """Send a signal (0 for none) to a process's group, and return whether the group has processes."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):  # PermissionError on macOS if the last process has not been reaped.
        return False
    return True


def _describe_first(
    ranks: Sequence[RankCommand], processes: Sequence[subprocess.Popen[bytes]], exits: Mapping[int, int], name: str
) -> str:
    # A rank that fails because another rank failed may exit before that rank.
    paths = [rank.path.with_suffix(".failed") for rank in ranks]
    times = {number: int(path.read_text()) for number, path in enumerate(paths) if path.exists()}
    first = min({**exits, **times}.items(), key=lambda item: item[1])[0]
    code, errors = processes[first].returncode, ranks[first].path.with_suffix(".err").read_bytes()
    by_signal = code < 0 and first not in times
    how = f"was terminated by signal {-code} ({signal.strsignal(-code)})" if by_signal else "failed"
    text = errors[-SHOWN_BYTES:].decode(errors="replace").strip()
    cut = "… " if len(errors) > SHOWN_BYTES else ""
    return f"rank {first} of {name} {how}:\n{cut}{text or 'it wrote nothing to standard error'}"


@contextmanager
def _signals_into(events: _Events) -> Iterator[None]:
    """Put signals that would end this process into a queue. Do nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # Ignored signals stay ignored: nohup ignores SIGHUP.
    before = {number: signal.getsignal(number) for number in numbers if signal.getsignal(number) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, lambda caught, _frame: events.put((None, caught)))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
