"""Loaders of scripts: ``shardio check script.py:function`` judges them in all ranks, by their own remainder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from shardio import IdentityError
from tests.check.conftest import RunCheck
from tests.processes import run_python

SCRIPT = """
import sys
import threading
import torch.distributed
from torch.utils.data import DataLoader, DistributedSampler

def unsplit():
    return DataLoader(list(range(60)), batch_size=8, shuffle=True, num_workers=1)

def split():
    sys.stderr.write("x" * 200_000)  # More than a pipe holds.
    sys.stderr.flush()
    threading.Thread(target=threading.Event().wait).start()  # It never ends.
    torch.distributed.init_process_group("gloo")
    dataset = [{"id": i, "half": i // 2} for i in range(60)]
    return DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset), num_workers=1)

class Augmented:
    def __len__(self):
        return 60

    def __getitem__(self, index):
        return torch.rand(3) + index

class Twice(DataLoader):
    def __iter__(self):
        yield from super().__iter__()
        yield from super().__iter__()

def twice():
    return Twice(Augmented(), batch_size=8)

def augmented():
    return DataLoader(Augmented(), batch_size=8)

def nothing():
    pass
"""

WITHOUT_TORCH = """
import os
import threading

def failing():
    if os.environ["RANK"] == "1":
        raise RuntimeError("no data on this rank")
    threading.Event().wait()  # As ranks wait for each other.
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "loaders.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.slow
def test_real_ranks_are_judged_though_they_write_much_and_leave_threads_behind(script: Path) -> None:
    done = run_python(
        "-m", "shardio", "check", f"{script}:split", "--world-size", 2, "--epochs", 2, "--expected", 60, "--key", "id"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "epoch 1: right: 60 samples: 60 delivered once" in done.stdout
    assert "rank 1 worker 0: 30 samples" in done.stdout


def test_a_failure_ends_real_ranks_that_wait_for_it_and_is_shown(tmp_path: Path) -> None:
    script = tmp_path / "without_torch.py"
    script.write_text(WITHOUT_TORCH)
    done = run_python("-m", "shardio", "check", f"{script}:failing", "--world-size", 2)
    assert done.returncode == 1
    assert re.match(r"error: rank 1 of .*:failing failed:\n", done.stderr)
    assert "RuntimeError: no data on this rank" in done.stderr


def test_a_loader_without_a_split_is_wrong(script: Path, run_check: RunCheck) -> None:
    done = run_check(f"{script}:unsplit", "--world-size", 2, "--expected", 60)
    assert done.exit_code == 1
    assert "ranks 0 and 1 delivered the same 60 samples: the loader has no DistributedSampler" in done.output


def test_augmented_images_are_counted_and_need_keys(script: Path, run_check: RunCheck) -> None:
    twice = run_check(f"{script}:twice", "--expected", 60)
    assert twice.exit_code == 1
    assert "WRONG: 60 samples: 120 delivered once, 0 more than once, 0 never, 60 unexpected" in twice.output
    once = run_check(f"{script}:augmented", "--expected", 60)
    assert isinstance(once.exception, IdentityError)
    assert "sample 0 differs when it is read again. To identify samples, pass key=" in str(once.exception)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("loaders.py:missing", ValueError, "has no function 'missing'"),
        ("loaders.py:nothing", IdentityError, "nothing must return a loader or another iterable of batches, got None"),
    ],
)
def test_a_function_must_exist_and_return_a_loader(
    script: Path, run_check: RunCheck, name: str, error: type[Exception], message: str
) -> None:
    done = run_check(script.parent / name)
    assert isinstance(done.exception, error)
    assert message in str(done.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py:make"], "does not exist"),
        (["{packed}", "--key", "label"], "only a script's batches need it"),
        (["--merge", "rank-00000.cov", "--key", "label"], "only a script's batches need it"),
        (["{packed}", "--expected", 5], "applies only to a script"),  # The dataset itself says what is expected.
    ],
)
def test_wrong_usage_is_refused(packed: Path, run_check: RunCheck, arguments: list[Any], message: str) -> None:
    done = run_check(*(packed if argument == "{packed}" else argument for argument in arguments))
    assert done.exit_code == 2
    assert message.replace(" ", "") in re.sub(r"[\s│]+", "", done.output)


SHARDIO = """
import shardio

def make(map_style=False, drop_last=False, num_workers=0, key="key", **options):
    loading = dict(batch_size=4, num_workers=num_workers, drop_last=drop_last)
    if not map_style:
        dataset = shardio.ShardDataset({packed!r}, fields=key, shuffle=True, **options)
        return shardio.DataLoader(dataset, **loading)
    dataset = shardio.ShardMapDataset({packed!r}, fields=key)
    return shardio.DataLoader(dataset, sampler=shardio.EpochSampler(dataset, **options), **loading)

def chosen():
    return make({options})
"""

PADDED = "20 delivered once, 1 more than once (1 repeat, 1 required by the remainder policy), 0 never"
DROPPED = "16 delivered once, 0 more than once, 5 never (5 left out by the remainder policy)"
ALL = "21 delivered once, 0 more than once, 0 never"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param("num_workers=1", PADDED, marks=pytest.mark.slow),
        ("map_style=True, key=('label', 'key')", PADDED),
        ("remainder='keep'", ALL),
        ("remainder='mask'", ALL),
        ("remainder='mask', map_style=True, key=('label', 'key')", ALL),
        ("remainder='drop', key=('label', 'key')", DROPPED),
        ("drop_last=True, map_style=True", DROPPED),
    ],
)
def test_a_loader_of_shardio_is_judged_by_its_own_remainder(
    packed: Path, tmp_path: Path, run_check: RunCheck, options: str, words: str
) -> None:
    """There are 21 samples and 2 ranks with batches of 4. Some cases compare with the dataset's keys."""
    more = ("--expected", packed, "--key", 1) if "label" in options else ()
    (tmp_path / "script.py").write_text(SHARDIO.format(packed=str(packed), options=options))
    done = run_check(f"{tmp_path / 'script.py'}:chosen", "--world-size", 2, *more)
    assert done.exit_code == 0, done.output
    assert f"epoch 0: right: 21 samples: {words}, 0 unexpected" in done.output
