"""Training with several ranks.

Starting ranks takes longer than these runs. So each launch performs several runs, and the tests check the files that
the runs leave. torchrun's agent starts the ranks of one of the launches.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException
from torch.utils.data import DistributedSampler

import shardio
from shardio import ShardMapDataset, StateError
from shardio.train import TrainConfig, evaluate, load_checkpoint
from shardio.train.checkpoint import LOCK, claimed, find_shared_state, save_checkpoint
from shardio.train.step import reported_failures
from shardio.transforms import CenterCrop
from tests.processes import run_launched_ranks
from tests.torchrun import run_by_torchrun
from tests.train.rank_script import Settings, make_model, train_as, train_as_rank
from tests.train.runs import read_figures

SAMPLES, EPOCHS = 21, 2


def _launch(num_ranks: int, directory: Path, runs: list[dict[str, Any]]) -> tuple[Path, str]:
    """Perform training runs on ranks. Return the directory, and the error with which the ranks end, if any."""
    try:
        run_launched_ranks(train_as_rank, runs, num_ranks=num_ranks)
    except (ProcessRaisedException, ProcessExitedException) as error:
        return directory, str(error)
    return directory, ""


PLAIN: dict[str, Any] = {
    "config": {"epochs": 1, "optimizer": "sgd", "accumulate": 2, "checkpoint_every": None},
    "remainder": "drop",
    "is_plain": True,
}
"""Settings of a run that has only full steps and no random numbers. The model handles each sample separately."""

RESUMABLE: dict[str, Any] = {"schedule": "constant", "checkpoint_every": None}
UNEQUAL: dict[str, Any] = {"accumulate": 2, "checkpoint_every": None}


def _run(packed: Path, directory: Path, **options: Any) -> dict[str, Any]:
    directory.mkdir(exist_ok=True)
    config = {"epochs": EPOCHS, "lr": 0.05, "deterministic": True, "checkpoint_every": 2, **options.pop("config", {})}
    return {"source": str(packed), "directory": str(directory), "config": config, **options}


@pytest.fixture(scope="module")
def killed(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Launch three ranks twice: for a whole run, and for one in which a rank is killed between checkpoints of epoch 2.

    With three ranks, the sum of gradients depends on the order, and 21 samples make unequal batches.
    """
    root = tmp_path_factory.mktemp("killed")
    runs = [_run(packed, root / "whole"), _run(packed, root / "killed", num_workers=1, kill=(1, 7))]
    launch = _launch(3, root, runs)
    shutil.copytree(root / "killed", root / "on_one_rank")
    return launch


@pytest.fixture(scope="module")
def by_torchrun(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Launch two ranks with torchrun: they perform the same run twice, and then a run in which one rank fails."""
    root = tmp_path_factory.mktemp("torchrun")
    again = _run(packed, root / "again", config={"epochs": 1, "resume": False}, repeat=2)
    failed = _run(packed, root / "failed", fail=(1, 3), config={"epochs": 1})
    done = run_by_torchrun("tests.train.rank_script:train_runs", [again, failed], num_ranks=2)
    return root, done.stderr if done.returncode else ""


@pytest.fixture(scope="module")
def two_ranks(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Launch two ranks for many runs, the last of which ends with an error."""
    root = tmp_path_factory.mktemp("two-ranks")
    train_as(Settings(**_run(packed, root / "plain-alone", **PLAIN, batch_size=4)))
    stopped = _run(packed, root / "from_one_rank", fail=(0, 4), config={"checkpoint_every": 1})
    with pytest.raises(ArithmeticError):
        train_as(Settings(**stopped))
    runs = [
        _run(packed, root / "busy", is_refused=True),
        _run(packed, root / "unequal", remainder="keep", batch_size=1, is_refused=True),
        _run(packed, root / "from_one_rank", launch=1, config={"checkpoint_every": 1}),
        _run(packed, root / "plain", **PLAIN, batch_size=2),
        _run(packed, root / "torchs", is_torchs=True, config={"epochs": 1, **RESUMABLE}),
        _run(packed, root / "sizes", config=UNEQUAL, sizes=[[4, 4, 4, 4], [4, 4, 4, 2]], is_plain=True),
        _run(packed, root / "nan", nan=(1, 3), config={"log_every": 10, "checkpoint_every": None}),
    ]
    with claimed(root / "busy"):
        return _launch(2, root, runs)


def _read_keys(directory: Path, launch: int) -> list[dict[str, Any]]:
    paths = sorted(directory.glob(f"keys-{launch}-*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def _read_ends(directory: Path, num_ranks: int = 2) -> list[dict[str, Any]]:
    return [json.loads((directory / f"end-{rank}.json").read_text()) for rank in range(num_ranks)]


def _weights(directory: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = load_checkpoint(directory / "last.pt")["model"]
    return weights


def _keys(packed: Path) -> list[str]:
    dataset: Any = ShardMapDataset(packed, fields="key")
    return [dataset[index] for index in range(SAMPLES)]


@pytest.mark.slow
def test_ranks_validate_exactly(packed: Path, killed: tuple[Path, str]) -> None:
    """With shardio and with torch alone, scores equal those of one process, although ranks pad with repeats."""
    directory = killed[0] / "whole"
    result = load_checkpoint(directory / "last.pt")["results"][-1]
    model = make_model()
    model.load_state_dict(_weights(directory))
    dataset = ShardMapDataset(packed, transform=CenterCrop(16))
    config = TrainConfig(precision="fp32", device="cpu")
    score = evaluate(model, shardio.DataLoader(dataset, 4), config)
    assert (score.num_images, score.accuracy) == (SAMPLES, result["val_accuracy"])
    assert result["val_loss"] == pytest.approx(score.loss, abs=1e-6)
    images, labels = next(iter(shardio.DataLoader(dataset, SAMPLES)))
    mean, std = (torch.tensor(figures).reshape(3, 1, 1) for figures in (config.mean, config.std))
    with torch.no_grad():
        outputs = model.eval()((images / 255 - mean) / std)
    assert score.loss == pytest.approx(float(nn.functional.cross_entropy(outputs, labels)), abs=1e-6)


@pytest.mark.slow
def test_ranks_resume_after_a_kill_to_the_last_bit(packed: Path, killed: tuple[Path, str]) -> None:
    directory, failure = killed
    run, whole = directory / "killed", directory / "whole"
    assert "signal SIGKILL" in failure
    assert _launch(3, directory, [_run(packed, run, num_workers=1, launch=1)]) == (directory, "")
    state = load_checkpoint(directory / "on_one_rank" / "last.pt")  # The copy was made before the resumption.
    assert (state["step"]["num_taken"], state["is_within_epoch"]) == (6, True)
    assert read_figures(run) == read_figures(whole)
    one, other = _weights(run), _weights(whole)
    assert all(torch.equal(one[name], other[name]) for name in other)
    assert _read_ends(run, 3) == _read_ends(whole, 3)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "num_steps", "after"), [(3, 6, 1), (1, 3, 2)])
def test_another_number_of_ranks_resumes_a_run_and_sees_each_sample_once(
    packed: Path, killed: tuple[Path, str], two_ranks: tuple[Path, str], before: int, num_steps: int, after: int
) -> None:
    """Padding repeats the first samples of the epoch, but only until all ranks have the same number of samples."""
    directory = killed[0] / "on_one_rank" if after == 1 else two_ranks[0] / "from_one_rank"
    if after == 1:
        train_as(Settings(**_run(packed, directory, launch=1)))
    expected = set(_keys(packed))
    for epoch in range(EPOCHS):
        lines = [line for line in _read_keys(directory, 0) if line["step"] <= num_steps], _read_keys(directory, 1)
        first, rest = ([key for line in some if line["epoch"] == epoch for key in line["keys"]] for some in lines)
        assert {*first, *rest} == expected
        padding = -(SAMPLES - len(first)) % after if rest else -SAMPLES % before
        assert len(first) + len(rest) == SAMPLES + padding


@pytest.mark.slow
def test_one_rank_resumes_a_run_of_two_in_torchs_order_after_an_epoch(
    packed: Path, two_ranks: tuple[Path, str]
) -> None:
    directory = two_ranks[0] / "torchs"
    state = load_checkpoint(directory / "last.pt")
    one, other = (rank["loader"] for rank in state["ranks"])
    assert one != other
    assert find_shared_state([one, {**other, "_sampler_epoch": 7}]) is None
    settings = Settings(**_run(packed, directory, launch=1, is_torchs=True, config=RESUMABLE))
    message = r"from a run with a world size of 2, and cannot be resumed with 1: it was saved within an epoch"
    # Even with equal states, the ranks may have different samples left.
    for ranks in (state["ranks"], [state["ranks"][0]] * 2):
        save_checkpoint(directory / "last.pt", {**state, "is_within_epoch": True, "ranks": ranks})
        with pytest.raises(StateError, match=message):
            train_as(settings)
    save_checkpoint(directory / "last.pt", state)
    train_as(settings)
    keys = _keys(packed)
    sampler: Any = DistributedSampler(range(SAMPLES), 1, 0)  # type: ignore[arg-type]  # a range is a dataset
    first, second = (
        [key for line in _read_keys(directory, epoch) if line["epoch"] == epoch for key in line["keys"]]
        for epoch in range(2)
    )
    assert set(first) == set(keys)
    sampler.set_epoch(1)
    assert second == [keys[index] for index in sampler]


@pytest.mark.slow
def test_two_ranks_learn_what_one_learns_from_batches_twice_as_large_and_keep_equal_weights(
    two_ranks: tuple[Path, str],
) -> None:
    one, other = _weights(two_ranks[0] / "plain-alone"), _weights(two_ranks[0] / "plain")
    for name, weight in one.items():
        torch.testing.assert_close(weight, other[name], rtol=0, atol=1e-6)
    start = make_model(is_plain=True).state_dict()
    assert any((start[name] - weight).abs().max() > 1e-3 for name, weight in one.items())
    one, other = _read_ends(two_ranks[0] / "sizes")  # The batches differ in size.
    assert one["weights"] == other["weights"]


@pytest.mark.slow
def test_ranks_can_train_again_and_a_rank_that_fails_ends_the_job_with_its_own_error(
    by_torchrun: tuple[Path, str],
) -> None:
    """Ranks leave the group after each run and rejoin at different times. The score is computed over all ranks."""
    directory, failure = by_torchrun
    one, other = _read_ends(directory / "again")
    assert one == other
    assert one["num_images"] == SAMPLES
    cause = failure[failure.index("Root Cause") :]
    assert "ArithmeticError: rank 1 fails on purpose" in cause
    assert "rank      : 1" in cause


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (RuntimeError("[gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:13733."), True),
        (dist.DistBackendError("NCCL error: remote process exited or there was a network error"), True),
        (RuntimeError("CUDA out of memory"), False),
    ],
)
def test_a_rank_that_lost_another_one_reports_that_in_a_later_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, *, waits: bool
) -> None:
    """torchrun names the first failure: it compares whole seconds and, within a second, picks the lowest rank."""
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error")}.items():
        monkeypatch.setenv(name, value)
    clock = [100.9]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.append(clock.pop() + seconds))
    with pytest.raises(RuntimeError), reported_failures():
        raise error
    written = json.loads((tmp_path / "error").read_text())["message"]
    assert str(error) in written["message"]
    assert int(written["extraInfo"]["timestamp"]) == (101 if waits else 100)


def _assert_all_ranks_raise(directory: Path, message: str) -> None:
    """When a rank ends, the launcher may end the other rank before that rank writes its own error."""
    errors = [path.read_text() for path in directory.glob("error-*.txt")]
    assert errors
    assert all(error.startswith(message) for error in errors), errors


@pytest.mark.slow
def test_all_ranks_raise_the_error_of_one(two_ranks: tuple[Path, str]) -> None:
    """With remainder='keep', the ranks have 11 and 10 of the 21 samples, in batches of one sample.

    The gradients of the NaN loss make the other rank's next loss NaN. Both losses are read together, some steps later.
    """
    root, failure = two_ranks
    busy = root / "busy"
    holder = f"process {os.getpid()} on {socket.gethostname()}"
    _assert_all_ranks_raise(busy, f"BusyError: {busy} is in use by {holder}, which is training there")
    assert {path.name for path in busy.iterdir()} == {LOCK, "error-0.txt", "error-1.txt"}
    message = "ValueError: all ranks must have the same number of batches, got [11, 10]"
    _assert_all_ranks_raise(root / "unequal", message)
    assert "NonFiniteLossError" in failure
    (keys,) = [line["keys"] for line in _read_keys(root / "nan", 0) if line["step"] == 3 and line["rank"] == 1]
    message = f"NonFiniteLossError: the loss of step 3 on rank 1 is nan (samples: {', '.join(keys)}"
    _assert_all_ranks_raise(root / "nan", message)
