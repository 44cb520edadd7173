from __future__ import annotations

import os
import signal
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.images.fuzz_laws import LawBrokenError
from tests.processes import forkserver_context, run_python

# Not an import statement: tools/ is not a package, and mypy knows its files by other names.
fuzz_images = import_module("tools.fuzz_images")

SCRIPT = Path(__file__).parents[2] / "tools" / "fuzz_images.py"


@pytest.mark.slow
def test_a_campaign_says_how_many_files_are_read_rightly(tmp_path: Path) -> None:
    done = run_python(SCRIPT, "--files", 60, "--jobs", 1, "--seed", 3, "--save", tmp_path, cwd=SCRIPT.parent)
    assert done.returncode == 0, done.stdout
    assert "the laws hold for all 60 files of seed 3" in done.stdout
    assert "reading: the pixels of a full decode" in done.stdout


def test_a_file_is_that_of_its_seed() -> None:
    files = [fuzz_images.make_damaged_file(seed, fuzz_images.ORIGINALS)[0] for seed in range(200)]
    assert files == [fuzz_images.make_damaged_file(seed, fuzz_images.ORIGINALS)[0] for seed in range(200)]
    assert len(set(files)) > 190


def _run_in_this_process(seeds: range, num_jobs: int, folder: Path) -> Any:
    note = folder / "note"
    read, write = fuzz_images.multiprocessing.Pipe(duplex=False)
    fuzz_images.run_seeds(seeds, write, note)
    while read.poll():
        yield read.recv(), note


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run campaigns in this process, where functions can be replaced."""
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(fuzz_images, "run_jobs", _run_in_this_process)
    monkeypatch.setattr(fuzz_images.signal, "signal", lambda *_: before)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("error", [LawBrokenError("other pixels"), KeyError(6)])
def test_a_file_that_breaks_a_law_is_saved_and_named_by_its_seed(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong, *_ = fuzz_images.make_damaged_file(37, fuzz_images.ORIGINALS)

    def check_file(content: bytes, made_of: Any, rng: Any) -> list[str]:
        if content == wrong:
            raise error
        return ["fine"]

    monkeypatch.setattr(fuzz_images, "check_file", check_file)
    with pytest.raises(typer.Exit) as exit_info:
        fuzz_images.main(files=100, seed=0, jobs=1, save=tmp_path / "kept", only=None)
    assert exit_info.value.exit_code == 1
    out = capsys.readouterr().out
    assert f"{type(error).__name__}: {error} (seed 37)" in out
    assert "37  fine" in out
    assert [path.read_bytes() for path in (tmp_path / "kept").iterdir()] == [wrong]
    with pytest.raises(type(error)):
        fuzz_images.main(only=37, save=tmp_path / "only")
    assert (tmp_path / "only" / "seed-37").read_bytes() == wrong


def _die(seeds: range, reports: Any, path: Path) -> None:
    path.write_bytes(b"the last file")
    os.kill(os.getpid(), signal.SIGSEGV)


def _hang(seeds: range, reports: Any, path: Path) -> None:
    path.write_bytes(b"the last file")
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    time.sleep(600)  # The alarm ends it.


@pytest.mark.parametrize(("run", "said"), [(_die, "the process ended by SIGSEGV"), (_hang, "longer than 5 s")])
def test_a_crash_or_a_hang_is_a_failure_and_the_file_stays(
    run: Any, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    context = forkserver_context()
    monkeypatch.setattr(fuzz_images.multiprocessing, "get_context", lambda _: context)
    monkeypatch.setattr(fuzz_images, "run_seeds", run)
    ((report, note),) = fuzz_images.run_jobs(range(10), 1, tmp_path)
    assert said in report.wrong
    assert note.read_bytes() == b"the last file"
