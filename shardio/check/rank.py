"""One rank of ``shardio check script.py:function``: ``python -m shardio.check.rank TARGET DIRECTORY EPOCHS KEY``."""

from __future__ import annotations

import os
import sys
import time
import traceback

from shardio.check.ranks import record_failure, run_rank
from shardio.errors import IdentityError

if __name__ == "__main__":
    _, target, directory, epochs, key = sys.argv
    code = 0
    try:
        run_rank(target, directory, int(epochs), key or None)
    except BaseException as error:
        record_failure(directory, time.time_ns())
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
