"""One rank of ``shardio check script.py:function``: ``python -m shardio.check.rank TARGET DIRECTORY EPOCHS KEY``."""

from __future__ import annotations

import sys
import time

from shardio.check.processes import note_failure, run_rank
from shardio.errors import IdentityError

if __name__ == "__main__":
    _, target, directory, epochs, key = sys.argv
    try:
        run_rank(target, directory, int(epochs), key or None)
    except BaseException as error:
        note_failure(directory, time.time_ns())
        if isinstance(error, IdentityError):
            sys.exit(str(error))
        raise
