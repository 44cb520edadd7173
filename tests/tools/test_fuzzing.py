"""Fuzzing of images, tars and the kernel: inputs that break a law or cause a crash or a hang are named and saved."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

from shardio.kernel.targets import find_targets
from tests.images.fuzz_laws import LawBrokenError
from tests.processes import forkserver_context
from tests.shards.hostile import HostileShard
from tools.guarded_kernel import find_compiler

# An import statement would make mypy find these files under two names, because tools/ is not a package.
fuzz_images, fuzz_tars = import_module("tools.fuzz_images"), import_module("tools.fuzz_tars")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("error", [LawBrokenError("other pixels"), KeyError(6)])
def test_a_file_that_breaks_a_law_is_saved_and_named_by_its_seed(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [fuzz_images.make_damaged_file(seed, fuzz_images.ORIGINALS)[0] for seed in range(100)]
    assert len(set(files)) > 95

    def check_file(content: bytes, made_of: Any, rng: Any) -> list[str]:
        if content == files[37]:
            raise error
        return ["fine"]

    def run_in_this_process(seeds: range, num_jobs: int, folder: Path) -> Any:
        read, write = fuzz_images.multiprocessing.Pipe(duplex=False)
        fuzz_images.run_seeds(seeds, write, folder / "note")
        while read.poll():
            yield read.recv(), folder / "note"

    monkeypatch.setattr(fuzz_images, "run_jobs", run_in_this_process)
    monkeypatch.setattr(fuzz_images.signal, "signal", lambda *_: signal.default_int_handler)
    monkeypatch.setattr(fuzz_images, "check_file", check_file)
    with pytest.raises(typer.Exit) as exit_info:
        fuzz_images.main(files=100, seed=0, jobs=1, save=tmp_path / "kept", only=None)
    assert exit_info.value.exit_code == 1
    out = capsys.readouterr().out
    assert f"{type(error).__name__}: {error} (seed 37)" in out
    assert "37  fine" in out
    assert [path.read_bytes() for path in (tmp_path / "kept").iterdir()] == [files[37]]
    with pytest.raises(type(error)):
        fuzz_images.main(only=37, save=tmp_path / "only")
    assert (tmp_path / "only" / "seed-37").read_bytes() == files[37]


def _end(seeds: range, reports: Any, path: Path, *, hangs: bool) -> None:
    path.write_bytes(b"the last file")
    if not hangs:
        os.kill(os.getpid(), signal.SIGSEGV)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    time.sleep(600)  # The alarm ends this process.


@pytest.mark.parametrize(("hangs", "said"), [(False, "the process ended with SIGSEGV"), (True, "longer than 5 s")])
def test_a_crash_or_a_hang_keeps_the_file(
    hangs: bool, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    context = forkserver_context()
    monkeypatch.setattr(fuzz_images.multiprocessing, "get_context", lambda _: context)
    monkeypatch.setattr(fuzz_images, "run_seeds", partial(_end, hangs=hangs))
    ((report, note),) = fuzz_images.run_jobs(range(10), 1, tmp_path)
    assert said in report.wrong
    assert note.read_bytes() == b"the last file"


def _break(seeds: range, reports: Any, current: Any, folder: Path) -> None:
    """Break a law at seed 3, die at seed 5, and hang at seed 7."""
    for seed in seeds:
        current.value = seed
        if seed == 5:
            signal.raise_signal(signal.SIGKILL)
        if seed == 7:
            signal.setitimer(signal.ITIMER_PROF, 0.01)
            while True:
                pass
        reports.send(fuzz_tars.Report(num_inputs=1, wrong="other samples" if seed == 3 else None, seed=seed))
        if seed == 3:
            return


def test_a_campaign_continues_after_a_broken_law_a_crash_and_a_hang(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    context = forkserver_context()
    monkeypatch.setattr(fuzz_tars.multiprocessing, "get_context", lambda _: context)
    monkeypatch.setattr(fuzz_tars, "run_seeds", _break)
    reports = list(fuzz_tars.run_job(range(10), tmp_path))
    assert sum(report.num_inputs for report in reports) == 10
    assert {report.seed: report.wrong for report in reports if report.wrong} == {
        3: "other samples",
        5: "the process ended with SIGKILL",
        7: "one way of reading the input took more than 2 s of processor time per MiB",
    }
    assert "--only 37" in fuzz_tars._save(37, tmp_path / "saved")
    (saved,) = (tmp_path / "saved").iterdir()
    assert HostileShard.load(saved.read_bytes()).num_bytes
    assert fuzz_tars._replay(None, saved, tmp_path).total() > 0
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


@pytest.mark.slow
@pytest.mark.parametrize(
    ("condition", "files", "again"),
    [("8 in files", "file 8", "8 --files 1"), ("{8, 9} <= set(files)", "files 8 to 11, together", "8 --files 4")],
)
def test_files_that_end_the_process_are_named(condition: str, files: str, again: str) -> None:
    code = f"""
import ctypes, multiprocessing
from tools import fuzz_kernel

def render(functions, kernel, contents, *others):
    files = [numbers[content] for content in contents]
    if {condition}:
        ctypes.string_at(0)
    return usual_render(functions, kernel, contents, *others)

def make_file(seed, originals):
    content, rng = usual_make_file(seed, originals)
    numbers[content] = seed & 0xFFFFFFFF
    return content, rng

numbers = {{}}
usual_render, fuzz_kernel._render = fuzz_kernel._render, render
usual_make_file, fuzz_kernel._make_file = fuzz_kernel._make_file, make_file
fork = multiprocessing.get_context("fork")  # A spawned process would not have this fault.
multiprocessing.get_context = lambda _: fork
fuzz_kernel.main(files=20, seed=1, start=0, target=None, sanitize=None)
"""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    expected = f"SIGSEGV: seed 1, {files}; repeat with --seed 1 --start {again} --target {find_targets()[0].name}"
    assert done.stderr.splitlines()[-1] == expected


def fuzz(root: Path, sanitizer: str, num_files: int) -> subprocess.CompletedProcess[str]:
    options = ["--sanitize", sanitizer, "--files", str(num_files), "--seed", "3"]
    command = [sys.executable, str(root / "tools" / "fuzz_kernel.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def can_compile(sanitizer: str) -> bool:
    with suppress(LookupError):
        return sanitizer == "undefined" or bool(find_compiler())
    return False


@pytest.mark.slow
def test_damaged_files_are_read_without_undefined_behavior() -> None:
    # The first kind of check includes the second.
    done = fuzz(ROOT, next(filter(can_compile, ("address", "undefined"))), 5_000)
    assert done.returncode == 0, done.stderr
    assert "no access outside the kernel's memory" in done.stdout


REMOVED = {
    "address": ("scan.c", "+ PADDING)) break;", ")) break;", "heap-buffer-overflow"),
    "undefined": ("head.c", "(count != 1 && count != 3)", "count > 9", "SIGILL|SIGTRAP"),
}
"""For each sanitizer, a bound to remove, its replacement, and a pattern that the report matches."""


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", REMOVED)
def test_a_sanitizer_reports_a_missing_bound(sanitizer: str, tmp_path: Path) -> None:
    if not can_compile(sanitizer):
        pytest.skip("needs clang's AddressSanitizer")
    name, bound, replacement, report = REMOVED[sanitizer]
    for folder in ("shardio", "tests", "tools"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    source = tmp_path / "shardio" / "kernel" / name
    text = source.read_text()
    assert text.count(bound) == 1
    source.write_text(text.replace(bound, replacement))
    done = fuzz(tmp_path, sanitizer, 20_000)
    assert done.returncode == 1
    assert re.search(report, done.stderr)
