"""Fixtures that several tests share."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
import torch.utils.data
from filelock import FileLock

import shardio
from shardio.kernel.functions import Functions
from shardio.kernel.targets import FOLDER, find_targets
from shardio.storage import Location, parse_location
from shardio.storage.locations import OPENERS
from tests.servers.stores import (  # noqa: F401  # Fixtures.
    azurite_server,
    fake_gcs_server,
    fake_hub,
    nginx_server,
    seaweedfs_server,
)
from tests.sources import write_images

hypothesis.settings.register_profile("change", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.register_profile("campaign", deadline=None, max_examples=1000)


def pytest_configure(config: pytest.Config) -> None:
    """Choose the number of examples, and accept Ctrl-C even if a shell started pytest in the background."""
    hypothesis.settings.load_profile(config.getoption("--hypothesis-profile", None) or "change")
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for doctests only in the package, because the tests have none and searching them takes seconds."""
    return [collector for collector in (yield) if type(collector) is pytest.Module]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude imported and collected objects from garbage collection: gc.collect() in tests examines only the rest."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """Give all tests the same environment variables: if these change, fork servers do not serve user code."""
    os.environ["PYTEST_CURRENT_TEST"] = ""
    return (yield)


@pytest.fixture(scope="session", autouse=True)
def kernel() -> None:
    """Before any test, compile the kernel if its source has changed. Compiling takes half a minute."""
    if find_targets() and not find_targets()[0].path.exists():
        with FileLock(FOLDER / "built.lock"):
            subprocess.run([sys.executable, "tools/build_kernel.py"], cwd=Path(__file__).parents[1], check=True)


@pytest.fixture(params=find_targets(), ids=lambda target: target.name)
def functions(request: pytest.FixtureRequest) -> Functions:
    """The kernel's functions, in each build that this processor can run."""
    return Functions(request.param.path)


@pytest.fixture(scope="session", autouse=True)
def _torchs_loaders_end_soon() -> Iterator[None]:
    """Make torch wait less than its usual 5 s for workers that cannot end, and then terminate them.

    When the garbage collector frees an iterator that the traceback of an expected error has kept alive, it may close
    the workers' queues before the iterator ends the workers.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5)
        yield


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of 3 classes with 7 images each."""
    root = tmp_path_factory.mktemp("images")
    write_images(root)
    return root


@pytest.fixture(scope="session")
def packed(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The images, packed into shards of at most 5 samples."""
    out = tmp_path_factory.mktemp("packed")
    shardio.pack(images, out, max_shard_samples=5)
    return out


@pytest.fixture
def mirrored(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Location]:
    """Return a function that maps a local path to its location in a store of the kind that a user might add."""
    monkeypatch.setitem(OPENERS, "mirror", "tests.mirror_store:open_url")
    return lambda path: parse_location(f"mirror://{path}")
