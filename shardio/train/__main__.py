"""``python -m shardio.train`` is ``shardio train``: the form that torchrun starts."""

import sys

from shardio.cli.main import main

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    main()
