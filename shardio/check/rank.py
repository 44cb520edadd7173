"""One rank of ``shardio check script.py:function``: ``python -m shardio.check.rank TARGET DIRECTORY EPOCHS KEY``."""

from __future__ import annotations

import sys

from shardio.check.processes import run_rank

if __name__ == "__main__":
    _, target, directory, epochs, key = sys.argv
    run_rank(target, directory, int(epochs), key or None)
