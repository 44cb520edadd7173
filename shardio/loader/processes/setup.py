"""The setup of worker processes as bytes, with people's own code in it.

What a worker process can import is sent by name. What it cannot import, because it was defined in the user's script or
notebook, or is a lambda or a closure, is sent by value, so the script does not run again.
"""

from __future__ import annotations

import pickle
import weakref
from functools import partial
from typing import Any

from shardio.errors import add_note
from shardio.interruptions import describe_error, let_through
from shardio.loader.failures import Failure, describe_failure
from shardio.loader.processes.messages import WorkerSetup

_obstacles: dict[int, tuple[weakref.ref[Any], str | None]] = {}
"""What was tried, by id: the objects need not be hashable."""


def dump_setup(setup: WorkerSetup) -> bytes:
    """Return a setup as bytes."""
    return _dump(setup) if setup.runs_user_code else pickle.dumps(setup, protocol=5)


def load_setup(content: bytes | bytearray) -> WorkerSetup | Failure:
    """Return the setup, or why it cannot be loaded in this process."""
    try:
        if b"torchvision" in content:
            from shardio.models import import_library

            import_library("torchvision")  # It may need the same help to be imported as in the training process.
        setup: WorkerSetup = pickle.loads(content)
        return setup
    except Exception as error:  # People's modules may raise anything.
        add_note(error, "while loading the dataset's transform in a worker process")
        return describe_failure(error)


def why_not_sendable(value: Any, what: str) -> str | None:
    """Return why people's own code cannot be sent to worker processes; None if it can. Each object is tried once.

    Args:
        value: A decoder with that code in it, or a callable of theirs.
        what: What to call it in the answer.
    """
    known = _obstacles.get(id(value))
    if known is None or known[0]() is not value:
        reason = None
        try:
            _dump(value)
        except Exception as error:  # People's classes may raise anything.
            let_through(error)
            reason = f"the {what} cannot be pickled ({describe_error(error)})"
        try:
            known = weakref.ref(value, partial(_forget, id(value))), reason
        except TypeError:  # A few kinds of objects, such as methods of C code, cannot be remembered.
            return reason
        _obstacles[id(value)] = known
    return known[1]


def _forget(key: int, _: object) -> None:
    _obstacles.pop(key, None)


def _dump(value: object) -> bytes:
    import cloudpickle  # It takes 30 ms.

    content: bytes = cloudpickle.dumps(value, protocol=5)
    return content
