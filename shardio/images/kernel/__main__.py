"""``python -m shardio.images.kernel``: prepare the kernel now, for instance while building a container image.

If shardio was built without a kernel for this processor, this command compiles one. It also checks the kernel's pixels.
By default, the results are stored for the current user. With ``--system``, they are stored for all users of the machine
or the image, in a shared cache folder: ``/var/cache/shardio`` on Linux, which usually only root may write to.
"""

import argparse
import sys

from shardio.files import UntrustedError
from shardio.images.kernel.building import build
from shardio.images.kernel.cache_files import system_folder, user_folder
from shardio.images.kernel.finding import compiled_functions

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m shardio.images.kernel",
        description="Compile the JPEG kernel, if shardio was built without it, and check its pixels on this machine.",
    )
    parser.add_argument("--system", action="store_true", help="prepare it for all users of this machine or image")
    folder = system_folder() if parser.parse_args().system else user_folder()
    try:
        build(folder)
    except ImportError as error:
        sys.exit(f"error: shardio was built without a kernel for this processor, and compiling it needs numba: {error}")
    except (OSError, UntrustedError) as error:
        sys.exit(f"error: cannot write to {folder}: {error}")
    sys.stdout.write(f"the kernel is {compiled_functions().name}; the outcome of its check is in {folder}\n")
