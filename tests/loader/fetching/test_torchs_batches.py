"""Programs that use torch's DataLoader see the same batches, in the same order, of the same types, from shardio's."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch.utils.data
from hypothesis import given, settings, strategies as st

from shardio import DataLoader
from tests.loader.fetching.programs import Program, describe, programs, run, seed_all

_MAX_EXAMPLES = 8


@given(programs(), st.integers(0, 6) | st.none())
@settings(max_examples=_MAX_EXAMPLES, deadline=None)
def test_random_programs_see_torchs_batches(program: Program, num_taken: int | None) -> None:
    if not program.arguments.get("in_order", True):
        num_taken = None  # The first batches may be any.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of more workers than processors.
        seed_all(3)
        expected = run(program.make(torch.utils.data.DataLoader), num_taken)
        seed_all(3)
        assert describe(run(program.make(DataLoader), num_taken)) == describe(expected)


@given(programs())
@settings(max_examples=_MAX_EXAMPLES // 2, deadline=None)
def test_threads_deliver_the_same_samples(program: Program) -> None:
    if program.dataset.kind in ("draws", "sliced array") or isinstance(
        program.dataset, torch.utils.data.IterableDataset
    ):
        return  # Threads share the global generators, torch's get_worker_info, and the memory of arrays.
    program.arguments.pop("worker_init_fn", None)  # It seeds the generators of the samplers, too.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seed_all(3)
        expected = run(program.make(torch.utils.data.DataLoader))
        seed_all(3)
        assert describe(run(program.make(DataLoader, worker_method="thread"))) == describe(expected)


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_iterators_of_one_loader_are_torchs(num_workers: int, persistent: bool) -> None:
    def zipped(loader: Any) -> Any:
        loaders = loader(range(12), batch_size=2, num_workers=num_workers, persistent_workers=persistent)
        return [[(a.tolist(), b.tolist()) for a, b in zip(loaders, loaders, strict=True)] for _ in range(2)]

    assert zipped(DataLoader) == zipped(torch.utils.data.DataLoader)


def test_the_class_can_be_subscripted() -> None:
    loader: DataLoader[int] = DataLoader[int](range(3))
    assert isinstance(loader, torch.utils.data.DataLoader)
