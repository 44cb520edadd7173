"""Collect the wheels that a machine with a GPU and no network lacks: see tools/gpu_wheels.sh."""

from __future__ import annotations

import argparse
import email
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import tomllib
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
TEST_PACKAGES = ("cuda-core", "hypothesis", "pytest", "pytest-timeout")
"""The packages, other than shardio's dependencies, that the tests on a GPU import."""

USUAL = ("numpy", "opencv-python-headless", "timm", "torch", "torchvision")
"""Large packages that machines with a GPU usually have."""

LIMIT_MIB = 60
"""The maximum total size of the wheels and the tracked files, in MiB."""

GLIBC_MINORS = (17, 24, 27, 28, 31, 34, 35)
"""The minor versions of glibc 2 whose manylinux platforms are searched for wheels. All are listed because pip accepts
wheels only for exactly the platforms it is given."""


def list_wanted() -> list[str]:
    """Return shardio's dependencies in pyproject.toml and the packages that the tests on a GPU import."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *TEST_PACKAGES]


def find_missing(
    wanted: Iterable[str],
    have: Collection[str],
    read_requirements: Callable[[Sequence[str]], Iterable[str]],
    python_version: str,
) -> set[str]:
    """Return the canonical names of the packages that are missing, among the wanted ones and their requirements.

    Args:
        wanted: Requirements, as in pyproject.toml.
        have: The canonical names of the machine's packages, whose requirements are ignored.
        read_requirements: A function that returns the requirements of packages, given their canonical names.
        python_version: The machine's Python, such as ``"3.12"``. The machine runs Linux on x86-64.
    """
    environment: dict[str, Any] = {
        **default_environment(),
        "os_name": "posix",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "python_version": python_version,
        "python_full_version": f"{python_version}.0",
        "extra": "",
    }
    missing, pending = set[str](), list(wanted)
    while pending:
        needed = [
            canonicalize_name(requirement.name)
            for requirement in map(Requirement, pending)
            if requirement.marker is None or requirement.marker.evaluate(environment)
        ]
        new = sorted(set(needed) - missing - set(have))
        missing.update(new)
        pending = list(read_requirements(new)) if new else []
    return missing


def download(names: Sequence[str], directory: Path, python_version: str) -> list[str]:
    """Download the wheels of packages without their requirements, and return these requirements."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS]
    run_pip(
        ["download", "--no-deps", "--only-binary", ":all:", "--constraint", "constraints.txt"],
        ["--python-version", python_version, "--dest", str(directory)],
        [part for platform in (*platforms, "manylinux2014_x86_64") for part in ("--platform", platform)],
        names,
    )
    return [
        requirement
        for wheel in directory.glob("*.whl")
        if canonicalize_name(wheel.name.partition("-")[0]) in names
        for requirement in read_metadata(wheel).get_all("Requires-Dist", [])
    ]


def read_metadata(wheel: Path) -> email.message.Message:
    """Return a wheel's metadata."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def run_pip(*arguments: Sequence[str]) -> None:
    """Run a pip command in the repository."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    environment = {**os.environ, "SHARDIO_PLATFORM": "manylinux_2_17_x86_64"}
    subprocess.run([*pip, *(part for each in arguments for part in each)], cwd=ROOT, env=environment, check=True)


def read_names(path: Path) -> set[str]:
    """Return the canonical names of the packages in a file: one per line, as ``pip freeze`` prints them."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return {canonicalize_name(Requirement(line).name) for line in lines if line}


def main() -> int:
    """Run the command. Return 1 if the wheels and the tracked files are too large, otherwise 0."""
    parser = argparse.ArgumentParser(prog="tools/gpu_wheels.sh", description=__doc__)
    parser.add_argument("directory", type=Path, help="where to write the wheels")
    parser.add_argument(
        "--have",
        type=Path,
        help=f"file with the machine's packages, one per line (default: {', '.join(USUAL)})",
    )
    parser.add_argument("--python-version", default="3.12", help="the machine's Python (default: 3.12)")
    given = parser.parse_args()
    directory = given.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    have = set(USUAL) if given.have is None else read_names(given.have)
    version: str = given.python_version
    missing = find_missing(list_wanted(), have, lambda names: download(names, directory, version), version)
    run_pip(["wheel", "--no-deps", "--wheel-dir", str(directory), "."])
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    tree = sum((ROOT / name).lstat().st_size for name in tracked.split("\0") if name)
    size = sum(wheel.stat().st_size for wheel in directory.glob("*.whl"))
    print(f"{directory}: {', '.join(sorted(missing))}, shardio-loader")
    print(f"{size / 2**20:.1f} MiB of wheels, {tree / 2**20:.1f} MiB of tracked files")
    if size + tree > LIMIT_MIB * 2**20:
        print(f"more than {LIMIT_MIB} MiB together: list more of the machine's packages in --have", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
