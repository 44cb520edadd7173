"""The kernel is compiled and checked once, by one process, and used only if files are intact and pixels right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from shardio import DataLoader, ShardDataset
from shardio.decoding import Fields
from shardio.files import make_folder
from shardio.images.kernel import background, building, finding, loading
from shardio.images.kernel.cache_files import (
    check_name,
    lock_path,
    object_name,
    pack,
    read_check,
    read_object,
)
from shardio.images.kernel.finding import prepare_kernel
from shardio.loader.processes import worker_process
from shardio.process import count_processors
from shardio.transforms import CenterCrop
from tests.images.kernel_machines import WITHOUT_BUILT, _no_folder, _not_built, folder, object_path, run, start

__all__ = ["_no_folder", "_not_built", "folder"]

USE = """
import sys
from shardio.images.kernel import find_kernel
print(find_kernel() is not None, {!r} in sys.modules)
"""


def test_one_of_several_processes_checks_it_and_all_use_it(tmp_path: Path) -> None:
    code = """
import os, time
from shardio.images.kernel import building, cache_files, checking

def check(functions, find_difference=checking.find_difference):
    print("checked")
    time.sleep(0.5)  # The other process comes to the lock meanwhile.
    return find_difference(functions)

checking.find_difference = check
building.build()
print(*sorted(os.path.splitext(name)[1] for name in os.listdir(cache_files.user_folder())))
"""
    outputs = [process.communicate(timeout=60)[0] for process in [start(code, tmp_path) for _ in range(2)]]
    assert sorted(outputs) == [".check .lock\n", "checked\n.check .lock\n"]
    assert run(USE.format("llvmlite"), tmp_path) == ("True False\n", "")


def test_without_built_functions_one_of_several_processes_compiles_them_and_all_load_them(tmp_path: Path) -> None:
    """The compiler, which takes half a minute, is replaced: it returns what a build has left."""
    code = (
        WITHOUT_BUILT
        + f"""
import os, time
from pathlib import Path
from shardio.images.kernel import building, cache_files

def compile():
    print("compiled")
    time.sleep(0.5)  # The other process comes to the lock meanwhile.
    return Path({str(object_path())!r}).read_bytes()

building._compile = compile
building.build()
print(*sorted(os.path.splitext(name)[1] for name in os.listdir(cache_files.user_folder())))
"""
    )
    outputs = [process.communicate(timeout=60)[0] for process in [start(code, tmp_path) for _ in range(2)]]
    assert sorted(outputs) == [".check .kernel .lock\n", "compiled\n.check .kernel .lock\n"]
    assert run(WITHOUT_BUILT + USE.format("numba"), tmp_path) == ("True False\n", "")


@pytest.mark.usefixtures("_not_built")
def test_damaged_files_are_not_used(folder: Path) -> None:
    make_folder(folder)
    code, content = object_path().read_bytes(), pack(object_path().read_bytes())
    assert loading.load_functions() is None
    for damaged in (b"", content[:20], content[:-1], content[:1000] + b"x" + content[1001:], b"x" + content[1:]):
        (folder / object_name()).write_bytes(damaged)
        assert loading.load_functions() is None
    (folder / object_name()).write_bytes(content)
    assert read_object() == code
    assert loading.load_functions() is not None
    for damaged in (b"", pack(b"")[:-1], b"x" + pack(b"all differ")[1:]):
        (folder / check_name("it")).write_bytes(damaged)
        assert read_check("it") is None


@pytest.mark.parametrize("is_built", [True, False])
def test_one_background_process_starts_unless_another_one_runs(
    is_built: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if not is_built:
        request.getfixturevalue("_not_built")
    started = list[object]()
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **_: started.append(arguments))
    assert finding.find_kernel() is None
    prepare_kernel()
    assert len(started) == 1
    with FileLock(lock_path()):
        prepare_kernel()
    assert len(started) == 1


def test_numba_is_not_needed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    building.build()
    assert finding.find_kernel() is not None
    assert finding.why_no_kernel() is None


@pytest.mark.usefixtures("folder", "_not_built")
def test_without_built_functions_and_numba_there_is_no_kernel_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(background, "build_in_background", lambda functions: pytest.fail("it cannot be compiled"))
    assert finding.find_kernel() is None
    prepare_kernel()
    with pytest.raises(ImportError, match="numba is not installed"):
        finding.compiled_functions()


BUILD_SLOWLY = """
import shutil, sys, time
sys.path[:] = eval(sys.argv.pop(1))
from shardio.images.kernel import background, building
building.build_locked = lambda folder: time.sleep(0.7) or shutil.copytree({ready!r}, folder, dirs_exist_ok=True)
background.build_and_remove_log()
"""


@pytest.mark.usefixtures("_not_built")
def test_one_of_several_processes_without_a_kernel_starts_to_compile_it_and_logs_that(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = object_path().read_bytes()
    monkeypatch.setattr(building, "_compile", lambda: code)
    building.build()
    script = (
        WITHOUT_BUILT
        + f"""
import time
import shardio.process
from shardio.images.kernel import finding
finding.LOOK_AGAIN_S = 0
shardio.process._write_program = lambda function: {BUILD_SLOWLY.format(ready=str(folder))!r}
finding.prepare_kernel()
end = time.monotonic() + 30
while finding.find_kernel() is None and time.monotonic() < end:
    time.sleep(0.05)
print(finding.find_kernel() is not None)
"""
    )
    processes = [start(script, tmp_path / "other") for _ in range(3)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [output for output, _ in outputs] == ["True\n"] * 3, outputs
    assert sorted(log.count("is compiling its JPEG kernel") for _, log in outputs) == [0, 0, 1]


def test_a_process_that_is_forked_while_another_thread_loads_it_has_it(folder: Path) -> None:
    building.build()
    code = """
import os, threading, time
from shardio.images.kernel import finding

def load_slowly():
    is_loading.set()
    time.sleep(0.5)  # The main thread forks meanwhile.
    return load()

load, finding.load_functions, is_loading = finding.load_functions, load_slowly, threading.Event()
threading.Thread(target=finding.find_kernel).start()
is_loading.wait()
if child := os.fork():
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), finding.find_kernel() is not None)
else:
    os._exit(7 if finding.find_kernel() is not None else 1)
"""
    assert run(code, folder.parents[1])[0] == "7 True\n"


@pytest.mark.parametrize(("fields", "is_prepared"), [(("image", "label"), True), ("key", False)])
def test_a_loader_that_decodes_images_prepares_it(
    packed: Path, monkeypatch: pytest.MonkeyPatch, fields: Fields, is_prepared: bool
) -> None:
    calls = list[None]()
    monkeypatch.setattr(worker_process, "prepare_kernel", lambda: calls.append(None))
    transform = CenterCrop(8) if is_prepared else None
    next(iter(DataLoader(ShardDataset(packed, fields=fields, transform=transform), batch_size=2)))
    assert bool(calls) == is_prepared


def test_more_threads_than_processors_take_turns_and_a_fork_does_not_wait_for_its_parents_threads(
    folder: Path,
) -> None:
    building.build()
    code = f"""
import os, threading
import numpy as np
from concurrent.futures import ThreadPoolExecutor
from shardio.images import CropPlan, render_chunk, open_image
from shardio.images.kernel import find_kernel
from tests.images.jpeg_files import by_pillow
from tests.images.pictures import make_picture

kernel, content = find_kernel(), by_pillow(make_picture(99, 77), quality=90)
def render():
    return render_chunk([open_image(content)], CropPlan.whole(np.array([[99, 77]]))).images[0]
expected = render()
with ThreadPoolExecutor(16) as threads:
    print(all((pixels == expected).all() for pixels in threads.map(lambda _: render(), range(200))))
num_turns = 0
while kernel._processors.acquire(blocking=False):  # As if threads decoded while this one forks.
    num_turns += 1
print(len(kernel._free) <= num_turns == {count_processors()})
if child := os.fork():
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    os._exit(7 if (render() == expected).all() else 1)
"""
    assert run(code, folder.parents[1])[0] == "True\nTrue\n7\n"


@pytest.mark.parametrize("can_write", [True, False])
def test_a_check_at_once_lets_the_kernel_be_used(can_write: bool, request: pytest.FixtureRequest, folder: Path) -> None:
    if not can_write:
        request.getfixturevalue("_no_folder")
    assert finding.find_kernel() is None
    finding.check_kernel()
    assert finding.find_kernel() is not None
    assert folder.exists() == can_write


@pytest.mark.usefixtures("folder", "_not_built")
def test_a_check_at_once_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_compile", lambda: pytest.fail("it takes half a minute"))
    finding.check_kernel()
    assert finding.find_kernel() is None
