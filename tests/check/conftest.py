"""Run the ranks of a checked script in the test process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from unittest import mock

import pytest
from typer.testing import CliRunner, Result

from shardio.check import ranks
from shardio.check.ranks import RankCommand
from shardio.cli.main import app

RunCheck = Callable[..., Result]


@pytest.fixture
def run_check(monkeypatch: pytest.MonkeyPatch) -> RunCheck:
    def run_ranks(commands: Sequence[RankCommand], name: str) -> None:
        for rank in commands:
            *_, target, directory, epochs, key = rank.command
            with mock.patch.dict(os.environ, rank.environment):
                ranks.run_rank(target, directory, int(epochs), key or None)

    monkeypatch.setattr(ranks, "run_ranks", run_ranks)
    return lambda *arguments: CliRunner().invoke(app, ["check", *map(str, arguments)])
