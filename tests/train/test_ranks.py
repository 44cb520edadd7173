"""Training by several ranks, started by torchrun."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardio
from shardio import ShardMapDataset
from shardio.train import TrainConfig, evaluate, load_checkpoint
from shardio.train.claims import LOCK, claimed
from shardio.transforms import CenterCrop
from shardio.world import World
from tests.train.rank_script import make_model
from tests.train.runs import read_figures

SCRIPT = Path(__file__).with_name("rank_script.py")
ROOT = Path(shardio.__file__).parents[1]
SAMPLES, EPOCHS = 21, 2


def _launch(num_ranks: int, settings: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Start the script by torchrun, or plainly for one rank."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)] if num_ranks > 1 else []
    )
    return subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), json.dumps(settings)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


def _settings(packed: Path, directory: Path, **options: Any) -> dict[str, Any]:
    config = {"epochs": EPOCHS, "lr": 0.05, "deterministic": True, "checkpoint_every": 2, **options.pop("config", {})}
    return {"source": str(packed), "directory": str(directory), "config": config, **options}


def _read_keys(directory: Path, launch: int) -> list[dict[str, Any]]:
    paths = sorted(directory.glob(f"keys-{launch}-*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def _weights(directory: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = load_checkpoint(directory / "last.pt")["model"]
    return weights


def _assert_validated_exactly(directory: Path, packed: Path) -> None:
    """Compare a run's last validation with that of a single process, by shardio and by torch alone.

    Counts are equal exactly, the mean loss within 1e-6, although ranks repeat samples to have equally many.
    """
    result = load_checkpoint(directory / "last.pt")["results"][-1]
    model = make_model()
    model.load_state_dict(_weights(directory))
    dataset = ShardMapDataset(packed, transform=CenterCrop(16))
    config = TrainConfig(precision="fp32", device="cpu")
    score = evaluate(model, shardio.DataLoader(dataset, 4), config)
    assert score.num_images == SAMPLES
    assert result["val_accuracy"] == score.accuracy
    assert result["val_loss"] == pytest.approx(score.loss, abs=1e-6)
    images, labels = next(iter(shardio.DataLoader(dataset, SAMPLES)))
    mean, std = (torch.tensor(figures).reshape(3, 1, 1) for figures in (config.mean, config.std))
    with torch.no_grad():
        outputs = model.eval()((images / 255 - mean) / std)
    assert score.loss == pytest.approx(float(nn.functional.cross_entropy(outputs, labels)), abs=1e-6)


def test_ranks_validate_exactly_and_go_on_after_a_kill_to_the_last_bit(packed: Path, tmp_path: Path) -> None:
    """Three ranks, one of them killed in the second epoch, between two checkpoints.

    Of two the sum of gradients would not depend on who adds first; three do not share 21 samples in equal batches.
    """
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = _launch(3, _settings(packed, whole))
    assert done.returncode == 0, done.stderr
    _assert_validated_exactly(whole, packed)
    done = _launch(3, _settings(packed, killed, kill=(1, 7)))
    assert done.returncode != 0
    state = load_checkpoint(killed / "last.pt")
    assert state["step"]["num_taken"] == 6
    assert state["is_within_epoch"]
    done = _launch(3, _settings(packed, killed, launch=1))
    assert done.returncode == 0, done.stderr
    assert read_figures(killed) == read_figures(whole)
    one, other = _weights(killed), _weights(whole)
    assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_resumed_on_another_number_of_ranks_each_sample_is_still_seen_once(
    packed: Path, tmp_path: Path, before: int, after: int
) -> None:
    """Of the interrupted epoch and of the next one; what padding repeats are the first of what was left."""
    done = _launch(before, _settings(packed, tmp_path, kill=(0, 4), config={"checkpoint_every": 1}))
    assert done.returncode != 0
    num_steps = load_checkpoint(tmp_path / "last.pt")["step"]["num_taken"]
    assert num_steps == 3
    done = _launch(after, _settings(packed, tmp_path, launch=1, config={"checkpoint_every": 1}))
    assert done.returncode == 0, done.stderr
    lines = [line for line in _read_keys(tmp_path, 0) if line["step"] <= num_steps] + _read_keys(tmp_path, 1)
    keys = ShardMapDataset(packed, fields="key")
    expected = {keys[number] for number in range(len(keys))}
    assert len(expected) == SAMPLES
    for epoch in range(EPOCHS):
        found = Counter(key for line in lines if line["epoch"] == epoch for key in line["keys"])
        left = SAMPLES - (num_steps * before * 2 if epoch == 0 else 0)
        assert set(found) == expected
        assert sum(found.values()) - SAMPLES == -left % after, "what pads to equal ranks, and no more"


def test_two_ranks_learn_what_one_learns_from_batches_twice_as_large(packed: Path, tmp_path: Path) -> None:
    """With a full number of steps, and a model that neither looks at its batch nor draws random numbers."""
    config = {"epochs": 1, "optimizer": "sgd", "accumulate": 2, "checkpoint_every": None}
    for num_ranks, batch_size in ((1, 4), (2, 2)):
        settings = _settings(packed, tmp_path / str(num_ranks), config=config, batch_size=batch_size, remainder="drop")
        done = _launch(num_ranks, {**settings, "is_plain": True})
        assert done.returncode == 0, done.stderr
    one, other = _weights(tmp_path / "1"), _weights(tmp_path / "2")
    for name, weight in one.items():
        torch.testing.assert_close(weight, other[name], rtol=0, atol=1e-6)
    start = make_model(is_plain=True).state_dict()
    assert any((start[name] - weight).abs().max() > 1e-3 for name, weight in one.items())


def test_a_rank_that_fails_takes_the_job_down_with_its_own_error(packed: Path, tmp_path: Path) -> None:
    """Long before any time-out of the others, which wait for its gradients."""
    start = time.monotonic()
    done = _launch(2, _settings(packed, tmp_path, fail=(1, 3)))
    assert done.returncode != 0
    assert time.monotonic() - start < 120
    cause = done.stderr[done.stderr.index("Root Cause") :]
    assert "ArithmeticError: rank 1 has had enough" in cause
    assert "rank      : 1" in cause


def test_ranks_with_unequal_numbers_of_batches_are_refused_before_they_wait_for_each_other(
    packed: Path, tmp_path: Path
) -> None:
    """21 samples, kept as they are: 11 and 10, which are 11 batches of one, and 10."""
    done = _launch(2, _settings(packed, tmp_path, remainder="keep", batch_size=1))
    assert done.returncode != 0
    assert "ranks must have equally many batches, and have [11, 10]" in done.stderr


def test_ranks_that_are_refused_a_directory_say_who_has_it(packed: Path, tmp_path: Path) -> None:
    """All ranks raise. The launcher ends the others once it sees that one has, perhaps before they have said so."""
    with claimed(tmp_path, World(rank=0, world_size=1)):
        done = _launch(2, _settings(packed, tmp_path))
    assert done.returncode != 0
    said = f"{tmp_path} is in use: process {os.getpid()} on {socket.gethostname()} trains into it"
    errors = re.findall(r"\[rank\d\]:.*?(\w+Error: .*)", done.stderr)
    assert errors
    assert all(error.startswith(f"BusyError: {said}") for error in errors), errors
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_ranks_that_train_again_and_then_measure_join_anew(packed: Path, tmp_path: Path) -> None:
    """Each time they part, and come back at different times; what they measure is of all of them."""
    settings = _settings(packed, tmp_path, config={"epochs": 1, "resume": False}, repeat=3)
    done = _launch(2, settings)
    assert done.returncode == 0, done.stderr
    ends = [json.loads((tmp_path / f"end-{rank}.json").read_text()) for rank in range(2)]
    assert ends[0] == ends[1]
    assert ends[0]["num_images"] == SAMPLES


def test_ranks_with_batches_of_other_sizes_keep_the_same_weights(packed: Path, tmp_path: Path) -> None:
    sizes = [[4, 4, 4, 4], [4, 4, 4, 2]]
    config = {"accumulate": 2, "checkpoint_every": None}
    done = _launch(2, _settings(packed, tmp_path, config=config, sizes=sizes, is_plain=True))
    assert done.returncode == 0, done.stderr
    ends = [json.loads((tmp_path / f"end-{rank}.json").read_text()) for rank in range(2)]
    assert ends[0]["weights"] == ends[1]["weights"]


def test_a_loss_that_is_nan_is_named_by_the_rank_that_has_it(packed: Path, tmp_path: Path) -> None:
    """Its gradients spoil the others' losses a step later; they are read together, some steps later."""
    done = _launch(2, _settings(packed, tmp_path, nan=(1, 3), config={"log_every": 10, "checkpoint_every": None}))
    assert done.returncode != 0
    (keys,) = [line["keys"] for line in _read_keys(tmp_path, 0) if line["step"] == 3 and line["rank"] == 1]
    assert f"the loss of step 3 on rank 1 is nan, of a batch of the samples {', '.join(keys)}" in done.stderr
