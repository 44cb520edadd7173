"""The setup of worker processes as bytes, with people's own code in it.

What a worker process can import is sent by name. What it cannot import, because it was defined in the user's script or
notebook, or is a lambda or a closure, is sent by value, so the script does not run again.
"""

from __future__ import annotations

import pickle
from weakref import WeakKeyDictionary

from shardio.decoding import FieldDecoder
from shardio.errors import add_note
from shardio.interruptions import describe_error, let_through
from shardio.loader.failures import Failure, describe_failure
from shardio.loader.processes.messages import WorkerSetup

_obstacles: WeakKeyDictionary[FieldDecoder, str | None] = WeakKeyDictionary()


def dump_setup(setup: WorkerSetup) -> bytes:
    """Return a setup as bytes."""
    return _dump(setup) if setup.decoder.runs_user_code else pickle.dumps(setup, protocol=5)


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


def why_not_sendable(decoder: FieldDecoder) -> str | None:
    """Return why people's own code cannot be sent to worker processes; None if it can. Each decoder is tried once."""
    if not decoder.runs_user_code:
        return None
    if decoder not in _obstacles:
        _obstacles[decoder] = None
        try:
            _dump(decoder)
        except Exception as error:  # People's classes may raise anything.
            let_through(error)
            _obstacles[decoder] = f"the transform cannot be pickled ({describe_error(error)})"
    return _obstacles[decoder]


def _dump(value: object) -> bytes:
    import cloudpickle  # It takes 30 ms.

    content: bytes = cloudpickle.dumps(value, protocol=5)
    return content
