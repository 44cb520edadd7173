"""The ranks of a training run, and its measurements over all ranks."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from shardio.device import DevicePrefetcher, choose_device
from shardio.errors import NonFiniteLossError
from shardio.world import World, find_local_rank, find_world

Value = TypeVar("Value")

_joins = itertools.count()
"""Numbers for process groups. The store still holds addresses under earlier numbers."""


def use_device(name: str | None) -> torch.device:
    """Return this rank's device, by default its own GPU, and make it torch's current one."""
    device = choose_device(name, num_ranks=find_world().world_size)
    if device.type == "cuda":
        if str(device) == "cuda":
            local_rank = find_local_rank()
            # A launcher may show each rank only its own GPU. Without torchrun, the user's script has chosen one.
            own = torch.cuda.current_device() if local_rank is None else local_rank % torch.cuda.device_count()
            device = torch.device("cuda", own)
        torch.cuda.set_device(device)  # NCCL and code that names no device use the current one.
    return device


@contextlib.contextmanager
def joined_ranks(device: torch.device) -> Iterator[World]:
    """Join the other ranks, if a launcher such as torchrun started several and they have not joined yet."""
    world = find_world()
    if world.world_size == 1 or dist.is_initialized():
        yield world
        return
    store, rank, world_size = next(iter(rendezvous("env://")))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore(f"shardio/{next(_joins)}", store),  # type: ignore[attr-defined]  # torch's __all__ lacks it
        rank=rank,
        world_size=world_size,
    )
    yield world
    # After an error, the rank just ends. The launcher and the other ranks notice that, and nothing waits.
    # The last owner of the group waits for its threads. Here, it waits without the GIL, which they may need. If
    # DistributedDataParallel is the last owner, it deadlocks (pytorch/pytorch#154976), so collect it first.
    gc.collect()
    dist.destroy_process_group()


@contextlib.contextmanager
def reported_failures() -> Iterator[None]:
    """Report this rank's error to torchrun, whose summary names the first failure of all ranks."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if find_world().world_size == 1:
        yield
        return
    handler = get_error_handler()
    handler.initialize()
    try:
        yield
    except Exception as error:
        if _is_of_communication(error):
            time.sleep(1)  # torchrun compares whole seconds, and takes the lowest rank if they are equal.
        handler.record_exception(error)
        raise


def _is_of_communication(error: Exception) -> bool:
    """Return whether an error may follow from the failure of another rank. Gloo's errors have no special type."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def share_gradients(model: nn.Module, device: torch.device, *, deterministic: bool) -> nn.Module:
    """Return a model whose gradients are the mean over all ranks; with one rank, the model itself."""
    if not dist.is_initialized():
        return model
    return DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        # Otherwise, gradients are regrouped after the first step. With three or more ranks, the first step of a
        # resumed run would then add them in another order.
        find_unused_parameters=deterministic,
    )


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model without the wrapper of :func:`share_gradients`."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def share_buffers(model: nn.Module) -> None:
    """Copy rank 0's buffers, such as BatchNorm's statistics, to all ranks."""
    if dist.is_initialized():
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


def gather(value: Value) -> list[Value]:
    """Return the values of all ranks, in rank order."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a small tensor over all ranks, on the CPU, added in rank order."""
    return torch.stack(gather(tensor.cpu())).sum(0)


def on_rank_0(function: Callable[[], Value]) -> Value:
    """Call a function on rank 0 only. Return its result, or raise its error, on all ranks."""
    outcome: list[Value] | Exception = []
    if find_world().rank == 0:
        try:
            outcome = [function()]
        except Exception as error:
            outcome = error
    outcome = gather(outcome)[0]
    if isinstance(outcome, Exception):
        raise outcome
    return outcome[0]


class MemoryUse(NamedTuple):
    """Memory in use, in bytes.

    Attributes:
        allocated: The memory of tensors on a GPU; on the CPU, this process's resident set.
        reserved: The memory that torch has reserved on a GPU; on the CPU, this process's address space.
    """

    allocated: int
    reserved: int


def measure_memory(device: torch.device) -> MemoryUse | None:
    """Return the memory in use; None if the operating system does not report it."""
    if device.type == "cuda":
        return MemoryUse(torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device))
    if device.type == "mps":
        return MemoryUse(torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory())
    statm = Path("/proc/self/statm")  # proc(5): the address space and the resident set, in pages.
    if not statm.exists():
        return None
    reserved, allocated = (int(pages) * os.sysconf("SC_PAGE_SIZE") for pages in statm.read_text().split()[:2])
    return MemoryUse(allocated, reserved)


@contextmanager
def memory_difference(
    name: str, device: torch.device | str = "cpu", say: Callable[[str], object] = print
) -> Iterator[None]:
    """Print the change in memory use within a block.

    :class:`shardio.train.meters.MemoryUse` defines allocated and reserved memory.

    >>> with memory_difference("a large tensor"):  # doctest: +SKIP
    ...     tensor = torch.ones(2**24)
    a large tensor: allocated +64.1 MiB, reserved +64.0 MiB
    """
    device = torch.device(device)
    before = measure_memory(device)
    yield
    after = measure_memory(device)
    if before is None or after is None:
        say(f"{name}: memory use cannot be measured on this system")
        return
    allocated, reserved = ((new - old) / 2**20 for new, old in zip(after, before, strict=True))
    say(f"{name}: allocated {allocated:+.1f} MiB, reserved {reserved:+.1f} MiB")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A line of the log: the metrics of the steps since the previous line.

    Attributes:
        step: Steps so far, taken and skipped.
        epoch: The epoch, from 0.
        loss: The mean loss per sample, over all ranks.
        lr: The learning rate of the last step.
        scale: The factor by which fp16 scales the loss; 1 otherwise.
        num_skipped: Steps skipped so far, because a gradient was not finite.
        images_per_s: Images per second, over all ranks.
        step_s: The mean duration of a step in seconds.
        data_wait_share: The share of the time that this rank's device waited for data, with nothing left to do; see
            :meth:`shardio.DevicePrefetcher.stats`.
        memory_allocated: Bytes; see :class:`shardio.train.meters.MemoryUse`. None if unknown.
        memory_reserved: Bytes; see :class:`shardio.train.meters.MemoryUse`. None if unknown.
    """

    step: int
    epoch: int
    loss: float
    lr: float
    scale: float
    num_skipped: int
    images_per_s: float
    step_s: float
    data_wait_share: float
    memory_allocated: int | None
    memory_reserved: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochResult:
    """The metrics of an epoch, over all ranks.

    Attributes:
        epoch: The epoch, from 0.
        step: The number of steps from the start of the run to the end of the epoch, including skipped ones.
        loss: The mean training loss per sample.
        accuracy: The share of training samples classified correctly during training. In a mixed sample, the class with
            the largest share counts, so mixing lowers this accuracy.
        val_loss: The mean loss per validation sample; None without validation.
        val_accuracy: The share of validation samples classified correctly; None without validation.
        num_images: Images trained on.
        train_s: The duration of the training in seconds.
        data_wait_s: The part of ``train_s`` that this rank's device waited for data.
        lr: The learning rate of the last step.
        is_best: Whether the validation loss, or the training loss without validation, is the lowest so far.
    """

    epoch: int
    step: int
    loss: float
    accuracy: float
    val_loss: float | None
    val_accuracy: float | None
    num_images: int
    train_s: float
    data_wait_s: float
    lr: float
    is_best: bool

    @property
    def images_per_s(self) -> float:
        return self.num_images / max(self.train_s, 1e-9)

    @property
    def data_wait_share(self) -> float:
        return self.data_wait_s / max(self.train_s, 1e-9)

    @property
    def judged_by(self) -> float:
        """The loss that epochs are compared by."""
        return self.loss if self.val_loss is None else self.val_loss

    def describe(self) -> str:
        """Return the metrics as a line of text."""
        validation = (
            "" if self.val_loss is None else f"val loss {self.val_loss:.3f}  val accuracy {self.val_accuracy:.1%}  "
        )
        return (
            f"epoch {self.epoch}  loss {self.loss:.3f}  accuracy {self.accuracy:.1%}  {validation}"
            f"{self.images_per_s:.0f} images/s  waiting for data {self.data_wait_share:.0%}"
        )


class Score:
    """The sums of losses and correct predictions, on the device. Only reading a property waits for the device."""

    def __init__(self, device: torch.device) -> None:
        # MPS has no float64.
        self.sums = torch.zeros(3, dtype=torch.float64, device="cpu" if device.type == "mps" else device)

    def add(
        self, losses: torch.Tensor, outputs: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor | None = None
    ) -> None:
        """Add losses [N], outputs [N, classes] and labels, [N] or [N, classes], where ``valid`` [N] is True.

        The right class of a soft label is that with the largest share.
        """
        classes = labels.argmax(1) if labels.is_floating_point() else labels
        valid = torch.ones_like(classes, dtype=torch.bool) if valid is None else valid
        correct = (outputs.argmax(1) == classes) & valid
        loss = losses.to(self.sums).masked_fill(~valid.to(self.sums.device), 0).sum()
        self.sums += torch.stack([loss, correct.sum().to(self.sums), valid.sum().to(self.sums)])

    def over_ranks(self) -> Score:
        """Return the score over all ranks."""
        score = Score(self.sums.device)
        score.sums = sum_over_ranks(self.sums)
        return score

    @property
    def num_images(self) -> int:
        """The number of samples."""
        return int(self.sums[2].item())

    @property
    def loss(self) -> float:
        """The mean loss per sample."""
        return self.sums[0].item() / max(self.num_images, 1)

    @property
    def accuracy(self) -> float:
        """The share of correct predictions."""
        return self.sums[1].item() / max(self.num_images, 1)


class LogInterval:
    """The time since the last line of the log.

    Args:
        batches: The prefetcher, which measures the time that the device waits for data.

    Attributes:
        start: The start of the interval, from ``time.perf_counter``.
        num_steps: Steps in the interval.
    """

    def __init__(self, batches: DevicePrefetcher) -> None:
        self._batches = batches
        self.restart()

    def restart(self) -> None:
        """Start a new interval."""
        self.start, self.num_steps = time.perf_counter(), 0
        self._stall_before_s = self._batches.stats().data_stall_s

    @property
    def wait_s(self) -> float:
        """Seconds that the device waited for data in the interval."""
        return self._batches.stats().data_stall_s - self._stall_before_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingLoss:
    """The mean loss of a microbatch, on the device, and its origin."""

    loss: torch.Tensor
    num_samples: int
    step: int
    keys: Sequence[str] | None


class PendingLosses:
    """The losses of microbatches, on the device. They are read together, because reading waits."""

    def __init__(self) -> None:
        self._pending: list[_PendingLoss] = []

    def add(self, loss: torch.Tensor, batch: Any, step: int) -> None:
        """Add the mean loss of a microbatch of this step."""
        self._pending.append(_PendingLoss(loss=loss, num_samples=len(batch[1]), step=step, keys=_find_keys(batch)))

    def read(self) -> tuple[float, int]:
        """Return the mean loss and the number of samples, over all ranks, and clear the losses.

        Raises:
            NonFiniteLossError: If a loss is not finite. The message names the step and its samples.
        """
        pending, self._pending = self._pending, []
        losses = [one.loss.float() for one in pending]
        values = torch.stack(losses).cpu().double() if losses else torch.zeros(0, dtype=torch.float64, device="cpu")
        sizes = torch.tensor([one.num_samples for one in pending], dtype=torch.float64, device="cpu")
        total, num_samples = sum_over_ranks(torch.stack([(values * sizes).sum(), sizes.sum()])).tolist()
        if not math.isfinite(total):
            raise _first_not_finite(pending, values.tolist())
        return total / max(num_samples, 1), int(num_samples)


def _first_not_finite(pending: Sequence[_PendingLoss], values: Sequence[float]) -> NonFiniteLossError:
    """Return the error for the first loss on any rank that is not finite.

    It also makes later losses on other ranks NaN.
    """
    own = next(
        ((one.step, value, one.keys) for one, value in zip(pending, values, strict=True) if not math.isfinite(value)),
        None,
    )
    found = [(first, rank) for rank, first in enumerate(gather(own)) if first is not None]
    (step, value, keys), rank = min(found, key=lambda one: one[0][0])
    where = f" on rank {rank}" if len(found) > 1 or rank else ""
    if keys is None:
        samples = (
            "samples unknown, because the batch has no keys: to have them named, train on shards with "
            'fields=("image", "label", "key")'
        )
    else:
        more = f" and {len(keys) - 20} more" if len(keys) > 20 else ""
        samples = f"samples: {', '.join(keys[:20])}{more}"
    return NonFiniteLossError(f"the loss of step {step}{where} is {value} ({samples})", step=step, keys=keys)


def _find_keys(batch: Any) -> Sequence[str] | None:
    """Return the keys of a batch's samples; None if no field after the labels holds them."""
    for field in batch[2:]:
        if isinstance(field, (list, tuple)) and field and all(isinstance(value, str) for value in field):
            return field
    return None
