"""What ranks tell each other while they train. With one rank, nothing."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from shardio.world import World, find_local_rank, find_world

Value = TypeVar("Value")


_joins = itertools.count()
"""Numbers what this process joins. Of another time, the store would still have the addresses of the other ranks."""


def pick_device(name: str | None) -> torch.device:
    """Return the device that is meant: by default the best there is, and of several GPUs this rank's own."""
    if name is None:
        is_mps = torch.backends.mps.is_available() and find_world().world_size == 1  # Ranks cannot share one.
        name = "cuda" if torch.cuda.is_available() else ("mps" if is_mps else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        if name == "cuda":
            local_rank = find_local_rank()
            # A launcher may show each rank its own GPU alone; without torchrun, the rank's script has chosen.
            own = torch.cuda.current_device() if local_rank is None else local_rank % torch.cuda.device_count()
            device = torch.device("cuda", own)
        torch.cuda.set_device(device)  # NCCL and all else that names no device go there, too.
    return device


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[World]:
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
    # Only where all went well: who fails ends, by which the launcher and the other ranks know, and waits for nobody.
    # Whoever lets go of the group last waits for its threads. Here that is done without the GIL, which they may need;
    # where DistributedDataParallel is the last, it is a deadlock (pytorch/pytorch#154976): so that must go first.
    gc.collect()
    dist.destroy_process_group()


@contextlib.contextmanager
def failures_told() -> Iterator[None]:
    """Tell torchrun by what this rank fails, if it was started by it: its summary names the first failure of all."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if find_world().world_size == 1:
        yield
        return
    handler = get_error_handler()
    handler.initialize()
    try:
        yield
    except Exception as error:
        handler.record_exception(error)
        raise


def share_gradients(model: nn.Module, device: torch.device, *, deterministic: bool) -> nn.Module:
    """Return a model whose gradients are the mean of all ranks'; with one rank, the model itself."""
    if not dist.is_initialized():
        return model
    return DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        # Otherwise gradients are put together anew after the first step, and a run that is gone on with would add up
        # those of three ranks in another order in its first step.
        find_unused_parameters=deterministic,
    )


def without_wrapper(model: nn.Module) -> nn.Module:
    """Return the model that :func:`share_gradients` was given."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of all ranks' tensors, of a few numbers, on the CPU, in the same order of ranks for all."""
    return torch.stack(gather(tensor.cpu())).sum(0)


def gather(value: Value) -> list[Value]:
    """Return what each rank gave, by rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def same_buffers(model: nn.Module) -> None:
    """Give all ranks rank 0's buffers, such as the statistics of BatchNorm, which each gathers from its own batches."""
    if dist.is_initialized():
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)
