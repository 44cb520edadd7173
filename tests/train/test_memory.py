from __future__ import annotations

import torch

from shardio.train import memory_difference
from shardio.train.memory import measure_memory


def test_a_large_tensor_is_measured() -> None:
    device = torch.device("cpu")
    before = measure_memory(device)
    tensor = torch.ones(2**24)
    after = measure_memory(device)
    assert before is not None
    assert after is not None
    assert after.allocated - before.allocated > 0.9 * tensor.nbytes
    assert after.reserved >= after.allocated


def test_the_difference_within_a_block_is_printed_once() -> None:
    said: list[str] = []
    with memory_difference("a tensor", say=said.append):
        tensor = torch.ones(2**24)
    (line,) = said
    assert line.startswith("a tensor: allocated +")
    figure = float(line.split("+")[1].split()[0])
    assert 0.9 * tensor.nbytes < figure * 2**20 < 2 * tensor.nbytes
