"""Name and read the files in a cache folder: functions compiled on this machine, and the outcomes of their checks."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from pathlib import Path

import PIL
import simplejpeg
import xxhash
from platformdirs import site_cache_path, user_cache_path

from shardio.files import UntrustedError, read_trusted, why_untrusted
from shardio.images.kernel.source import hash_source
from shardio.images.kernel.targets import describe_processor

_HASH_SIZE = 8


def user_folder() -> Path:
    """Return the path of this user's folder. The folder may not exist."""
    return user_cache_path("shardio") / "kernels"


def system_folder() -> Path:
    """Return the path of the folder that all users of a machine or container image share. It may not exist."""
    return site_cache_path("shardio") / "kernels"


def lock_path() -> Path:
    """Return the path of the file that a process locks while it compiles or checks functions for this user."""
    return user_folder() / f"{hash_source()}.lock"


def log_path() -> Path:
    """Return the path of the log of the background process that compiles or checks functions for this user."""
    return user_folder() / f"{hash_source()}.log"


@cache
def object_name() -> str:
    """Return the name of the object file for this processor. This loads LLVM."""
    from importlib.metadata import version

    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = (llvm.get_process_triple(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())
    made_by = repr((hash_source(), machine, version("numba"), version("llvmlite")))
    return f"{xxhash.xxh3_64_hexdigest(made_by.encode())}.kernel"


def pack(content: bytes) -> bytes:
    """Return the bytes of a cache file: a hash, and the content."""
    return xxhash.xxh3_64_digest(content) + content


def read_object(*folders: Path) -> bytes | None:
    """Return the object file for this processor, or None if there is no intact, trusted one.

    Args:
        folders: The folders to search; by default, the user's folder, then the folder for all users.
    """
    return _read(object_name(), folders)


@cache
def check_name(functions_name: str) -> str:
    """Return the name of the file that holds the outcome of checking the functions.

    It is a hash of everything that the outcome depends on: the functions, the processor and the reference libraries.
    """
    checked = repr((functions_name, describe_processor(), simplejpeg.__version__, PIL.__version__))
    return f"{xxhash.xxh3_64_hexdigest(checked.encode())}.check"


def read_check(functions_name: str, *folders: Path) -> str | None:
    """Return a description of how the functions' pixels differ on this machine; "" if they do not; None if unchecked.

    Args:
        functions_name: The functions' name.
        folders: The folders to search, as for :func:`read_object`.
    """
    found = _read(check_name(functions_name), folders)
    return None if found is None else found.decode()


def why_untrusted_file(name: str) -> str | None:
    """Return the reason why an existing cache file is not trusted; None if it is trusted or does not exist."""
    return why_untrusted(user_folder() / name) or why_untrusted(system_folder() / name)


def _read(name: str, folders: tuple[Path, ...]) -> bytes | None:
    for folder in folders or (user_folder(), system_folder()):
        with suppress(OSError, UntrustedError):
            content = read_trusted(folder / name)
            if content[:_HASH_SIZE] == xxhash.xxh3_64_digest(content[_HASH_SIZE:]):
                return content[_HASH_SIZE:]
    return None
