"""``python -m shardio.images.kernel``: compile the kernel now, for instance while building a container image.

By default, the kernel is compiled for this user. With ``--system``, it is compiled for all users of the machine or the
image, into the cache folder that they share: ``/var/cache/shardio`` on Linux, which usually only root may write to.
"""

import argparse
import sys

from shardio.images.kernel.building import build
from shardio.images.kernel.loading import kernel_path, system_kernel_path
from shardio.images.trust import UntrustedError

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m shardio.images.kernel", description="Compile the JPEG kernel.")
    parser.add_argument(
        "--system", action="store_true", help="compile it for all users of this machine or container image"
    )
    is_for_all = parser.parse_args().system
    path = system_kernel_path() if is_for_all else kernel_path()
    try:
        sys.stdout.write(f"{build(path)}\n")
    except (OSError, UntrustedError) as error:
        sys.exit(f"error: cannot write {path}: {error}")
