"""The progress of long work: a bar on a terminal, otherwise lines."""

from __future__ import annotations

import io
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardio.cli import terminal
from shardio.cli.terminal import ProgressReporter


class Terminal(io.StringIO):
    """Standard error of a terminal, in memory."""

    def isatty(self) -> bool:
        return True


def test_reports_add_up_whichever_threads_send_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "LINE_EVERY_S", 0.0)
    with ProgressReporter("verifying", "shards") as reporter, ThreadPoolExecutor(4) as pool:
        reporter.start(100)
        list(pool.map(lambda number: reporter.advance(1, 2000 * number, 3), range(100)))
    assert (reporter.num_done, reporter.num_bytes, reporter.num_samples) == (100, 2000 * 4950, 300)
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == ""
    assert len(lines) == 100
    assert all(
        re.fullmatch(r"verifying: \d+ of 100 shards, .+ shards/s, .+/s, about \d+ s left", line) for line in lines[1:]
    )
    assert lines[-1].startswith("verifying: 100 of 100 shards")
    assert lines[-1].endswith("about 0 s left")


def test_work_that_ends_early_shows_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressReporter("hashing", "images") as reporter:
        reporter.start(2)
        reporter.advance(2)
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_a_bar_and_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(terminal, "LINE_EVERY_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    with ProgressReporter("packing") as reporter:
        reporter.start(20, 10_000)
        reporter.advance(20, 10_000)
    assert "packing" in terminal.getvalue()
    assert "20/20" in terminal.getvalue()
    assert "about" not in terminal.getvalue()


def test_no_bar_remains_after_an_empty_work(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with ProgressReporter("hashing", "images") as reporter:
        reporter.start(0)
    assert terminal.getvalue() == ""
