"""Open streams with WebDataset's opener, and read them so that a failure is never mistaken for the end.

WebDataset's own reader looks at the exit status only when a command has ended by the time of a read, ignores some
statuses, and waits for up to two hours for a command that does not end. So this module uses its way of starting
commands, and reads their output and their exit status itself.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import re
import select
import signal
import subprocess
import tempfile
from contextlib import suppress
from typing import IO, Any, Protocol

from shardio.interruptions import describe_error, let_through
from shardio.storage import Location, StoredFile, read_pieces

COMMAND = "pipe:"
"""What the name of a stream begins with if the rest is a command, whose output is the stream."""

KNOWN_SCHEMES = frozenset({"pipe", "http", "https", "gs", "htgs", "hf", "ais", "sftp", "ftps", "scp"})
"""The schemes that WebDataset opens. Users may register more."""

PIPE_BYTES = 2**20
"""The size to which a pipe is enlarged, so that a command goes on while samples are decoded."""

MAX_POLL_MS = 2**31 - 1
"""The longest time that the system can wait for bytes, in milliseconds."""

TERMINATION_S = 5.0
"""How long to wait, in seconds, for a command to end before it is killed."""

MAX_SAID = 400
"""How many characters of a command's error output a message contains."""


class StreamFailureError(Exception):
    """A stream failed. Opening it again may help.

    Args:
        cause: Why.
        is_permanent: Whether it would fail again.
    """

    def __init__(self, cause: str, *, is_permanent: bool = False) -> None:
        super().__init__(cause)
        self.is_permanent = is_permanent


class ByteStream(Protocol):
    """An open stream."""

    def read(self) -> bytes:
        """Return the next bytes, or none at the end.

        Raises:
            StreamFailureError: If the stream failed.
            OSError: If a stored object cannot be read.
        """

    def close(self) -> None:
        """Release everything that the stream uses, wherever it is."""


def is_opened_by_webdataset(name: str) -> bool:
    """Return whether WebDataset opens a stream, which is then no location of shardio's.

    Raises:
        ImportError: If WebDataset is not installed but needed.
    """
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):", name)
    if scheme is None or scheme[1] == "file" or name.startswith("hf://datasets/"):
        return False  # WebDataset would pass the Hub's token to curl as an argument, which other users see.
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
        return importlib.import_module("webdataset.gopen")  # The attribute of this name is a function.
    except ImportError as error:
        raise ImportError(
            f"streams of commands and of web servers are opened by the package webdataset ({error}): "
            "pip install 'shardio-loader[webdataset]'"
        ) from error


def open_stream(name: str, location: Location | None, timeout_s: float) -> ByteStream:
    """Open a stream.

    Args:
        name: What WebDataset opens.
        location: A stored tar to read instead; None if there is none.
        timeout_s: How long to wait for bytes of a command, in seconds.

    Raises:
        StreamFailureError: If it cannot be opened.
        OSError: If a stored object cannot be opened.
    """
    if location is not None:
        return ObjectStream(location.open())
    gopen = import_gopen()
    rewritten = gopen.rewrite_url(name)
    if rewritten.startswith(COMMAND) and not _refuses_commands(gopen):
        errors = tempfile.TemporaryFile()  # noqa: SIM115  # The stream closes it.
        try:
            # gopen() passes no settings on to the process. A session of its own makes all processes of the command
            # one group, which can be ended together.
            files: Any = {"stdin": subprocess.DEVNULL, "stderr": errors, "bufsize": 0}
            pipe = gopen.Pipe(rewritten[len(COMMAND) :], mode="rb", shell=True, start_new_session=True, **files)
            return CommandStream(pipe, timeout_s, errors)
        except BaseException:  # Ctrl-C must not leave the file open either.
            errors.close()
            raise
    try:
        file = gopen.gopen(name, "rb")
    except Exception as error:
        let_through(error)
        is_permanent = isinstance(error, FileNotFoundError | PermissionError | ImportError | ValueError)
        cause = describe_error(error)
        for secret in {name, rewritten}:  # Openers name what they cannot open.
            cause = cause.replace(secret, "the stream")
        # Without the error as its cause, whose text may contain a password or a token.
        raise StreamFailureError(cause, is_permanent=is_permanent) from None
    return CommandStream(file, timeout_s) if isinstance(file, gopen.Pipe) else FileStream(file)


def _refuses_commands(gopen: Any) -> bool:
    """Return whether WebDataset's security setting is on. Its opener then raises an error."""
    return bool(getattr(getattr(gopen, "utils", None), "enforce_security", False))


class CommandStream:
    """The output of a command.

    Args:
        pipe: WebDataset's Pipe.
        timeout_s: How long to wait for bytes, and for the command's end after the last one, in seconds.
        errors: The file that its error output goes to, if the command has a session of its own.
    """

    def __init__(self, pipe: Any, timeout_s: float, errors: IO[bytes] | None = None) -> None:
        self._pipe, self._timeout_s, self._errors = pipe, timeout_s, errors
        self._process: subprocess.Popen[bytes] = pipe.proc
        self._owner = os.getpid()
        self._descriptor: int = pipe.stream.fileno()
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        with suppress(OSError, AttributeError):  # Not more than the system allows, and only Linux can.
            fcntl.fcntl(self._descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def read(self) -> bytes:
        """Return the next bytes, or none after the command has ended with exit status 0."""
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
                f"the command closed its output, but has not ended for {self._timeout_s:g} s{self._describe_output()}"
            ) from None
        if status:
            how = f"was ended by signal {-status}" if status < 0 else f"ended with exit status {status}"
            is_permanent = status in (126, 127)  # The shell found no such program.
            raise StreamFailureError(f"the command {how}{self._describe_output()}", is_permanent=is_permanent)

    def _describe_output(self) -> str:
        """Return the end of the command's error output, for messages."""
        if self._errors is None:
            return ""
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 4 * MAX_SAID))
        said = " ".join(self._errors.read().decode(errors="replace").split())[-MAX_SAID:]
        return f" and said: {said}" if said else " and said nothing"

    def close(self) -> None:
        """Close the pipe, and end the command if it is still running. In a fork, only close the pipe."""
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
        """Send a signal to the command, and to the processes that it has started if they are a group of their own."""
        if self._errors is None:
            self._process.send_signal(number)
        else:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


class FileStream:
    """A file object, such as an opener returns that a user has registered with WebDataset."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def read(self) -> bytes:
        """Return the next bytes, or none at the end."""
        try:
            return bytes(self._file.read(PIPE_BYTES))
        except Exception as error:
            let_through(error)
            raise StreamFailureError(describe_error(error)) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class ObjectStream:
    """A stored object, read from its beginning to its end."""

    def __init__(self, file: StoredFile) -> None:
        self._file = file
        self._pieces = read_pieces(file)

    def read(self) -> bytes:
        """Return the next bytes, or none at the end."""
        return bytes(next(self._pieces, b""))

    def close(self) -> None:
        """Close the object."""
        self._file.close()
