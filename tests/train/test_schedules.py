from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CyclicLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from shardio.train import TrainConfig
from shardio.train.optimizers import LrSchedule, plan_rates

STEPS_PER_EPOCH, EPOCHS, LR = 13, 6, 0.3
NUM_STEPS = STEPS_PER_EPOCH * EPOCHS


def _sgd(lr: float = LR) -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr)


def _config(**options: Any) -> TrainConfig:
    return TrainConfig(**{"epochs": EPOCHS, "lr": LR, "device": "cpu", **options})


def _take(optimizer: torch.optim.Optimizer, schedule: Any, num_steps: int) -> list[float]:
    rates = []
    for _ in range(num_steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return rates


def _one_cycle(optimizer: torch.optim.SGD, warmup: float) -> Any:
    return OneCycleLR(optimizer, LR, total_steps=NUM_STEPS, pct_start=warmup, cycle_momentum=False)


def _cosine(optimizer: torch.optim.SGD, warmup: float) -> Any:
    num_warm = round(warmup * NUM_STEPS)
    rise = LinearLR(optimizer, 1 / (num_warm + 1), total_iters=num_warm)
    return SequentialLR(optimizer, [rise, CosineAnnealingLR(optimizer, NUM_STEPS - num_warm)], [num_warm])


@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")  # SequentialLR of torch 2.6 passes it.
@pytest.mark.parametrize("warmup", [0.05, 0.3, 0.5])
@pytest.mark.parametrize(("name", "make"), [("onecycle", _one_cycle), ("cosine", _cosine)])
def test_rates_that_rise_once_equal_those_of_torchs_schedulers(
    name: str, make: Callable[[torch.optim.SGD, float], Any], warmup: float
) -> None:
    optimizer, other = _sgd(), _sgd()
    schedule = LrSchedule(optimizer, _config(schedule=name, warmup=warmup), STEPS_PER_EPOCH)
    assert _take(optimizer, schedule, NUM_STEPS) == pytest.approx(
        _take(other, make(other, warmup), NUM_STEPS), rel=1e-9
    )


@pytest.mark.parametrize("period", [2, 2.5, 4])
def test_periodic_rates_equal_those_of_torchs_schedulers(period: float) -> None:
    num_steps = round(period * STEPS_PER_EPOCH)
    others: dict[str, Callable[[torch.optim.SGD], Any]] = {
        "step": lambda optimizer: StepLR(optimizer, num_steps, 0.1),
        "cyclic": lambda optimizer: CyclicLR(optimizer, LR / 10, LR, num_steps // 2, cycle_momentum=False),
    }
    for name, make in others.items():
        optimizer, other = _sgd(), _sgd()
        schedule = LrSchedule(optimizer, _config(schedule=name, period=period), STEPS_PER_EPOCH)
        assert _take(optimizer, schedule, NUM_STEPS) == pytest.approx(_take(other, make(other), NUM_STEPS), rel=1e-9)


@pytest.mark.parametrize("period", [1, 2, 3])
def test_plateau_is_torchs_and_depends_on_the_losses_of_epochs(period: int) -> None:
    losses = [3.0, 2.0, 2.0, 2.1, 2.2, 1.9, 2.0, 2.0, 2.0, 2.0, 2.0]
    optimizer, other = _sgd(), _sgd()
    schedule = LrSchedule(optimizer, _config(schedule="plateau", period=period), STEPS_PER_EPOCH)
    oracle = ReduceLROnPlateau(other, factor=0.1, patience=period - 1)
    rates = []
    for loss in losses:
        _take(optimizer, schedule, 3)
        schedule.end_epoch(loss)
        oracle.step(loss)
        rates.append(float(optimizer.param_groups[0]["lr"]))
        assert rates[-1] == pytest.approx(other.param_groups[0]["lr"])
    assert min(rates) < LR / 5


def test_a_constant_rate_does_not_change() -> None:
    optimizer = _sgd()
    assert set(_take(optimizer, LrSchedule(optimizer, _config(schedule="constant"), 5), 30)) == {LR}


@pytest.mark.parametrize("name", ["onecycle", "cosine", "cyclic", "step", "constant"])
def test_the_plan_predicts_the_actual_rates(name: str) -> None:
    optimizer, config = _sgd(), _config(schedule=name)
    taken = _take(optimizer, LrSchedule(optimizer, config, STEPS_PER_EPOCH), NUM_STEPS)
    assert plan_rates(config, STEPS_PER_EPOCH) == list(enumerate(taken))
    sparse = plan_rates(config, STEPS_PER_EPOCH, max_points=10)
    assert len(sparse) <= 10
    assert set(sparse) <= set(enumerate(taken))


@pytest.mark.parametrize("name", ["onecycle", "cosine", "cyclic", "step", "constant"])
@pytest.mark.parametrize(("epochs", "steps_per_epoch"), [(1, 1), (1, 2), (2, 1), (3, 1)])
def test_the_shortest_runs_have_valid_rates(name: str, epochs: int, steps_per_epoch: int) -> None:
    """No rate of a planned step is 0. Steps after the plan, which a longer epoch may have, are not an error."""
    optimizer = _sgd()
    schedule = LrSchedule(optimizer, _config(epochs=epochs, schedule=name), steps_per_epoch)
    rates = _take(optimizer, schedule, epochs * steps_per_epoch + 2)
    assert all(0 < rate <= LR for rate in rates[: epochs * steps_per_epoch])
    assert all(0 <= rate <= LR for rate in rates)


@pytest.mark.parametrize("name", ["onecycle", "cosine", "cyclic", "step", "plateau", "constant"])
@pytest.mark.parametrize("num_before", [0, 1, 20, NUM_STEPS - 1])
def test_stopped_and_resumed_equals_uninterrupted(name: str, num_before: int) -> None:
    def drive(optimizer: torch.optim.SGD, schedule: LrSchedule, steps: range) -> list[float]:
        rates = []
        for step in steps:
            rates += _take(optimizer, schedule, 1)
            if (step + 1) % STEPS_PER_EPOCH == 0:
                schedule.end_epoch(1.0)
        return rates

    config = _config(schedule=name, period=1)
    optimizer = _sgd()
    whole = drive(optimizer, LrSchedule(optimizer, config, STEPS_PER_EPOCH), range(NUM_STEPS))
    optimizer = _sgd()
    schedule = LrSchedule(optimizer, config, STEPS_PER_EPOCH)
    drive(optimizer, schedule, range(num_before))
    states = copy.deepcopy((optimizer.state_dict(), schedule.state_dict()))
    optimizer = _sgd()
    schedule = LrSchedule(optimizer, config, STEPS_PER_EPOCH)
    optimizer.load_state_dict(states[0])
    schedule.load_state_dict(states[1])
    assert drive(optimizer, schedule, range(num_before, NUM_STEPS)) == whole[num_before:]


@pytest.mark.parametrize("name", ["onecycle", "cosine", "cyclic", "step"])
def test_on_another_number_of_ranks_the_same_share_of_the_plan_remains(name: str) -> None:
    """Half as many ranks have twice as many steps: step k of 78 becomes step 2 k of 156."""
    config, num_before = _config(schedule=name), 31
    optimizer = _sgd()
    schedule = LrSchedule(optimizer, config, STEPS_PER_EPOCH)
    _take(optimizer, schedule, num_before)
    state = copy.deepcopy(schedule.state_dict())
    optimizer = _sgd()
    schedule = LrSchedule(optimizer, config, 2 * STEPS_PER_EPOCH)
    schedule.load_state_dict(state)
    left = 2 * (NUM_STEPS - num_before)
    planned = [rate for _, rate in plan_rates(config, 2 * STEPS_PER_EPOCH)]
    assert _take(optimizer, schedule, left) == planned[2 * num_before :]


def test_parameter_groups_keep_their_own_highest_rates() -> None:
    weights = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [weights[0]], "lr": 1.0}, {"params": [weights[1]], "lr": 0.01}])
    schedule = LrSchedule(optimizer, _config(schedule="cosine"), STEPS_PER_EPOCH)
    for _ in range(20):
        optimizer.step()
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(100 * optimizer.param_groups[1]["lr"])
