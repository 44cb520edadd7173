"""Buffers: what the user keeps of a batch never changes, and buffers are reused afterwards."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.dlpack
from torch.utils.data import BatchSampler

import shardio
from shardio import DataLoader, ShardDataset, ShardMapDataset
from shardio.transforms import RandomResizedCrop
from tests.buffers import NUM_BUFFERS, assert_same, buffer_of, buffers_of, find_buffers, make_loader, make_oracle
from tests.sources import write_images


def test_a_few_buffers_are_reused(pictures: Path) -> None:
    before = find_buffers()
    loader = make_loader(pictures, num_workers=3, prefetch_factor=6, persistent_workers=True)
    buffers = set.union(*(buffers_of(loader) for _ in range(3)))
    assert None not in buffers, "images are in buffers"
    assert buffers <= find_buffers() - before
    assert len(buffers) <= 8, "6 are made ahead, one is next, one is being released"


@pytest.mark.parametrize(("persistent", "num_workers", "batch_size"), [(False, 1, 8), (True, 3, 33)])
def test_kept_batches_do_not_change(pictures: Path, persistent: bool, num_workers: int, batch_size: int) -> None:
    loader = make_loader(pictures, num_workers=num_workers, persistent_workers=persistent, batch_size=batch_size)
    oracle = make_oracle(pictures, batch_size=batch_size)
    kept = [list(loader) for _ in range(2)]
    assert len({buffer_of(images) for epoch in kept for images, *_ in epoch}) == 2 * len(loader)
    assert_same(kept, [list(oracle) for _ in range(2)])


def test_a_short_batch_does_not_change(pictures: Path) -> None:
    loader, oracle = make_loader(pictures, persistent_workers=True), make_oracle(pictures)
    kept = [deque(loader, maxlen=1).pop() for _ in range(4)]
    assert [len(images) for images, *_ in kept] == [4] * 4
    assert_same(kept, [list(oracle)[-1] for _ in range(4)])


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "image": lambda images: images[0],
    "channel": lambda images: images[:, 0],
    "last rows": lambda images: images[-2:],
    "permuted": lambda images: images.permute(0, 2, 3, 1),
    "unbound": lambda images: images.unbind()[2],
    "detached": lambda images: images.detach(),
    "storage": lambda images: images.untyped_storage(),
    "array": lambda images: images.numpy(),
    "array of one": lambda images: images[3].numpy()[1:, ::2],
    "buffer": lambda images: images[1].permute(1, 2, 0).numpy().data,
    "dlpack": lambda images: torch.utils.dlpack.from_dlpack(images)[1],
}


def test_a_view_keeps_its_memory(pictures: Path) -> None:
    loader, oracle = make_loader(pictures, persistent_workers=True), make_oracle(pictures)
    kept = {name: [view(images) for images, *_ in loader] for name, view in VIEWS.items()}
    buffers_of(loader)
    for name, view in VIEWS.items():
        shown = [(view(images), images) for images, *_ in oracle]
        for got, (expected, images) in zip(kept[name], shown, strict=True):
            assert np.array_equal(_show(got, images.nbytes), _show(expected, images.nbytes)), name


def _show(kept: Any, num_bytes: int) -> Any:
    if isinstance(kept, torch.UntypedStorage):  # The storage of a short batch is that of a full one.
        kept = torch.empty(0, dtype=torch.uint8).set_(kept)[:num_bytes]
    return np.asarray(kept)


def test_keeping_labels_and_keys_keeps_no_buffer(pictures: Path) -> None:
    loader, oracle = make_loader(pictures, persistent_workers=True), make_oracle(pictures)
    buffers, kept = set(), []
    for _ in range(3):
        for images, labels, keys in loader:
            buffers.add(buffer_of(images))
            kept.append([labels, keys])
            del images
    assert len(buffers) <= NUM_BUFFERS
    assert_same(kept, [[labels, keys] for _ in range(3) for _, labels, keys in oracle])


def test_each_kept_batch_takes_one_more_buffer(pictures: Path) -> None:
    loader, oracle = make_loader(pictures, persistent_workers=True), make_oracle(pictures)
    before, buffers = find_buffers(), set()
    window: deque[Any] = deque()
    expected: deque[Any] = deque()
    for _ in range(4):
        for batch, same in zip(loader, oracle, strict=True):
            buffers.add(buffer_of(batch[0]))
            window.append(batch)
            expected.append(same)
            if len(window) > 5:
                assert_same(window.popleft(), expected.popleft())
            assert len(find_buffers() - before) <= NUM_BUFFERS + 6
    assert len(buffers) <= NUM_BUFFERS + 6, "they are reused"


def test_batches_may_be_freed_by_other_threads_while_the_loader_is_iterated(pictures: Path) -> None:
    loader, oracle = make_loader(pictures, persistent_workers=True), make_oracle(pictures)
    passed: queue.Queue[Any] = queue.Queue(maxsize=2)
    wrong: list[int] = []

    def consume() -> None:
        while (item := passed.get()) is not None:
            number, batch, expected = item
            if not torch.equal(batch[0], expected):
                wrong.append(number)
            del item, batch

    threads = [threading.Thread(target=consume) for _ in range(4)]
    for thread in threads:
        thread.start()
    buffers = set()
    number = 0
    try:
        for _ in range(5):
            for batch, same in zip(loader, oracle, strict=True):
                buffers.add(buffer_of(batch[0]))
                passed.put((number, batch, same[0]))
                number += 1
    finally:
        for _ in threads:
            passed.put(None)
        for thread in threads:
            thread.join()
    assert number == 65
    assert wrong == []
    # In the queue, in each thread, and in the thread that fills the queue.
    assert len(buffers) <= NUM_BUFFERS + 2 + 4 + 1


def test_batches_may_be_freed_by_many_threads_at_once(pictures: Path) -> None:
    loader, oracle = make_loader(pictures, persistent_workers=True), make_oracle(pictures)
    before = find_buffers()
    batches = [batch for _ in range(3) for batch in loader]
    assert_same(batches, [batch for _ in range(3) for batch in oracle])
    barrier = threading.Barrier(9)

    def free(share: list[Any]) -> None:
        barrier.wait()
        share.clear()

    threads = [threading.Thread(target=free, args=(batches[number::8],)) for number in range(8)]
    batches.clear()
    for thread in threads:
        thread.start()
    barrier.wait()
    assert_same(list(loader), list(oracle))
    for thread in threads:
        thread.join()
    del threads
    buffers_of(loader)
    assert len(find_buffers() - before) <= NUM_BUFFERS + 1


def test_images_cannot_grow_in_place(pictures: Path) -> None:
    loader, oracle = make_loader(pictures, persistent_workers=True), make_oracle(pictures)
    (images, *_), (expected, *_) = next(iter(loader)), next(iter(oracle))
    with pytest.raises(RuntimeError, match="Trying to resize storage that is not resizable"):
        images.resize_(9, 3, 48, 48)
    with pytest.raises(RuntimeError, match="not resizable"):
        images.untyped_storage().resize_(images.nbytes + 1)
    with pytest.raises(RuntimeError, match="not resizable"):
        torch.cat([expected, expected], out=images)
    images, *_ = next(iter(loader))  # A new one, because torch has already changed the shape of one that cannot grow.
    buffer = buffer_of(images)
    assert buffer is not None
    assert buffer_of(images.resize_(2, 3, 48, 48)) == buffer


def test_what_a_user_writes_into_a_batch_does_not_reappear(pictures: Path) -> None:
    loader, oracle = make_loader(pictures, persistent_workers=True), make_oracle(pictures)
    buffers = set()
    for _ in range(3):
        for batch, expected in zip(loader, oracle, strict=True):
            assert_same(batch, expected)
            images, labels, _ = batch
            buffers.add(buffer_of(images))
            images.zero_()
            labels.fill_(-1)
            assert not images.any()
            del batch, images
    assert len(buffers) <= NUM_BUFFERS, "they were reused"


def test_interleaved_and_nested_loaders_do_not_mix(pictures: Path) -> None:
    one, other = make_loader(pictures, persistent_workers=True), make_loader(pictures, persistent_workers=True)
    other.set_epoch(1)
    expected = [list(make_oracle(pictures)), list(oracle := make_oracle(pictures))]
    expected[1] = list(oracle)
    kept = list(zip(one, other, strict=True))
    assert_same([list(epoch) for epoch in zip(*kept, strict=True)], expected)
    del kept
    one.set_epoch(0)
    outer = []
    for number, batch in enumerate(one):
        outer.append(batch)
        if number % 5 == 0:
            other.set_epoch(1)
            assert_same(list(other), expected[1])
    assert_same(outer, expected[0])


def test_iterators_of_one_loader_do_not_mix(pictures: Path) -> None:
    loader, oracle = make_loader(pictures), make_oracle(pictures)
    iterators: list[Iterator[Any]] = [iter(loader), iter(loader)]
    kept = list(zip_longest(*iterators))
    assert_same([list(epoch) for epoch in zip(*kept, strict=True)], [list(oracle), list(oracle)])


def test_a_batch_sampler_may_yield_batches_of_any_size(pictures: Path) -> None:
    sizes = [3, 8, 1, 13, 1, 2, 30, 1]
    cuts = np.split(np.random.default_rng(0).permutation(100), np.cumsum(sizes))
    lists = [cut.tolist() for cut in cuts]
    dataset = ShardMapDataset(pictures, fields=("image", "label", "key"), transform=RandomResizedCrop(48))

    def make(num_workers: int) -> DataLoader:
        return DataLoader(
            dataset,
            batch_sampler=lists,
            num_workers=num_workers,
            generator=torch.Generator().manual_seed(7),
        )

    loader, oracle = make(1), make(0)
    kept = [list(loader) for _ in range(2)]
    assert [len(images) for images, *_ in kept[0]] == [*sizes, 41]
    assert_same(kept, [list(oracle) for _ in range(2)])


def test_torchs_batch_sampler_yields_short_last_batches(pictures: Path) -> None:
    dataset = ShardMapDataset(pictures, fields=("image", "label"), transform=RandomResizedCrop(48))

    def make(num_workers: int, **options: Any) -> DataLoader:
        generator = torch.Generator().manual_seed(7)
        return DataLoader(dataset, num_workers=num_workers, generator=generator, **options)

    sampler = BatchSampler(range(99), 7, drop_last=False)
    for options in ({"batch_sampler": sampler}, {"batch_size": 7, "shuffle": True}):
        kept = list(make(1, **options))
        assert len(kept[-1][0]) < 7
        assert_same(kept, list(make(0, **options)))


def test_images_of_different_sizes_are_delivered_one_by_one_or_refused(tmp_path: Path) -> None:
    write_images(tmp_path / "images", classes=1, per_class=10, width=64, height=48)
    for number in range(10):
        write_images(tmp_path / "images" / f"{number}", classes=1, per_class=1, width=64, height=40 + number)
    shardio.pack(tmp_path / "images", tmp_path / "packed")
    dataset = ShardDataset(tmp_path / "packed", fields="image", shuffle=True)
    kept = list(DataLoader(dataset, num_workers=1))
    assert len({images.shape for images in kept}) == 10
    assert_same(kept, list(DataLoader(dataset)))
    loader = DataLoader(dataset, batch_size=8, num_workers=1, persistent_workers=True)
    for _ in range(3):
        with pytest.raises(ValueError, match=r"differ in size.*RandomResizedCrop"):
            list(loader)
