"""List the processors for which the kernel is compiled, and find those that match this machine."""

from __future__ import annotations

import hashlib
import platform
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
"""The folder of the source. Its subfolder ``built/`` contains the shared objects."""

_V2 = frozenset({"cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
_VBMI = _V4 | {"avx512_vbmi2", "avx512_vnni", "avx512vbmi"}

_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of processor.

    Attributes:
        name: The target's name, which is part of the shared object's name.
        triple: The compiler's name for the platform.
        processor: The compiler's name for the instruction set.
        flags: The processor flags, as in /proc/cpuinfo, that the code needs.
    """

    name: str
    triple: str
    processor: str
    flags: frozenset[str] = frozenset()

    @property
    def path(self) -> Path:
        """The path of the shared object."""
        return FOLDER / "built" / f"{self.name}-{hash_source()}.so"


_LINUX = "x86_64-linux-gnu.2.17"

PLATFORMS: dict[str, tuple[Target, ...]] = {
    "manylinux_2_17_x86_64": (
        Target("x86-64-v4-vbmi2", _LINUX, "x86_64_v4+avx512vbmi+avx512vbmi2+avx512vnni", _VBMI),
        Target("x86-64-v4", _LINUX, "x86_64_v4", _V4),
        Target("x86-64-v3", _LINUX, "x86_64_v3", _V3),
        Target("x86-64-v2", _LINUX, "x86_64_v2", _V2),
    ),
    "manylinux_2_17_aarch64": (Target("aarch64", "aarch64-linux-gnu.2.17", "generic"),),
    "macosx_11_0_arm64": (Target("macos-arm64", "aarch64-macos.11.0", "apple_m1"),),
    "macosx_11_0_x86_64": (Target("macos-x86-64", "x86_64-macos.11.0", "x86_64_v2"),),
}
"""The targets of each platform, fastest first, by the platform's tag in wheel names.

The levels of x86-64 are defined in its ABI (x86-64 psABI, table 3.1: Micro-Architecture Levels). Ice Lake, Zen 4 and
later processors have VBMI2.
"""


CAPABILITIES = ((8, 0), (9, 0), (10, 0), (12, 0))
"""The compute capabilities of CUDA devices for which the stages (stages.h) are compiled. Devices with a higher minor
version run the same code.
"""


_ORIN = (8, 7)
"""The compute capability of Jetson Orin, which does not run the code for other devices."""


def list_source() -> list[Path]:
    """Return the files of the kernel's source."""
    return sorted(path for suffix in ("c", "h", "cu") for path in FOLDER.glob(f"*.{suffix}"))


def name_cubin(capability: tuple[int, int]) -> Path:
    """Return the path of the stages that are compiled for the given compute capability."""
    major, minor = capability
    return FOLDER / "built" / f"sm-{major}{minor}-{hash_source()}.cubin"


def find_cubin(capability: tuple[int, int]) -> Path:
    """Return the path of the stages for CUDA devices with the given compute capability.

    Raises:
        ImportError: If shardio was built without these stages.
    """
    fitting = [each for each in CAPABILITIES if each[0] == capability[0] and each <= capability]
    if capability == _ORIN or not fitting or not (path := name_cubin(max(fitting))).exists():
        major, minor = capability
        raise ImportError(
            f"shardio was built without code for CUDA devices of compute capability {major}.{minor}, which "
            "decode='device' needs: install a wheel for Linux, or omit decode"
        )
    return path


@cache
def hash_source() -> str:
    """Return a hash of the source, in hexadecimal."""
    hasher = hashlib.blake2b(digest_size=8)
    for path in list_source():
        hasher.update(path.read_bytes())
    return hasher.hexdigest()


def find_platform() -> str | None:
    """Return the tag of this machine's platform, or None if the kernel is not compiled for it."""
    if sys.maxsize < 2**32 or (platform.system() == "Linux" and platform.libc_ver()[0] != "glibc"):
        return None  # A 32-bit process, or a different C library, such as Alpine's.
    machines = {
        ("Linux", "x86_64"): "manylinux_2_17_x86_64",
        ("Linux", "aarch64"): "manylinux_2_17_aarch64",
        ("Darwin", "arm64"): "macosx_11_0_arm64",
        ("Darwin", "x86_64"): "macosx_11_0_x86_64",
    }
    return machines.get((platform.system(), platform.machine()))


def find_targets() -> list[Target]:
    """Return the targets whose code this processor can run, fastest first."""
    targets = PLATFORMS.get(find_platform() or "", ())
    return [target for target in targets if not target.flags or target.flags <= _read_flags()]


@cache
def _read_flags() -> frozenset[str]:
    """Return the flags of the first processor in /proc/cpuinfo, or an empty set if the file cannot be read."""
    try:
        with _CPUINFO.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() == "flags":
                    return frozenset(value.split())
    except OSError:
        pass
    return frozenset()
