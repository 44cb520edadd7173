from __future__ import annotations

from importlib import import_module

import pytest

# Not an import statement: tools/ is not a package, and mypy knows its files by other names.
train_campaign = import_module("tools.train_campaign")


def test_a_run_killed_at_a_random_moment_gives_the_losses_of_an_uninterrupted_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    train_campaign.main(kills=1, ranks=1, samples=30, seed=1)
    output = capsys.readouterr().out
    assert output.startswith("1 kills of seed 1 (")
    assert output.endswith("all equal the uninterrupted one\n")
