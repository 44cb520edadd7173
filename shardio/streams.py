"""Read shards sequentially from streams, such as the output of commands.

WebDataset's own reader ignores some exit statuses, and does not check the status of a command that has not yet ended
when its output has been read. The reader also waits up to two hours for a command that does not end. So this module
starts commands as WebDataset does, but reads their output and exit status itself.
"""

from __future__ import annotations

import fcntl
import importlib
import itertools
import os
import random
import re
import select
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import dropwhile
from typing import IO, Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

from shardio.errors import FormatError, StateError, StoreError
from shardio.process import describe_error, let_through
from shardio.shards.tar_scan import IncompleteTarError, StreamedSample, StreamedTar
from shardio.storage import Location, ReplacedError, find_url, make_path, parse_location, read_pieces
from shardio.values import count

COMMAND = "pipe:"
"""The prefix of a stream's name if the stream is the output of a command."""

KNOWN_SCHEMES = frozenset({"pipe", "http", "https", "gs", "htgs", "hf", "ais", "sftp", "ftps", "scp"})
"""The URL schemes that WebDataset opens. Users may register more."""

PIPE_BYTES = 2**20
"""The size of an enlarged pipe, in bytes. A large pipe allows a command to continue while samples are decoded."""

MAX_POLL_MS = 2**31 - 1
"""The longest wait for bytes, in milliseconds, that the operating system supports."""

TERMINATION_S = 5.0
"""The time limit, in seconds, for a terminated command to exit before it is killed."""

MAX_SAID = 400
"""The maximum number of characters of a command's error output in a message."""

StreamNames = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A command, URL or path of a tar, a brace pattern of such names, or a list of names."""

_TAR = re.compile(r"[^\s/\\'\"=?&:;|<>()]+\.(?:tar\.[a-z0-9]+|tar|tgz)\b", re.IGNORECASE)
"""The name of a tar in a command."""

FIRST_WAIT_S = 0.1
"""The upper bound of the first wait before a stream is opened again. The bound doubles with each wait."""

MAX_WAIT_S = 20.0
"""The maximum wait, in seconds, before a stream is opened again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSource:
    """The source of a stream.

    Attributes:
        name: The name to pass to WebDataset. The name is not shown, because it may contain passwords or tokens.
        shown: The name in messages and states: only the program and the tar of a command, or a URL without its query.
        location: The location of a stored tar, which can be read without WebDataset; None for other streams.
    """

    name: str = field(repr=False)
    shown: str
    location: Location | None = None

    def __str__(self) -> str:
        return self.shown


def find_streams(source: StreamNames) -> tuple[StreamSource, ...]:
    """Return the streams that ``source`` names.

    Raises:
        FileNotFoundError: If a local tar does not exist.
        FormatError: If a stream is named twice.
        ImportError: If a stream needs WebDataset, but it is not installed.
        LocationError: If a URL is not supported.
        ValueError: If no stream is named, or the braces of a pattern do not match.
    """
    patterns = [source] if isinstance(source, str | os.PathLike) else list(source)
    names = [name for pattern in patterns for name in _expand(os.fspath(pattern))]
    if not names:
        raise ValueError("the list of streams is empty: name at least one")
    if len(set(names)) < len(names):
        index = next(index for index, name in enumerate(names) if name in names[:index])
        raise FormatError(
            f"{_describe(names[index], index)} is named twice, so each of its samples would be delivered twice: name "
            "it once"
        )
    streams = tuple(_make_source(name, index) for index, name in enumerate(names))
    local = [each.location for each in streams if each.location is not None and each.location.store.is_local]
    if folders := [str(location) for location in local if location.is_folder()]:
        raise FileNotFoundError(f"{folders[0]} is a directory: name its tars, such as {folders[0]}/{{000..099}}.tar")
    if missing := [str(location) for location in local if not location.exists()]:
        raise FileNotFoundError(f"no such tar: {', '.join(missing[:5])}")
    return streams


def _expand(pattern: str) -> list[str]:
    from braceexpand import braceexpand

    if "{" not in pattern or (not pattern.startswith(COMMAND) and make_path(pattern).exists()):
        return [pattern]
    # Protect backslashes, which braceexpand removes, and ${…}, which the shell expands.
    escaped = re.sub(r"\\(?![{},])", r"\\\\", pattern)
    escaped = re.sub(r"\$\{([^{}]*)\}", r"$\\{\1\\}", escaped)
    try:
        return list(braceexpand(escaped))
    except ValueError:
        raise ValueError(
            f"the braces in the name of a stream, {_describe(pattern, 0)}, do not match: write \\{{ and \\}} for "
            "braces that do not form a pattern"
        ) from None


def _make_source(name: str, index: int) -> StreamSource:
    shown = _describe(name, index)
    if is_opened_by_webdataset(name):
        return StreamSource(name=name, shown=shown)
    if name.startswith("file:"):
        name = url2pathname(urlsplit(name).path)
    location = parse_location(name)
    return StreamSource(name=name, shown=str(location), location=location)


def _describe(name: str, index: int) -> str:
    """Return a name without parts that may be secret."""
    if not name.startswith(COMMAND):
        return re.sub(r"//.*@", "//", re.split(r"[?#]", name)[0]) if find_url(name) else name
    try:
        words = shlex.split(name[len(COMMAND) :])
    except ValueError:  # Unmatched quotes: the shell rejects the command.
        words = []
    words = list(dropwhile(lambda word: "=" in word, words))  # Environment variables.
    tars = _TAR.findall(name)
    return " ".join([f"stream {index} ({COMMAND}{words[0] if words else ''}", "…", *tars[-1:]]) + ")"


def is_opened_by_webdataset(name: str) -> bool:
    """Return whether WebDataset, rather than one of shardio's stores, opens a stream.

    Raises:
        ImportError: If the stream needs WebDataset, but it is not installed.
    """
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):", name)
    if scheme is None or scheme[1] == "file" or name.startswith("hf://datasets/"):
        return False  # WebDataset would pass the Hub's token to curl as an argument that other users can see.
    try:
        return scheme[1] in import_gopen().gopen_schemes
    except ImportError:
        if scheme[1] in KNOWN_SCHEMES:
            raise
        return False


def import_gopen() -> Any:
    """Return WebDataset's module ``gopen``.

    Raises:
        ImportError: If WebDataset is not installed.
    """
    try:
        return importlib.import_module("webdataset.gopen")  # webdataset.gopen is also the name of a function.
    except ImportError as error:
        raise ImportError(
            f"streams from commands and web servers need the package webdataset ({error}): "
            "pip install 'shardio-loader[webdataset]'"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlace:
    """The place in a stream after a number of samples.

    Attributes:
        num_samples: The number of samples.
        digest: The digest of the last sample before the place: see :class:`StreamedSample`.
    """

    num_samples: int = 0
    digest: int = 0


_BEGINNING = StreamPlace()


class ShardStream:
    """A reader of a stream's samples.

    If the stream fails, it is opened again, and the samples that have already been returned are skipped. So each sample
    is returned exactly once. Streams of stored tars are not opened again, because stores retry requests themselves.

    Args:
        source: The source of the stream.
        fields: The fields whose contents are needed.
        start: The place at which to begin.
        retries: The maximum number of consecutive attempts to reopen the stream without getting another sample.
        timeout_s: The maximum wait for bytes from a command, in seconds.

    Attributes:
        place: The place after the last sample that was returned.
    """

    def __init__(
        self,
        source: StreamSource,
        fields: Collection[str],
        start: StreamPlace = _BEGINNING,
        *,
        retries: int,
        timeout_s: float,
    ) -> None:
        self.place = start
        self._source, self._fields, self._start = source, fields, start
        self._retries, self._timeout_s = retries, timeout_s
        self._last_key: str | None = None
        self._stream: ByteStream | None = None
        self._tar: StreamedTar | None = None
        self._samples: Iterator[StreamedSample] = iter(())

    def next(self) -> StreamedSample | None:
        """Return the next sample, or None after the last sample.

        Raises:
            StoreError: If the stream keeps failing.
            FormatError: If the stream is not a tar of samples, or keeps ending too early.
            ReplacedError: If the stream's samples differ when it is opened again.
            StateError: If the stream's samples before ``start`` are not those of the saved state.
            OSError: If a stored tar cannot be read.
        """
        for number in itertools.count(1):
            try:
                return self._next()
            except (StreamFailureError, IncompleteTarError) as error:
                may_end = isinstance(error, IncompleteTarError) or not error.is_permanent
                if self._source.location is not None or not may_end or number > self._retries:
                    raise self._give_up(error, number) from error
            # Random waits spread the retries of many ranks whose streams failed at the same time.
            time.sleep(random.uniform(0, min(MAX_WAIT_S, FIRST_WAIT_S * 2 ** min(number - 1, 30))))
        raise AssertionError("the loop returns or raises")

    def _next(self) -> StreamedSample | None:
        try:
            if self._stream is None:
                self._open()
            sample = next(self._samples, None)
        except BaseException:  # Ctrl-C must not leave a command running.
            self.close()
            raise
        if sample is None:
            self.close()
        else:
            self.place = StreamPlace(num_samples=self.place.num_samples + 1, digest=sample.digest)
            self._last_key = sample.key
        return sample

    def _open(self) -> None:
        stream = self._stream = open_stream(self._source.name, self._source.location, self._timeout_s)
        self._tar = StreamedTar(self._source.shown, stream.read, self._fields)
        self._samples = self._tar.samples()
        num_samples, last = self.place.num_samples, None
        for last in itertools.islice(self._samples, num_samples):  # noqa: B007  # the last one
            num_samples -= 1
        if num_samples or (last is not None and last.digest != self.place.digest):
            raise self._other_samples()

    def _other_samples(self) -> FormatError | StateError:
        num_samples = self.place.num_samples
        if self.place == self._start:
            return StateError(
                f"{self._source} does not begin with the same {count(num_samples, 'sample')} as when the state was "
                "saved: restore the tar, or start a new run"
            )
        return ReplacedError(
            f"{self._source} failed and was opened again, but does not begin with the same "
            f"{count(num_samples, 'sample')} as before: the tar was replaced, or the command's output varies. Make "
            "sure that neither changes during a run, and start the epoch again"
        )

    def _give_up(self, error: Exception, num_attempts: int) -> StoreError | FormatError:
        num_samples, num_bytes = self.place.num_samples, 0 if self._tar is None else self._tar.num_bytes
        after = f"after its first {count(num_samples, 'sample')}" if num_samples else "from its beginning"
        if self._last_key is not None:
            after += f", the last of them {self._last_key}"
        attempts = "" if self._source.location is not None else f", at attempt {num_attempts}"
        where = f"cannot read {self._source} {after} (near byte {num_bytes}{attempts}): {error}"
        if isinstance(error, IncompleteTarError):
            return FormatError(f"{where}. Download or create it again")
        return StoreError(f"{where}. Check the command, the network and the server, then resume from the last state")

    def close(self) -> None:
        """Close the stream, and end its command."""
        stream, self._stream = self._stream, None
        self._samples = iter(())
        if stream is not None:
            stream.close()


def open_stream(name: str, location: Location | None, timeout_s: float) -> ByteStream:
    """Open a stream.

    Args:
        name: The name to pass to WebDataset.
        location: A stored tar to read instead, or None to open the stream ``name``.
        timeout_s: The maximum wait for bytes from a command, in seconds.

    Raises:
        StreamFailureError: If the stream cannot be opened.
        OSError: If a stored object cannot be opened.
    """
    if location is not None:
        stored = location.open()
        pieces = read_pieces(stored)
        return ByteStream(lambda: bytes(next(pieces, b"")), stored.close)
    gopen = import_gopen()
    rewritten = gopen.rewrite_url(name)
    # If WebDataset's security setting is on, its opener raises an error.
    if rewritten.startswith(COMMAND) and not getattr(getattr(gopen, "utils", None), "enforce_security", False):
        errors = tempfile.TemporaryFile()  # noqa: SIM115  # The stream closes it.
        try:
            # gopen() passes no options to Popen. In a session of their own, the command's processes form one group,
            # which can be ended as a whole.
            files: Any = {"stdin": subprocess.DEVNULL, "stderr": errors, "bufsize": 0}
            pipe = gopen.Pipe(rewritten[len(COMMAND) :], mode="rb", shell=True, start_new_session=True, **files)
            command = CommandStream(pipe, timeout_s, errors)
            return ByteStream(command.read, command.close)
        except BaseException:  # Ctrl-C must not leave the file open.
            errors.close()
            raise
    try:
        file = gopen.gopen(name, "rb")
    except Exception as error:
        let_through(error)
        is_permanent = isinstance(error, FileNotFoundError | PermissionError | ImportError | ValueError)
        cause = describe_error(error)
        for secret in {name, rewritten}:  # Errors may contain the stream's name.
            cause = cause.replace(secret, "the stream")
        # The error is not set as the cause, because its text may contain a password or a token.
        raise StreamFailureError(cause, is_permanent=is_permanent) from None
    if isinstance(file, gopen.Pipe):
        command = CommandStream(file, timeout_s)
        return ByteStream(command.read, command.close)
    return ByteStream(lambda: _read_some(file), file.close)


def _read_some(file: Any) -> bytes:
    """Read from a file object, such as one from an opener that a user has registered with WebDataset."""
    try:
        return bytes(file.read(PIPE_BYTES))
    except Exception as error:
        let_through(error)
        raise StreamFailureError(describe_error(error)) from error


class StreamFailureError(Exception):
    """The error for a stream that failed. Opening the stream again may help.

    Args:
        cause: The cause, as text.
        is_permanent: Whether the stream would fail again if it were reopened.
    """

    def __init__(self, cause: str, *, is_permanent: bool = False) -> None:
        super().__init__(cause)
        self.is_permanent = is_permanent


class ByteStream(NamedTuple):
    """An open stream.

    Attributes:
        read: A function that returns the next bytes, or ``b""`` at the end. The function raises StreamFailureError if
            the stream failed, and OSError if a stored object cannot be read.
        close: A function that releases all resources of the stream, and can be called at any time.
    """

    read: Callable[[], bytes]
    close: Callable[[], object]


class CommandStream:
    """The output of a command.

    Args:
        pipe: WebDataset's Pipe.
        timeout_s: The maximum wait in seconds for bytes or, after the last byte, for the end of the command.
        errors: The file for the command's error output, if the command has a session of its own.
    """

    def __init__(self, pipe: Any, timeout_s: float, errors: IO[bytes] | None = None) -> None:
        self._pipe, self._timeout_s, self._errors = pipe, timeout_s, errors
        self._process: subprocess.Popen[bytes] = pipe.proc
        self._owner = os.getpid()
        self._descriptor: int = pipe.stream.fileno()
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        with suppress(OSError, AttributeError):  # The system may refuse the size, and only Linux supports F_SETPIPE_SZ.
            fcntl.fcntl(self._descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def read(self) -> bytes:
        """Return the next bytes, or ``b""`` after the command has ended with exit status 0."""
        if not self._poll.poll(min(self._timeout_s * 1000, MAX_POLL_MS)):
            raise StreamFailureError(f"no bytes arrived for {self._timeout_s:g} s{self._describe_output()}")
        content = os.read(self._descriptor, PIPE_BYTES)
        if not content:
            self._check_status()
        return content

    def _check_status(self) -> None:
        try:
            status = self._process.wait(self._timeout_s)
        except subprocess.TimeoutExpired:
            raise StreamFailureError(
                f"the command closed its output, but did not end within {self._timeout_s:g} s{self._describe_output()}"
            ) from None
        if status:
            how = f"was ended by signal {-status}" if status < 0 else f"ended with exit status {status}"
            is_permanent = status in (126, 127)  # The shell cannot find or run the program.
            raise StreamFailureError(f"the command {how}{self._describe_output()}", is_permanent=is_permanent)

    def _describe_output(self) -> str:
        if self._errors is None:
            return ""
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 4 * MAX_SAID))
        said = " ".join(self._errors.read().decode(errors="replace").split())[-MAX_SAID:]
        return f" and printed: {said}" if said else " and printed no errors"

    def close(self) -> None:
        """Close the pipe, and end the command if it is still running. In a forked child, only close the pipe."""
        self._pipe.stream.close()
        if self._process.returncode is None and self._owner == os.getpid():
            self._signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(TERMINATION_S)
            self._signal(signal.SIGKILL)  # The shell may have ended before the processes that it started.
            self._process.wait()
        if self._errors is not None:
            self._errors.close()

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the command and, if it has its own group, to the processes that it has started."""
        if self._errors is None:
            self._process.send_signal(number)
        else:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
