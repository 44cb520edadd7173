from __future__ import annotations

import subprocess
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.processes import start_python

# Not an import statement: tools/ is not a package, and mypy knows its files by other names.
train_campaign = import_module("tools.train_campaign")


class Forked:
    """A stand-in for Popen, whose process is forked: it does not import torch again."""

    def __init__(self, command: list[str], cwd: Path, env: Mapping[str, str], **_: Any) -> None:
        self.command, self.errors = command, cwd / "errors"
        self.process = start_python(*command[1:], cwd=cwd, environment=env, output=cwd / "output", errors=self.errors)
        self.pid = self.process.pid

    def communicate(self, timeout: float | None = None) -> tuple[bytes, bytes]:
        self.process.join(timeout)
        if self.process.is_alive():
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.command, timeout)
        return b"", self.errors.read_bytes()

    def poll(self) -> int | None:
        return self.process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode


@pytest.mark.slow
def test_a_run_killed_at_a_random_moment_gives_the_losses_of_an_uninterrupted_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced = SimpleNamespace(**{**vars(subprocess), "Popen": Forked})
    monkeypatch.setattr(train_campaign, "subprocess", replaced)
    train_campaign.main(kills=1, ranks=1, samples=30, seed=1)
    output = capsys.readouterr().out
    assert output.startswith("1 kills of seed 1 (")
    assert output.endswith("all equal the uninterrupted one\n")
