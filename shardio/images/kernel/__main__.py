"""``python -m shardio.images.kernel``: compile the kernel now, for instance when a container's image is made."""

import sys

from shardio.images.kernel.building import build

if __name__ == "__main__":
    sys.stdout.write(f"{build()}\n")
