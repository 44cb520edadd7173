from __future__ import annotations

from importlib import import_module

import pytest

# Not an import statement: tools/ is no package, and mypy knows its files by another name.
train_campaign = import_module("tools.train_campaign")


def test_a_run_that_is_killed_at_a_random_moment_gives_the_undisturbed_losses(
    capsys: pytest.CaptureFixture[str],
) -> None:
    train_campaign.main(kills=1, ranks=1, samples=30, seed=1)
    said = capsys.readouterr().out
    assert said.startswith("1 kills of seed 1 (")
    assert said.endswith("all equal the undisturbed one\n")
