"""``shardio train`` with recipes, mixing and people's own transforms."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.train_command import LINE, train_here


def test_a_recipe_and_mixing_train_and_must_not_change_when_a_run_resumes(packed: Path, tmp_path: Path) -> None:
    options = ["--out", str(tmp_path / "run"), "--num-workers", "0", "--batch-size", "8", "--val-share", "0.5"]
    recipe = ["--recipe", "trivial_augment", "--mixup", "0.2", "--cutmix", "1", "--label-smoothing", "0.1"]
    done = train_here(packed, "--epochs", "1", *options, *recipe)
    assert done.exit_code == 0, done.stderr
    resumed = train_here(packed, "--epochs", "2", *options, *recipe)
    assert [line.split()[1] for line in resumed.stdout.splitlines() if LINE.fullmatch(line)] == ["1"]
    recipe[1] = "randaugment"
    changed = train_here(packed, "--epochs", "3", *options, *recipe)
    assert changed.exit_code == 1
    assert "recipe was 'trivial_augment' and is now 'randaugment'" in str(changed.exception)


def test_your_own_transform_trains(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from shardio.transforms import Compose, RandomInvert, RandomResizedCrop\n"
        "def make(size): return Compose([RandomResizedCrop(size), RandomInvert()])\n"
    )
    done = train_here(packed, "--epochs", "1", "--num-workers", "0", "--transform", f"{tmp_path / 'mine.py'}:make")
    assert done.exit_code == 0, done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--recipe", "trivial_augmen"], "did you mean trivial_augment"),
        (["--recipe", "simclr"], "simclr makes several crops of each image"),
        (["--recipe", "cifar", "--transform", "a.py:b"], "pass either --recipe or --transform"),
        (["--mixup", "-1"], "mixup"),
    ],
)
def test_recipes_that_do_not_fit_are_usage_errors(packed: Path, options: list[str], message: str) -> None:
    done = train_here(packed, *options)
    assert done.exit_code == 2
    assert message in " ".join(re.sub(r"[│\n]", " ", done.stderr).split())
