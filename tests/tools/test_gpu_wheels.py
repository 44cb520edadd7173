"""The wheels for a GPU machine include every package that the machine lacks, so the checks can run there."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tools.gpu_check import CUDA_TESTS, ROOT

if sys.version_info < (3, 11):
    pytest.skip("tools/gpu_wheels.sh needs Python 3.11 or newer", allow_module_level=True)

from tools.gpu_wheels import find_missing, list_wanted, read_names

HAVE = "torch torchvision timm transformers opencv-python-headless pillow numba hypothesis pytest"

COLLECT = '''
import importlib.metadata, json, re, sys
allowed, tests = json.loads(sys.argv[1]), sys.argv[2:]
providers = importlib.metadata.packages_distributions()

class OnlyAllowed:
    """Finds what the finders find, if no distribution has it or an allowed one does."""
    finders = list(sys.meta_path)
    def find_spec(self, name, path=None, target=None):
        names = {re.sub("[-_.]+", "-", one).lower() for one in providers.get(name, ())}
        if not names or names & set(allowed):
            return next(filter(None, (finder.find_spec(name, path, target) for finder in self.finders)), None)

sys.meta_path[:] = [OnlyAllowed()]
import pytest, shardio, tools.gpu_facts, benchmarks.bench_device
shardio.ShardDataset, shardio.DataLoader, shardio.pack, shardio.train
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "-p", "pytest_timeout", "-m", "cuda", *tests]))
'''


def read_installed(names: Sequence[str]) -> Iterable[str]:
    installed = {str(canonicalize_name(each.name)): each for each in importlib.metadata.distributions()}
    # CUDA's packages are not installed if torch is a CPU-only build.
    return [line for name in names if name in installed for line in installed[name].requires or ()]


@pytest.mark.slow
def test_what_is_carried_and_what_the_machine_has_suffice_for_all_checks(tmp_path: Path) -> None:
    machine = find_missing(HAVE.split(), (), read_installed, "3.12")
    carried = find_missing(list_wanted(), machine, read_installed, "3.12")
    assert {"obstore", "simplejpeg", "pytest-timeout"} <= carried
    assert not carried & machine
    command = [sys.executable, "-c", COLLECT, json.dumps(sorted({*machine, *carried, "shardio-loader"})), *CUDA_TESTS]
    environment = {"PATH": "/usr/bin:/bin", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"{path}::" in done.stdout for path in CUDA_TESTS)


@pytest.mark.slow
def test_a_package_that_the_machine_has_is_left_to_it() -> None:
    everything = find_missing(list_wanted(), (), read_installed, "3.12")
    for package in ("xxhash", "obstore", "pydantic"):
        without = find_missing(list_wanted(), {package}, read_installed, "3.12")
        assert package in everything - without
        assert without <= everything


def test_a_list_of_packages_may_come_from_pip(tmp_path: Path) -> None:
    (path := tmp_path / "have.txt").write_text("torch==2.11.0+cu130\n# a comment\n\nPy_YAML\nnumpy # as well\n")
    assert read_names(path) == {"torch", "py-yaml", "numpy"}
