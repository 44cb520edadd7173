"""What ranks tell each other while they train. With one rank, nothing."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardio.world import World, find_local_rank, find_world

Value = TypeVar("Value")


def pick_device(name: str | None) -> torch.device:
    """Return the device that is meant: by default the best there is, and of several GPUs this rank's own."""
    if name is None:
        is_mps = torch.backends.mps.is_available() and find_world().world_size == 1  # Ranks cannot share one.
        name = "cuda" if torch.cuda.is_available() else ("mps" if is_mps else "cpu")
    if name != "cuda":
        return torch.device(name)
    device = torch.device("cuda", find_local_rank())
    torch.cuda.set_device(device)  # NCCL and all else that names no device go there, too.
    return device


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[World]:
    """Join the other ranks, if a launcher such as torchrun started several and they have not joined yet."""
    world = find_world()
    if world.world_size == 1 or dist.is_initialized():
        yield world
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
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


def share_gradients(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a model whose gradients are the mean of all ranks'; with one rank, the model itself."""
    if not dist.is_initialized():
        return model
    return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)


def without_wrapper(model: nn.Module) -> nn.Module:
    """Return the model that :func:`share_gradients` was given."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of all ranks' tensors."""
    if not dist.is_initialized():
        return tensor
    total = tensor.clone() if dist.get_backend() == "gloo" or tensor.is_cuda else tensor.cuda()
    dist.all_reduce(total)
    return total


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


def wait_for_all() -> None:
    """Return when all ranks have come here."""
    if dist.is_initialized():
        dist.barrier()
