"""Memory is measured in fresh processes: in an old one, a tensor may take memory that was freed and never returned."""

from __future__ import annotations

import torch

from shardio.train import memory_difference
from shardio.train.meters import measure_memory
from tests.processes import assert_passes_in_fresh_process


def test_a_large_tensor_is_measured() -> None:
    assert_passes_in_fresh_process(measure_a_large_tensor)


def measure_a_large_tensor() -> None:
    device = torch.device("cpu")
    before = measure_memory(device)
    tensor = torch.ones(2**24)
    after = measure_memory(device)
    assert before is not None
    assert after is not None
    assert after.allocated - before.allocated > 0.9 * tensor.nbytes
    assert after.reserved >= after.allocated


def test_the_difference_within_a_block_is_printed_once() -> None:
    assert_passes_in_fresh_process(print_the_difference)


def print_the_difference() -> None:
    said: list[str] = []
    with memory_difference("a tensor", say=said.append):
        tensor = torch.ones(2**24)
    (line,) = said
    assert line.startswith("a tensor: allocated +")
    figure = float(line.split("+")[1].split()[0])
    assert 0.9 * tensor.nbytes < figure * 2**20 < 2 * tensor.nbytes
