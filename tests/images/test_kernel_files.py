"""One process compiles and checks the kernel, which is used only if its files are intact and its pixels right."""

from __future__ import annotations

import fcntl
import logging
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO

import pytest
from filelock import FileLock

from shardio import DataLoader, ShardDataset
from shardio.decoding import Fields
from shardio.files import UntrustedError, make_folder
from shardio.images.kernel import background, building, checking, finding, loading
from shardio.images.kernel.cache_files import (
    check_name,
    lock_path,
    log_path,
    object_name,
    pack,
    read_check,
    read_object,
    user_folder,
)
from shardio.images.kernel.finding import prepare_kernel
from shardio.images.kernel.source import hash_source
from shardio.images.tiling import tile_jpeg
from shardio.loader import chunk_worker
from shardio.process import count_processors
from shardio.transforms import CenterCrop
from tests.files import OTHER_USER, as_root, files_of_at_most, mode_of, umask
from tests.images.kernel_machines import WITHOUT_BUILT, _no_folder, _not_built, folder, object_path, run, start
from tests.sources import encode

__all__ = ["_no_folder", "_not_built", "folder"]


@pytest.fixture
def _checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the check of the pixels, which takes a second."""
    monkeypatch.setattr(checking, "find_difference", lambda functions: None)


@pytest.fixture
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the existing build's object code, because compiling takes half a minute."""
    code = object_path().read_bytes()
    monkeypatch.setattr(building, "_compile", lambda: code)


@pytest.fixture
def path(folder: Path, _not_built: None) -> Path:
    """The path of an intact object file."""
    folder.mkdir(parents=True)
    path = folder / object_name()
    path.write_bytes(pack(object_path().read_bytes()))
    return path


def test_damaged_files_are_not_used(path: Path) -> None:
    code, content = object_path().read_bytes(), path.read_bytes()
    for damaged in (b"", content[:20], content[:-1], content[:1000] + b"x" + content[1001:], b"x" + content[1:]):
        path.write_bytes(damaged)
        assert loading.load_functions() is None
    path.write_bytes(content)
    assert read_object() == code
    assert loading.load_functions() is not None
    for damaged in (b"", pack(b"")[:-1], b"x" + pack(b"all differ")[1:]):
        path.with_name(check_name("it")).write_bytes(damaged)
        assert read_check("it") is None


@pytest.mark.usefixtures("_checked", "_compiled")
@pytest.mark.parametrize("which", ["file", "folder"])
def test_functions_that_other_users_may_write_to_are_not_loaded_but_compiled_again(path: Path, which: str) -> None:
    others = path if which == "file" else path.parent
    others.chmod(0o777)
    assert loading.load_functions() is None
    assert f"the {which} {others} belongs to" in str(finding.why_no_kernel())
    with umask(0o077):
        building.build()
    assert {mode_of(file) for file in path.parent.iterdir() if file.suffix != ".lock"} == {0o644}
    assert mode_of(path.parent) == 0o755
    assert loading.load_functions() is not None
    assert finding.find_kernel() is not None


@as_root
def test_in_another_users_folder_nothing_is_loaded_or_compiled_and_one_warning_says_why(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    os.chown(path.parent, OTHER_USER, -1)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("it must not be written there"))
    with caplog.at_level(logging.WARNING, "shardio"):
        prepare_kernel()
    assert finding.find_kernel() is None
    (record,) = caplog.records
    reason = f"{path.parent} belongs to uid {OTHER_USER} and has mode 0755"
    for part in (reason, "uses libjpeg-turbo", "XDG_CACHE_HOME", "python -m shardio.images.kernel --system"):
        assert part in record.getMessage()
    with pytest.raises(UntrustedError, match=reason):
        building.build()


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
    with FileLock(lock_path()):
        prepare_kernel()
    assert len(started) == 1


@pytest.mark.usefixtures("folder")
def test_without_numba_built_functions_are_used_and_without_them_there_is_no_kernel_and_no_error(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    for name in ("numba", "llvmlite"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "it is not checked on this machine yet" in str(finding.why_no_kernel())
    building.build()
    assert finding.find_kernel() is not None
    assert finding.why_no_kernel() is None
    monkeypatch.setattr(finding, "_finder", finding._Finder())
    assert finding.find_kernel() is not None
    monkeypatch.setattr(loading, "find_targets", list)
    monkeypatch.setattr(finding, "_finder", finding._Finder())
    monkeypatch.setattr(background, "build_in_background", lambda functions: pytest.fail("it cannot be compiled"))
    assert finding.find_kernel() is None
    expected = "shardio was built without it for this processor, and numba is not installed (pip install numba)"
    assert finding.why_no_kernel() == expected
    prepare_kernel()
    with pytest.raises(ImportError, match="numba is not installed"):
        finding.compiled_functions()


@pytest.mark.usefixtures("_not_built")
def test_a_check_at_once_compiles_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_compile", lambda: pytest.fail("it takes half a minute"))
    assert "it is not compiled on this machine yet" in str(finding.why_no_kernel())
    finding.check_kernel()
    assert finding.find_kernel() is None


@pytest.mark.usefixtures("_checked")
@pytest.mark.parametrize("can_write", [True, False])
def test_a_check_at_once_lets_the_kernel_be_used(can_write: bool, request: pytest.FixtureRequest, folder: Path) -> None:
    if not can_write:
        request.getfixturevalue("_no_folder")
    assert finding.find_kernel() is None
    finding.check_kernel()
    assert finding.find_kernel() is not None
    assert folder.exists() == can_write


@pytest.mark.parametrize(("fields", "is_prepared"), [(("image", "label"), True), ("key", False)])
def test_a_loader_that_decodes_images_prepares_it(
    packed: Path, monkeypatch: pytest.MonkeyPatch, fields: Fields, is_prepared: bool
) -> None:
    calls = list[None]()
    monkeypatch.setattr(chunk_worker, "prepare_kernel", lambda: calls.append(None))
    transform = CenterCrop(8) if is_prepared else None
    next(iter(DataLoader(ShardDataset(packed, fields=fields, transform=transform), batch_size=2)))
    assert bool(calls) == is_prepared


# Folders that cannot be written


@pytest.mark.usefixtures("_no_folder", "_not_built")
def test_without_a_folder_nothing_is_compiled_and_one_warning_says_so(caplog: pytest.LogCaptureFixture) -> None:
    prepare_kernel()
    prepare_kernel()
    (message,) = caplog.messages
    assert f"'{user_folder().parents[1]}" in message
    assert "uses libjpeg-turbo instead, which is slower" in message
    assert "set XDG_CACHE_HOME to a writable folder" in message


@pytest.mark.usefixtures("_no_folder")
def test_without_a_folder_a_process_that_tiles_compiles_for_itself(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    original = encode(0, width=96, height=64)
    tiled = tile_jpeg(original)
    request.getfixturevalue("_not_built")
    outputs = [object_path().read_bytes()]
    monkeypatch.setattr(building, "_compile", outputs.pop)  # A second call would fail.
    assert tile_jpeg(original) == tile_jpeg(original) == tiled


@pytest.mark.usefixtures("_no_folder", "_checked")
def test_without_a_folder_each_process_checks_for_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prepare_kernel()
    assert finding.find_kernel() is not None
    assert caplog.messages == []
    monkeypatch.setattr(finding, "_finder", finding._Finder())
    monkeypatch.setattr(checking, "find_difference", lambda functions: "all differ")
    prepare_kernel()
    prepare_kernel()
    assert finding.find_kernel() is None
    (message,) = caplog.messages
    assert "its pixels differ from those of libjpeg-turbo or Pillow: all differ." in message


@pytest.mark.usefixtures("_not_built", "_checked", "_compiled")
def test_a_build_that_cannot_write_its_file_fails_with_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The error message names the file, no part of the file remains, and the parent process logs the message."""
    make_folder(folder)
    with files_of_at_most(1000), pytest.raises(SystemExit) as end:
        background.build_and_remove_log()
    assert str(end.value) == f"[Errno 27] File too large: '{folder / object_name()}'"
    assert list(folder.iterdir()) == []

    class Ended:
        def __init__(self, *_: object, stdout: BinaryIO, **__: object) -> None:
            stdout.write(f"{end.value}\n".encode())

        def poll(self) -> int:
            return 1

    monkeypatch.setattr(subprocess, "Popen", Ended)
    build = background.build_in_background(None)
    assert build is not None
    build.watch()
    assert f"ended with exit status 1 ({end.value}); its output is in {log_path()}" in caplog.text


@pytest.mark.usefixtures("_no_folder")
def test_preparing_it_in_advance_fails_with_one_line_in_a_folder_that_is_not_writable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["kernel"])
    with pytest.raises(SystemExit, match=r"error: cannot write to .*/kernels: .*/user"):
        runpy.run_path(str(Path(building.__file__).with_name("__main__.py")), run_name="__main__")


# Several processes

LIST_FILES = "print(*sorted(os.path.splitext(name)[1] for name in os.listdir(cache_files.user_folder())))\n"
IS_FOUND = """
import sys
from shardio.images.kernel import find_kernel
print(find_kernel() is not None, {!r} in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_built", [True, False])
def test_one_of_several_processes_prepares_it_and_all_use_it(tmp_path: Path, is_built: bool) -> None:
    """One process checks the built functions, or, if there are none, compiles some with a fake compiler."""
    begin, work = ("", "checked") if is_built else (WITHOUT_BUILT, "compiled")
    code = f"""
import os, time
from pathlib import Path
from shardio.images.kernel import building, cache_files, checking

def check(functions, find_difference=checking.find_difference):
    print("checked")
    time.sleep(0.5)  # The other process comes to the lock meanwhile.
    return find_difference(functions)

def compile():
    print("compiled")
    time.sleep(0.5)
    return Path({str(object_path())!r}).read_bytes()

if {is_built}:
    checking.find_difference = check
building._compile = compile
building.build()
{LIST_FILES}"""
    outputs = [process.communicate(timeout=60)[0] for process in [start(begin + code, tmp_path) for _ in range(2)]]
    files = ".check .lock\n" if is_built else ".check .kernel .lock\n"
    assert sorted(outputs) == sorted([files, f"{work}\n{files}"])
    assert run(begin + IS_FOUND.format("llvmlite" if is_built else "numba"), tmp_path) == ("True False\n", "")


BUILD_SLOWLY = """
import shutil, sys, time
sys.path[:] = eval(sys.argv.pop(1))
from shardio.images.kernel import background, building
building.build_locked = lambda folder: time.sleep(0.7) or shutil.copytree({ready!r}, folder, dirs_exist_ok=True)
background.build_and_remove_log()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("_not_built", "_compiled")
def test_one_of_several_processes_without_a_kernel_starts_to_compile_it_and_logs_that(
    folder: Path, tmp_path: Path
) -> None:
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


START = (
    WITHOUT_BUILT
    + """
import os, time
import shardio.process
from shardio.images.kernel import finding
shardio.process._write_program = lambda function: {program!r}
finding.LOOK_AGAIN_S = 0
finding.prepare_kernel()
while not os.path.exists(os.environ["XDG_CACHE_HOME"] + "/started"):
    time.sleep(0.01)
print("the last line")
"""
)
WAIT = """
import os
from pathlib import Path
cache = Path(os.environ["XDG_CACHE_HOME"])
(cache / "pid").write_text(str(os.getpid()))
os.mkfifo(cache / "done")
(cache / "started").touch()
open(cache / "done").close()  # Wait until another process opens it for writing.
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="/proc lists the open files of a process")
def test_a_script_that_starts_the_background_process_does_not_keep_readers_of_its_output_waiting(
    tmp_path: Path,
) -> None:
    pytest.importorskip("numba")  # Numba compiles the kernel in the background.
    log = tmp_path / "shardio" / "kernels" / f"{hash_source()}.log"
    try:
        # The call returns when no process has the script's pipes open.
        output, errors = run(START.format(program=WAIT), tmp_path)
        assert output == "the last line\n"
        assert "is compiling its JPEG kernel" in errors
        assert str(log) in errors
        compiler = int((tmp_path / "pid").read_text())
        opened = {str(entry.readlink()) for entry in Path(f"/proc/{compiler}/fd").iterdir()}  # It is alive.
        assert {str(Path(f"/proc/{compiler}/fd/{descriptor}").readlink()) for descriptor in (1, 2)} == {str(log)}
        assert not {name for name in opened if name.startswith("pipe:")}
        with log.with_suffix(".lock").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        (tmp_path / "done").open("w").close()
    with log.with_suffix(".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # The process holds the lock until it ends.


@pytest.mark.slow
def test_a_failure_in_the_background_is_logged_once_and_its_output_is_kept(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    code = START.format(program="import os; open(os.environ['XDG_CACHE_HOME'] + '/started', 'w'); 1 / 0") + (
        "finding._finder._build._process.wait()\n"
        "for _ in range(3):\n"
        "    assert finding.find_kernel() is None\n"
        "print(finding.why_no_kernel())\n"
    )
    output, errors = run(code, tmp_path)
    (log,) = tmp_path.glob("shardio/kernels/*.log")
    assert "ZeroDivisionError" in log.read_text()
    _, warning = errors.splitlines()
    assert "could not compile or check its JPEG kernel, and uses libjpeg-turbo instead" in warning
    assert "the background process ended with exit status 1" in warning
    assert f"its output is in {log}" in warning
    assert f"the last attempt to compile or check it failed: see {log}" in output


@pytest.mark.slow
def test_forks_have_it_and_more_threads_than_processors_take_turns(folder: Path) -> None:
    """A forked child does not wait for a thread that loads the kernel, or for threads that decode."""
    building.build()
    code = f"""
import os, threading, time
import numpy as np
from concurrent.futures import ThreadPoolExecutor
from shardio.images import CropPlan, render_chunk, open_image
from shardio.images.kernel import finding
from tests.images.jpeg_files import by_pillow
from tests.images.pictures import make_picture

def load_slowly():
    is_loading.set()
    time.sleep(0.5)  # The main thread forks meanwhile.
    return load()

def fork(does_succeed):
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    else:
        os._exit(7 if does_succeed() else 1)

load, finding.load_functions, is_loading = finding.load_functions, load_slowly, threading.Event()
threading.Thread(target=finding.find_kernel).start()
is_loading.wait()
fork(lambda: finding.find_kernel() is not None)
kernel, content = finding.find_kernel(), by_pillow(make_picture(99, 77), quality=90)
def render():
    return render_chunk([open_image(content)], CropPlan.whole(np.array([[99, 77]]))).images[0]
expected = render()
with ThreadPoolExecutor(16) as threads:
    print(all((pixels == expected).all() for pixels in threads.map(lambda _: render(), range(200))))
num_turns = 0
while kernel._processors.acquire(blocking=False):  # As if threads decoded while this one forks.
    num_turns += 1
print(len(kernel._free) <= num_turns == {count_processors()})
fork(lambda: (render() == expected).all())
"""
    assert run(code, folder.parents[1])[0] == "7\nTrue\nTrue\n7\n"


@pytest.mark.slow
def test_a_kernel_with_other_pixels_is_not_used_and_a_file_says_so(tmp_path: Path) -> None:
    code = """
from shardio.images.kernel import building, checking, find_kernel, prepare_kernel
resize, check = checking.resize_bilinear, checking.find_difference
checking.resize_bilinear = lambda image, *size: resize(image, *size) ^ 1
checking.find_difference = lambda functions: print("checked") or check(functions)
building.build()
__import__("subprocess").Popen = None
prepare_kernel()
print(find_kernel())
"""
    for expected in ("checked\nNone\n", "None\n"):
        output, errors = run(code, tmp_path)
        assert output == expected
        (line,) = errors.splitlines()
        assert line.startswith("shardio does not use its JPEG kernel on this machine, because its pixels differ from")
        assert "444, quality 60, [20, 30, 96, 101] to [96, 101]: 29088 of 29088 values differ by up to 1" in line


PREPARE_FOR_ALL = """
import os, runpy, sys
from pathlib import Path
from shardio.images.kernel import building, cache_files, finding, loading, __main__
system, code = Path(sys.argv[1]), Path(sys.argv[2]).read_bytes()
if loading.find_targets() == []:
    import numba
cache_files.site_cache_path = lambda name: system / name
building._compile = lambda: code
os.umask(0o077)
sys.argv[1:] = ["--system"]
runpy.run_module("shardio.images.kernel", run_name="__main__")
os.setgroups([])
os.setgid(12345)
os.setuid(12345)
finding._finder = finding._Finder()
print(finding.find_kernel() is not None, os.listdir(os.environ["XDG_CACHE_HOME"]))
"""


@pytest.mark.slow
@as_root
@pytest.mark.parametrize("begin", ["", WITHOUT_BUILT], ids=["built", "not built"])
def test_what_root_prepares_for_all_users_is_used_by_another_user(begin: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        if not all(mode_of(folder) & 0o001 for folder in root.parents):
            pytest.skip("other users cannot reach the folder for temporary files")
        root.chmod(0o755)
        for folder in ("user", "system"):
            (root / folder).mkdir()
            (root / folder).chmod(0o755)
        output, errors = run(begin + PREPARE_FOR_ALL, root / "user", root / "system", object_path())
        published = root / "system" / "shardio" / "kernels"
        files = [file for file in published.iterdir() if file.suffix != ".lock"]
        assert sorted(file.suffix for file in files) == ([".check", ".kernel"] if begin else [".check"])
        assert {mode_of(file) for file in files} == {0o644}
        assert [mode_of(folder) for folder in (published, published.parent)] == [0o755, 0o755]
        first, second = output.splitlines()
        assert first.endswith(f"its check is in {published}")
        assert second == "True []", errors


DECODE_AMONG_SMALL_HOLES = (
    WITHOUT_BUILT
    + """
import ctypes
import numpy as np
import simplejpeg
from shardio.images import CropPlan, render_chunk, open_image
from pathlib import Path
import sys
from shardio.images.kernel import building, find_kernel

NO_ACCESS, RESERVED = 0, 0x2 | 0x20 | 0x4000  # PROT_NONE; MAP_PRIVATE, MAP_ANONYMOUS, MAP_NORESERVE
WIDTH, PAGES_OF_CODE, HOLE = 3 << 30, 1 << 16, 1 << 15
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

def reserve(size):
    return libc.mmap(None, size, NO_ACCESS, RESERVED, -1, 0)

content = simplejpeg.encode_jpeg(np.random.default_rng(0).integers(0, 256, (64, 48, 3), np.uint8))
code = Path(sys.argv[1]).read_bytes()
assert len(code) > PAGES_OF_CODE
building._compile = lambda: code
wide = reserve(WIDTH)
while reserve(PAGES_OF_CODE) > wide:  # Linux uses the highest hole: from here on, code goes below the wide region,
    pass
for i in range(1, 17):  # and smaller sections go to its upper end.
    libc.munmap(wide + WIDTH - i * (1 << 20), HOLE)
building.build()
print(find_kernel() is not None)
print((render_chunk([open_image(content)], CropPlan.whole(np.array([[64, 48]]))).images[0]
    == simplejpeg.decode_jpeg(content)).all())
"""
)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the test relies on how Linux lays out the address space")
def test_it_loads_where_small_holes_are_more_than_2_gb_away_from_large_ones(tmp_path: Path) -> None:
    """CUDA's libraries leave small holes in the address space, far away from large ones."""
    assert run(DECODE_AMONG_SMALL_HOLES, tmp_path, object_path())[0] == "True\nTrue\n"
