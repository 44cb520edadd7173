"""A fork server that has imported people's code serves the next loader, unless something that it depends on changed."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from shardio import DataLoader, ImageFolder, ShardMapDataset
from shardio.loader.processes.fork_server import end_kept
from shardio.transforms import Compose, RandomResizedCrop
from tests.buffers import assert_same, find_fork_servers, has_ended, wait_until
from tests.processes import run_python

pytestmark = pytest.mark.usefixtures("no_process_of_other_tests")


def make_loader(pictures: Path, transform: Any = np.negative, **options: Any) -> DataLoader:
    dataset = ShardMapDataset(pictures, fields=("image", "key"), transform=Compose([RandomResizedCrop(48), transform]))
    dataset.set_epoch(3)
    return DataLoader(dataset, 8, **{"num_workers": 2, **options})


def test_the_next_loader_has_the_same_fork_server(pictures: Path, images: Path) -> None:
    servers = list[set[int]]()
    for transform in (np.negative, np.flipud, lambda image: image[:9]):
        assert_same(list(make_loader(pictures, transform)), list(make_loader(pictures, transform, num_workers=0)))
        servers.append(find_fork_servers())
    assert len(servers[0]) == 1
    assert servers == servers[:1] * 3
    folder = ImageFolder(images, transform=lambda image: image[:9, :9])
    assert len(list(DataLoader(folder, 21, num_workers=1))) == 1
    assert find_fork_servers() == servers[0]


def test_pytests_note_of_the_current_test_does_not_matter(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    list(make_loader(pictures))
    servers = find_fork_servers()
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "another test")
    list(make_loader(pictures))
    assert find_fork_servers() == servers
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    list(make_loader(pictures))
    assert find_fork_servers() != servers, "code may ask whether it is tested"
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "this test")  # pytest removes it.


def test_loaders_at_the_same_time_have_their_own_and_one_is_kept(pictures: Path) -> None:
    loaders = [make_loader(pictures) for _ in range(3)]
    batches = list(zip(*loaders, strict=True))
    assert len(find_fork_servers()) == 3
    assert_same([first for first, *_ in batches], [last for *_, last in batches])
    del loaders[0]
    assert len(find_fork_servers()) == 3
    loaders.clear()
    assert len(find_fork_servers()) == 1


def test_a_loader_without_peoples_code_leaves_nothing(pictures: Path) -> None:
    list(make_loader(pictures))
    kept = find_fork_servers()
    dataset = ShardMapDataset(pictures, fields="image", transform=RandomResizedCrop(48))
    loader = DataLoader(dataset, 8, num_workers=1)
    list(loader)
    assert len(find_fork_servers() - kept) == 1, "it does not take the one with people's code"
    del loader
    assert find_fork_servers() == kept


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "edited_transforms", raising=False)  # The one of another test.
    write_module(tmp_path, 1)
    return importlib.import_module("edited_transforms")


def write_module(folder: Path, value: int) -> None:
    file = folder / "edited_transforms.py"
    file.write_text(f"import numpy as np\n\ndef fill(image):\n    return np.full((9, 9), {value})\n")
    os.utime(file, ns=(0, value * 10**9))  # Soon after another change, the clock may not have moved.


@pytest.mark.parametrize("is_new", [True, False])
def test_a_reloaded_module_is_imported_again(pictures: Path, tmp_path: Path, module: ModuleType, is_new: bool) -> None:
    loader = make_loader(pictures, module.fill)
    for value in (1, 2, 2, 3):
        write_module(tmp_path, value)
        importlib.reload(module)
        if is_new:
            loader = make_loader(pictures, module.fill)
        else:
            loader.dataset.transform = module.fill
        values, _ = next(iter(loader))
        assert values.unique().tolist() == [value]


def test_a_file_that_is_edited_during_a_run_changes_nothing(pictures: Path, tmp_path: Path, module: ModuleType) -> None:
    """This process still has the code that it imported, and so have its worker processes."""
    loader = make_loader(pictures, module.fill)
    for value in (1, 2, 3):
        write_module(tmp_path, value)
        for each in (loader, make_loader(pictures, module.fill)):
            values, _ = next(iter(each))
            assert values.unique().tolist() == [1]


def test_changed_surroundings_end_it(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set[int]()
    for name, folder in (("a", Path.cwd()), ("b", Path.cwd()), ("b", tmp_path)):
        monkeypatch.setenv("A", name)
        monkeypatch.chdir(folder)
        list(make_loader(pictures))
        (server,) = find_fork_servers()
        seen.add(server)
    assert len(seen) == 3


def test_one_that_was_killed_is_replaced_in_silence(pictures: Path) -> None:
    list(make_loader(pictures))
    (killed,) = find_fork_servers()
    os.kill(killed, signal.SIGKILL)
    wait_until(partial(has_ended, killed))
    assert_same(list(make_loader(pictures)), list(make_loader(pictures, num_workers=0)))


def test_a_forked_child_does_not_keep_it_alive(pictures: Path) -> None:
    list(make_loader(pictures))
    (server,) = find_fork_servers()
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.close(writing)
        os.read(reading, 1)  # Until the parent has looked.
        os._exit(0)
    end_kept()
    assert server not in find_fork_servers()
    os.close(writing)
    assert os.waitpid(child, 0)[1] == 0
    os.close(reading)


SCRIPT = """
import sys
import shardio
from tests.buffers import find_fork_servers

dataset = shardio.ShardMapDataset(sys.argv[1], fields="image", transform=lambda image: image[:9, :9])
list(shardio.DataLoader(dataset, 8, num_workers=1))
print(*find_fork_servers())
"""


def test_python_ends_it(pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run_python(tmp_path / "script.py", pictures)
    assert (done.returncode, done.stderr) == (0, "")
    assert not Path(f"/proc/{int(done.stdout)}").exists()
