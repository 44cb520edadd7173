"""List the processors for which wheels contain compiled functions, and find those that match this machine."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

_V2 = frozenset({"cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}

TARGETS: dict[str, dict[str, frozenset[str]]] = {
    "x86_64": {"x86-64-v4": _V4, "x86-64-v3": _V3, "x86-64-v2": _V2},
    "aarch64": {"aarch64": frozenset()},
}
"""The targets for each machine type, fastest first, and the processor flags that each of them needs.

The levels of x86-64 are defined in its ABI (x86-64 psABI, table 3.1: Micro-Architecture Levels).
"""

_CPUINFO = Path("/proc/cpuinfo")
_VARYING = ("processor", "cpu mhz", "core id", "apicid", "initial apicid", "physical id", "siblings", "bogomips")


def find_targets() -> list[str]:
    """Return the names of the targets whose code this processor can run, fastest first.

    On x86-64, there are none if Linux does not list the processor's flags.
    """
    words = {*_read_cpuinfo().get("flags", "").split(), *_read_cpuinfo().get("features", "").split()}
    return [name for name, flags in TARGETS.get(platform.machine(), {}).items() if flags <= words]


def describe_processor() -> str:
    """Return text that is identical on machines with equal processors."""
    return repr((platform.machine(), sorted(_read_cpuinfo().items())))


@cache
def _read_cpuinfo() -> dict[str, str]:
    """Return the first processor's entry in /proc/cpuinfo, without values that differ between equal processors."""
    found: dict[str, str] = {}
    try:
        with _CPUINFO.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, colon, value = line.partition(":")
                if not colon:
                    break  # The next processor follows.
                found[name.strip().lower()] = value.strip()
    except OSError:
        return {}
    return {name: value for name, value in found.items() if name not in _VARYING}
