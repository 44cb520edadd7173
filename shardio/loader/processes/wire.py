"""Messages between the training process and its other processes: Python values and open files over a socket pair.

A message is one packet: a pickle or, if that is long, the descriptor of anonymous memory that holds it. So a sender
never waits in the middle of a message. Both ends belong to this package: no other program can write to the pair.
"""

from __future__ import annotations

import errno
import os
import pickle
import select
import socket
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from shardio.loader.slots.memory import make_memory

MAX_INLINE = 8 * 1024
"""The largest pickle, in bytes, that is sent in the packet itself. A socket's buffer holds dozens of them."""

MAX_DESCRIPTORS = 2
"""The most descriptors in a packet: the pickle's and a slot's."""

CHECK_PARENT_S = 1.0
"""How often a process checks that its parent is alive, because another process may hold the other end open."""

_INLINE, _IN_MEMORY = b"\0", b"\1"


def make_pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a new pair."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, message: Any, descriptors: Sequence[int] = (), *, flags: int = 0) -> None:
    """Send a message.

    Args:
        end: The end to send from.
        message: Any value that can be pickled.
        descriptors: Open files to send along.
        flags: Flags for the system call, such as MSG_DONTWAIT.

    Raises:
        BlockingIOError: If the socket is full and this end does not wait.
        OSError: If the other end is closed.
    """
    content = pickle.dumps(message, protocol=5)
    if len(content) <= MAX_INLINE:
        _send(end, [_INLINE, content], descriptors, flags)
        return
    memory = make_memory(0)
    try:
        write_all(memory, content)
        _send(end, [_IN_MEMORY], [memory, *descriptors], flags)
    finally:
        os.close(memory)


def send_within(patience_s: float, end: socket.socket, message: Any, descriptors: Sequence[int] = ()) -> bool:
    """Send a message from an end that does not wait; return False if the other end has read nothing for too long.

    This call waits while the socket is full. It cannot deadlock, because the main threads of the fork server and of
    worker processes only read and never wait for room to write. Other threads may wait.

    Raises:
        OSError: If the other end is closed.
    """
    room = select.poll()
    room.register(end, select.POLLOUT)
    while True:
        with suppress(BlockingIOError):
            send(end, message, descriptors)
            return True
        if not room.poll(1000 * patience_s):
            return False


def receive_all(end: socket.socket, parent_id: int) -> Iterator[tuple[Any, list[int]]]:
    """Yield messages and the descriptors that came with them, until the other end is closed or the parent has ended."""
    poll = select.poll()
    poll.register(end, select.POLLIN)
    while True:
        if poll.poll(1000 * CHECK_PARENT_S):
            if (received := receive(end)) is None:
                return
            yield received
        elif os.getppid() != parent_id:
            return


def receive(end: socket.socket) -> tuple[Any, list[int]] | None:
    """Return the next message and the descriptors that came with it; None if the other end is closed.

    Raises:
        BlockingIOError: If there is no message and this end does not wait.
        OSError: If this process has no descriptors left.
    """
    descriptors = array("i")
    space = socket.CMSG_SPACE(MAX_DESCRIPTORS * descriptors.itemsize)
    try:
        packet, ancillary, flags, _ = end.recvmsg(1 + MAX_INLINE, space, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        # The other end was closed before it read everything. Linux reports this once, before the messages that it sent.
        packet, ancillary, flags, _ = end.recvmsg(1 + MAX_INLINE, space, socket.MSG_CMSG_CLOEXEC)
    if not packet:
        return None
    if flags & socket.MSG_CTRUNC:
        raise OSError(
            errno.EMFILE, "too many open files: no file descriptor is left for a batch. Raise the limit (ulimit -n)"
        )
    for _, _, content in ancillary:
        descriptors.frombytes(content)
    if packet[:1] == _INLINE:
        return pickle.loads(memoryview(packet)[1:]), list(descriptors)
    memory, *rest = descriptors
    try:
        return pickle.loads(_read_all(memory)), rest
    finally:
        os.close(memory)


def _send(end: socket.socket, parts: list[bytes], descriptors: Sequence[int], flags: int) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
    end.sendmsg(parts, rights, flags)


def write_all(descriptor: int, content: bytes) -> None:
    """Write bytes to a file."""
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]  # A single write of Linux takes at most 2 GiB.


def _read_all(descriptor: int) -> bytes | bytearray:
    size = os.fstat(descriptor).st_size
    content: bytes | bytearray = os.pread(descriptor, size, 0)
    while len(content) < size:
        content = bytearray(content) + os.pread(descriptor, size - len(content), len(content))
    return content
