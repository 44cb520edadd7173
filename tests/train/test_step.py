"""One training step: accumulation, clipping, precisions, state, seeds, memory, and groups of batches."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from operator import length_hint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DistributedSampler, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from shardio import DataLoader, DevicePrefetcher, EpochSampler, ShardDataset, ShardMapDataset, StreamDataset, check
from shardio.train import TrainStep, in_groups, memory_difference, seed_everything
from shardio.train.checkpoint import algorithms, load_random_states, random_states
from shardio.train.loop import measure_memory
from tests.device.late_stream import prefetch_late
from tests.processes import assert_passes_in_fresh_process
from tests.train.runs import join, make_floats, make_network, weights_of


def _sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_are_clipped_by_their_total_norm(accumulate: int) -> None:
    model, rate = make_network(), 0.1
    batches, before = make_floats([4] * accumulate), weights_of(model)
    loss = nn.functional.cross_entropy(model(join(batches)[0]), join(batches)[1])
    norm = float(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]).norm())
    step = TrainStep(model, _sgd(model, rate), accumulate=accumulate, clip_norm=norm / 5)
    for number, batch in enumerate(batches):
        step(*batch, ends_step=number + 1 == accumulate)
    moved = torch.cat([(a - b).flatten() for a, b in zip(before, weights_of(model), strict=True)])
    assert float(moved.norm()) == pytest.approx(rate * norm / 5, rel=1e-3)
    assert step.grad_norm is not None
    assert float(step.grad_norm) == pytest.approx(norm, rel=1e-4)


def test_each_gradient_is_clipped_by_its_magnitude() -> None:
    model, batch = make_network(), make_floats([8])[0]
    gradients = torch.autograd.grad(nn.functional.cross_entropy(model(batch[0]), batch[1]), list(model.parameters()))
    before = weights_of(model)
    TrainStep(model, _sgd(model, 1.0), clip_value=0.01)(*batch)
    for old, new, gradient in zip(before, weights_of(model), gradients, strict=True):
        torch.testing.assert_close(old - new, gradient.clamp(-0.01, 0.01), rtol=1e-4, atol=1e-6)
    assert max(float(gradient.abs().max()) for gradient in gradients) > 0.02


@pytest.mark.parametrize("fused", [False, True])
def test_half_precision_skips_a_step_whose_gradients_overflow_and_lowers_its_scale(fused: bool) -> None:
    model, (batch,) = make_network(), make_floats([4])
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=fused)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    step = TrainStep(model, optimizer, schedule=schedule, precision="fp16")
    step.scaler.load_state_dict({**step.scaler.state_dict(), "scale": 2.0**40})
    before = weights_of(model)
    step(*batch)
    assert (step.num_taken, step.num_skipped) == (0, 1)
    assert step.scaler.get_scale() == 2.0**39
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(model), strict=True))
    assert schedule.last_epoch == 0
    while not step.num_taken:
        step(*batch)
    assert step.num_skipped > 1
    assert schedule.last_epoch == 1
    assert not any(torch.equal(a, b) for a, b in zip(before, weights_of(model), strict=True))


def test_gradients_are_unscaled_before_they_are_clipped() -> None:
    norms, (batch,) = list[float](), make_floats([4])
    for precision in ("fp16", "fp32"):
        step = TrainStep(model := make_network(), _sgd(model), precision=precision, clip_norm=1e-3)
        step(*batch)
        norms.append(float(step.grad_norm))  # type: ignore[arg-type]  # It is not None.
        assert (step.scaler.get_scale() > 1000) == (precision == "fp16")
    assert norms[0] == pytest.approx(norms[1], rel=0.02)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_the_model_computes_in_the_precision_and_keeps_its_weights(precision: Any, dtype: str) -> None:
    model, (batch,) = make_network(), make_floats([4])
    outputs, loss = TrainStep(model, _sgd(model), precision=precision)(*batch)
    assert (outputs.dtype, outputs.requires_grad, loss.requires_grad) == (getattr(torch, dtype), False, False)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_an_optimizer_stays_as_fused_as_it_was_made_and_keeps_no_hook() -> None:
    """A checkpoint may come from a different device."""
    (batch,), models = make_floats([4]), (make_network(), make_network())
    optimizers = [torch.optim.AdamW(each.parameters(), 0.01, fused=each is models[0]) for each in models]
    fused, plain = steps = [TrainStep(*each) for each in zip(models, optimizers, strict=True)]
    fused(*batch)
    for one, other in ((fused, plain), (plain, fused)):
        other.load_state_dict(one.state_dict())
        other(*batch)
        assert [step.optimizer.param_groups[0]["fused"] for step in steps] == [True, False]
        assert not other.optimizer._optimizer_step_post_hooks


def test_a_step_continues_from_its_state() -> None:
    def make() -> TrainStep:
        model = make_network()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return TrainStep(model, optimizer, schedule=schedule, precision="fp16")

    batches, (whole, first, second) = make_floats([4] * 6), (make() for _ in range(3))
    losses = [float(whole(*batch)[1]) for batch in batches]
    assert [float(first(*batch)[1]) for batch in batches[:3]] == losses[:3]
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    second.model.load_state_dict(first.model.state_dict())
    assert [float(second(*batch)[1]) for batch in batches[3:]] == losses[3:]
    assert (second.num_steps, second.lr) == (whole.num_steps, whole.lr)


@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_groups_contain_all_batches_in_order_and_none_is_taken_past_their_ends(size: int) -> None:
    for num_batches in range(8):
        left, expected = iter(range(num_batches)), list[tuple[int, bool]]()
        for number, (batch, ends_step) in enumerate(in_groups(left, size)):
            expected.append((number, (number + 1) % size == 0 or number + 1 == num_batches))
            assert (batch, ends_step) == expected[-1]
            assert not ends_step or length_hint(left) == num_batches - len(expected)
        assert len(expected) == num_batches


def test_hooks_change_the_loss_that_gradients_are_computed_from() -> None:
    model, other, (batch,) = make_network(), make_network(), make_floats([4])
    _, loss = TrainStep(model, _sgd(model, 0.1), hooks=[lambda loss, step: loss * 2])(*batch)
    _, plain_loss = TrainStep(other, _sgd(other, 0.2))(*batch)
    assert float(loss) == float(plain_loss)
    torch.testing.assert_close(weights_of(model), weights_of(other))


def test_different_words_give_different_numbers_and_restored_states_repeat_them() -> None:
    """Some of the tuples have equal sums or the same digits. SeedSequence treats (1,) and (1, 0) as equal."""

    def draw() -> tuple[list[float], float, float]:
        return torch.rand(3).tolist(), float(np.random.rand()), random.random()

    drawn, device = set[str](), torch.device("cpu")
    for words in [(1,), (2,), (1, 0), (1, 2), (2, 1), (12,), (0, 3), (3, 0)]:
        seed_everything(*words)
        drawn.add(str(draw()))
    assert len(drawn) >= 7
    states = random_states(device)
    expected = [draw() for _ in range(3)]
    load_random_states(states, device)
    assert [draw() for _ in range(3)] == expected


def test_deterministic_algorithms_are_used_only_within_the_block() -> None:
    def settings() -> tuple[bool, bool, str]:
        precision = torch.get_float32_matmul_precision()
        return torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, precision

    before = settings()
    for deterministic, tf32, precision in ((True, False, before[2]), (False, True, "high")):
        with suppress(LookupError), algorithms(deterministic=deterministic, tf32=tf32):
            assert settings() == (deterministic, not deterministic, precision)
            raise LookupError
        assert settings() == before


def test_precisions_that_the_user_set_by_torchs_newer_names_are_kept() -> None:
    """In one process, torch refuses to mix the newer and the older names of its precision settings."""
    assert_passes_in_fresh_process(_keep_precisions_set_by_newer_names)


def _keep_precisions_set_by_newer_names() -> None:
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]  # it is there
    matmul.fp32_precision, conv.fp32_precision = "ieee", "tf32"
    for tf32, inside in ((False, "ieee"), (True, "tf32")):
        with algorithms(deterministic=False, tf32=tf32):
            assert matmul.fp32_precision == inside
        assert (matmul.fp32_precision, conv.fp32_precision) == ("ieee", "tf32")


def test_a_large_tensor_is_measured_and_its_size_printed_once() -> None:
    assert_passes_in_fresh_process(_measure_a_large_tensor)


def _measure_a_large_tensor() -> None:
    said, before = list[str](), measure_memory(torch.device("cpu"))
    with memory_difference("a tensor", say=said.append):
        tensor = torch.ones(2**24)
    after = measure_memory(torch.device("cpu"))
    assert before is not None
    assert after is not None
    assert after.allocated - before.allocated > 0.9 * tensor.nbytes
    assert after.reserved >= after.allocated
    (line,) = said
    found = re.match(r"a tensor: allocated \+(\S+) ", line)
    assert found is not None
    assert 0.9 * tensor.nbytes < float(found[1]) * 2**20 < 2 * tensor.nbytes


pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata triggers this.
    pytest.mark.filterwarnings("ignore:.* has no state_dict, so resuming reads"),
]

BATCH_SIZE, NUM_BATCHES = 5, 5
"""The 21 samples make five batches, the last of which has one sample."""


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        assert (info := get_worker_info()) is None or info.num_workers == 1
        return iter(range(21))


class Counted(Numbers):
    def __init__(self) -> None:
        self.num_yielded = 0

    def __iter__(self) -> Iterator[int]:
        first, self.num_yielded = self.num_yielded, 0
        for number in range(first, 21):
            self.num_yielded = number + 1
            yield number
        self.num_yielded = 0

    def state_dict(self) -> dict[str, int]:
        return {"num_yielded": self.num_yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_yielded = state["num_yielded"]


NUMBERS: Any = range(21)


KINDS: dict[str, Callable[[Path], tuple[Any, dict[str, Any]]]] = {
    "ShardDataset": lambda packed: (ShardDataset(packed, fields="key", shuffle=True), {}),
    "EpochSampler": lambda packed: (data := ShardMapDataset(packed, fields="key"), {"sampler": EpochSampler(data)}),
    "ShardMapDataset": lambda packed: (ShardMapDataset(packed, fields="key"), {"shuffle": True}),
    "StreamDataset": lambda packed: (StreamDataset(sorted(packed.glob("*.tar")), fields="key", shuffle=True), {}),
    "map": lambda _: (NUMBERS, {"shuffle": True}),
    "DistributedSampler": lambda _: (NUMBERS, {"sampler": DistributedSampler(NUMBERS, num_replicas=1, rank=0)}),
    "iterable": lambda _: (Numbers(), {}),
    "iterable with a state": lambda _: (Counted(), {}),
}
"""Datasets, and the arguments of their loaders."""

WRAPS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda loader: loader,
    "guarded": lambda loader: check.guard(loader, key=list),
    "prefetched on the CPU": lambda loader: DevicePrefetcher(loader, "cpu"),
    "prefetched": lambda loader: prefetch_late(loader, depth=3)[0],
}


def describe(batches: Any) -> list[list[Any]]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else list(batch) for batch in batches]


def assert_groups_resume(make: Callable[[], Any], size: int) -> None:
    """Check that the loader from ``make``, or a wrapper around it, resumes from its state at each group's end."""
    loader, received, ends = make(), list[Any](), list[tuple[int, Any]]()
    for batch, ends_group in in_groups(loader, size):
        received += describe([batch])
        if ends_group:
            ends.append((len(received), loader.state_dict()))
    assert [end for end, _ in ends] == [*range(size, NUM_BATCHES, size), NUM_BATCHES]
    for end, state in ends:
        resumed = make()
        resumed.load_state_dict(state)
        if not isinstance(getattr(resumed, "loader", resumed), StatefulDataLoader):
            resumed.set_epoch(0)  # After the last batch, shardio's order would begin the next epoch.
        assert describe(resumed) == received[end:]


@pytest.mark.parametrize(
    ("kind", "wrap", "loader"),
    [
        *((kind, wrap, DataLoader) for kind in KINDS for wrap in WRAPS),
        # The state of torchdata's loader counts the batches that were requested.
        *((kind, wrap, StatefulDataLoader) for kind in ("map", "iterable with a state") for wrap in list(WRAPS)[2:]),
    ],
)
def test_a_loader_resumes_after_any_group(packed: Path, kind: str, wrap: str, loader: Any) -> None:
    def make() -> Any:
        dataset, options = KINDS[kind](packed)
        return WRAPS[wrap](loader(dataset, BATCH_SIZE, **options))

    for size in (1, 2, 3, 7):
        assert_groups_resume(make, size)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "method", "wrap"),
    [
        *((kind, method, "plain") for kind in KINDS for method in ("multiprocessing", "thread")),
        *((kind, "multiprocessing", "prefetched") for kind in ("map", "iterable with a state")),
    ],
)
def test_a_loader_with_workers_resumes_after_any_group(packed: Path, kind: str, method: Any, wrap: str) -> None:
    def make() -> Any:
        dataset, options = KINDS[kind](packed)
        return WRAPS[wrap](DataLoader(dataset, BATCH_SIZE, num_workers=1, worker_method=method, **options))

    assert_groups_resume(make, 2)
