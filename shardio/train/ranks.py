"""Communication between ranks during training. With one rank, there is none."""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from shardio.device import choose_device
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
    """Return whether an error may follow from the failure of another rank. Gloo's errors have no type of their own."""
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
