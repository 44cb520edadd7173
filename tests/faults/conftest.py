"""Fixtures shared by the tests of faults."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardio
from shardio.loader.fork_server import end_kept
from tests.buffers import find_fork_servers
from tests.faults.worker_processes import KINDS, Data, Expected, batches_of, find_worker_processes, make_loader
from tests.sources import write_images


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    root = tmp_path_factory.mktemp("faults")
    write_images(root / "images", per_class=32, width=64, height=64)
    shardio.pack(root / "images", root / "shards", max_shard_samples=11)
    return Data(images=root / "images", shards=root / "shards")


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(Path(shardio.__file__).parents[1])]))
    return folder


@pytest.fixture(scope="module")
def expected(data: Data) -> Expected:
    found: Expected = {}
    for kind in KINDS:
        loader = make_loader(data, kind)
        found[kind] = [batches_of(loader), batches_of(loader)]
        assert found[kind][0] != found[kind][1]
        assert len(found[kind][0]) == 6
    return found


@pytest.fixture(scope="module", autouse=True)
def _loaders_of_other_tests_are_gone() -> None:
    gc.collect()  # Tracebacks of expected errors may keep loaders and their worker processes alive.
    end_kept()
    gc.freeze()  # Later garbage collections need not visit the existing objects.


@pytest.fixture
def no_worker_process_is_left() -> Iterator[None]:
    yield
    gc.collect()  # Tracebacks of expected errors may keep loaders alive.
    end_kept()
    assert find_worker_processes() == []
    assert find_fork_servers() == set()
