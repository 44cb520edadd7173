"""The kernel's file is compiled once, by one process, and loaded only if it is intact and its pixels are right."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import pytest
from filelock import FileLock

from shardio import DataLoader, ShardDataset
from shardio.decoding.fields import Fields
from shardio.images.kernel import background, building, finding, loading
from shardio.images.kernel.finding import prepare_kernel
from shardio.images.trust import make_folder
from shardio.loader.processes import chunk_builder
from shardio.processors import count_processors
from shardio.transforms import CenterCrop
from tests.files import files_of_at_most

ROOT = Path(__file__).parents[2]


def run(code: str, cache: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True, env=environment)


def test_one_of_several_processes_compiles_it_and_all_load_it(tmp_path: Path) -> None:
    """The compiler, which takes a minute, is replaced: it returns the kernel that the test session compiled."""
    code = f"""
import time
from pathlib import Path
from shardio.images.kernel import building
from shardio.images.kernel.loading import read_kernel

def compile():
    print("compiled")
    time.sleep(0.5)
    return read_kernel(Path({str(loading.kernel_path())!r}))

building._compile = compile
print(building.build())
"""
    processes = [run(code, tmp_path) for _ in range(2)]
    outputs = [process.communicate(timeout=300)[0].split() for process in processes]
    (path,) = {output[-1] for output in outputs}
    assert sorted(output[:-1] for output in outputs) == [[], ["compiled"]]
    assert sorted(file.suffix for file in Path(path).parent.iterdir()) == [".kernel", ".lock"]
    use_it = (
        "import sys; from shardio.images.kernel import find_kernel as f; print(f() is not None, 'numba' in sys.modules)"
    )
    assert run(use_it, tmp_path).communicate()[0] == "True False\n"


@pytest.fixture
def content() -> bytes:
    """The kernel's file that was compiled at the start of the tests."""
    return loading.kernel_path().read_bytes()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a kernel that does not exist, on a machine without a kernel for all users."""
    path = tmp_path / "shardio" / "kernels" / "some.kernel"
    for module in (loading, building, background):
        monkeypatch.setattr(module, "kernel_path", lambda: path)
    monkeypatch.setattr(loading, "system_kernel_path", lambda: tmp_path / "system" / "kernels" / "some.kernel")
    monkeypatch.setattr(finding, "_finder", finding._Finder())
    return path


def test_a_damaged_kernel_is_not_loaded(content: bytes, path: Path) -> None:
    make_folder(path.parent)
    assert loading.load_kernel() is None
    for damaged in (b"", content[:20], content[:-1], content[:1000] + b"x" + content[1001:], b"x" + content[1:]):
        path.write_bytes(damaged)
        assert loading.load_kernel() is None
    path.write_bytes(content)
    assert loading.load_kernel() is not None


def test_a_build_starts_unless_another_process_compiles_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[object]()
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **_: started.append(arguments))
    assert finding.find_kernel() is None
    prepare_kernel()
    assert len(started) == 1
    with FileLock(path.with_suffix(".lock")):  # Another process compiles it.
        prepare_kernel()
    assert len(started) == 1


def test_without_numba_there_is_no_kernel_and_no_build_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "_is_possible", lambda: False)
    monkeypatch.setattr(finding, "_finder", finding._Finder())
    monkeypatch.setattr(background, "build_in_background", lambda: pytest.fail("it cannot be compiled"))
    assert finding.find_kernel() is None
    prepare_kernel()


def test_in_a_folder_that_is_not_writable_no_build_starts_and_one_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    for module in (loading, background):
        monkeypatch.setattr(module, "kernel_path", lambda: tmp_path / "file" / "kernels" / "some.kernel")
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("it cannot be written"))
    assert background.build_in_background() is None
    assert background.build_in_background() is None
    (message,) = caplog.messages
    assert f"'{tmp_path / 'file' / 'kernels'}'" in message
    assert "uses libjpeg-turbo instead, which is slower" in message
    assert "set XDG_CACHE_HOME to a writable folder" in message


def test_a_build_that_cannot_write_its_file_fails_with_one_line(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The line names the file, nothing of the file remains, and the parent process logs the line."""
    make_folder(path.parent)
    monkeypatch.setattr(building, "_compile", lambda: ("name", bytes(5000)))
    monkeypatch.setattr(building, "Kernel", lambda *_: None)
    monkeypatch.setattr("shardio.images.kernel.checking.find_difference", lambda kernel: None)
    with files_of_at_most(1000), pytest.raises(SystemExit) as end:
        background.build_and_remove_log()
    assert str(end.value) == f"[Errno 27] File too large: '{path}'"
    assert list(path.parent.iterdir()) == []

    class Ended:
        def __init__(self, *_: object, stdout: BinaryIO, **__: object) -> None:
            stdout.write(f"{end.value}\n".encode())

        def poll(self) -> int:
            return 1

    monkeypatch.setattr(subprocess, "Popen", Ended)
    build = background.build_in_background()
    assert build is not None
    build.watch()
    assert f"ended with exit status 1 ({end.value}); its output is in {path.with_suffix('.log')}" in caplog.text


def test_compiling_in_advance_fails_with_one_line_in_a_folder_that_is_not_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(sys, "argv", ["kernel"])
    with pytest.raises(SystemExit, match=r"error: cannot write .*\.kernel: .*/file'"):
        runpy.run_path(str(Path(building.__file__).with_name("__main__.py")), run_name="__main__")


BUILD_SLOWLY = """
import shutil, sys, time
sys.path[:] = eval(sys.argv.pop(1))
from shardio.images.kernel import background, building
building.build_locked = lambda path: time.sleep(0.7) or shutil.copy({whole!r}, path)
background.build_and_remove_log()
"""


def test_one_of_several_processes_without_a_kernel_starts_to_compile_it_and_logs_that(tmp_path: Path) -> None:
    code = f"""
import time
import shardio.background
from shardio.images.kernel import finding
finding.LOOK_AGAIN_S = 0
shardio.background._write_program = lambda function: {BUILD_SLOWLY.format(whole=str(loading.kernel_path()))!r}
finding.prepare_kernel()
end = time.monotonic() + 30
while finding.find_kernel() is None and time.monotonic() < end:
    time.sleep(0.05)
print(finding.find_kernel() is not None)
"""
    outputs = [process.communicate(timeout=60) for process in [run(code, tmp_path) for _ in range(3)]]
    assert [output for output, _ in outputs] == ["True\n"] * 3
    assert sorted(log.count("is compiling its JPEG kernel") for _, log in outputs) == [0, 0, 1]


def test_a_process_that_is_forked_while_another_thread_loads_it_has_it(tmp_path: Path) -> None:
    code = """
import os, threading, time
from shardio.images.kernel import finding

def load_slowly():
    is_loading.set()
    time.sleep(0.5)
    return load()

load, finding._load, is_loading = finding._load, load_slowly, threading.Event()
threading.Thread(target=finding.find_kernel).start()
is_loading.wait()
if child := os.fork():
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), finding.find_kernel() is not None)
else:
    os._exit(7 if finding.find_kernel() is not None else 1)
"""
    assert run(code, loading.kernel_path().parents[2]).communicate(timeout=60)[0] == "7 True\n"


@pytest.mark.parametrize(("fields", "is_prepared"), [(("image", "label"), True), ("key", False)])
def test_a_loader_that_decodes_images_prepares_it(
    packed: Path, monkeypatch: pytest.MonkeyPatch, fields: Fields, is_prepared: bool
) -> None:
    calls = list[None]()
    monkeypatch.setattr(chunk_builder, "prepare_kernel", lambda: calls.append(None))
    transform = CenterCrop(8) if is_prepared else None
    next(iter(DataLoader(ShardDataset(packed, fields=fields, transform=transform), batch_size=2)))
    assert bool(calls) == is_prepared


def test_more_threads_than_processors_take_turns_and_a_fork_does_not_wait_for_its_parents_threads(
    tmp_path: Path,
) -> None:
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
    process = run(code, loading.kernel_path().parents[2])
    assert process.communicate(timeout=60)[0] == "True\nTrue\n7\n"
