"""Where the cache folder cannot be written, nothing is compiled for others, and the reason is said in one line."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import pytest

from shardio.files import make_folder
from shardio.images.kernel import background, building, finding
from shardio.images.kernel.cache_files import (
    log_path,
    object_name,
    user_folder,
)
from shardio.images.kernel.finding import prepare_kernel
from shardio.images.tiling import tile_jpeg
from tests.files import files_of_at_most
from tests.images.kernel_machines import _no_folder, _not_built, folder, object_path
from tests.sources import encode

__all__ = ["_no_folder", "_not_built", "folder"]


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


@pytest.mark.usefixtures("_no_folder")
def test_without_a_folder_each_process_checks_for_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prepare_kernel()
    assert finding.find_kernel() is not None
    assert caplog.messages == []
    monkeypatch.setattr(finding, "_finder", finding._Finder())
    monkeypatch.setattr("shardio.images.kernel.checking.find_difference", lambda functions: "all differ")
    prepare_kernel()
    prepare_kernel()
    assert finding.find_kernel() is None
    (message,) = caplog.messages
    assert "its pixels differ from those of libjpeg-turbo or Pillow: all differ." in message


@pytest.mark.usefixtures("_not_built")
def test_a_build_that_cannot_write_its_file_fails_with_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The line names the file, nothing of the file remains, and the parent process logs the line."""
    make_folder(folder)
    code = object_path().read_bytes()
    monkeypatch.setattr(building, "_compile", lambda: code)
    monkeypatch.setattr("shardio.images.kernel.checking.find_difference", lambda functions: None)
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
