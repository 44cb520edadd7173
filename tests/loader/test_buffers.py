"""Buffers: the parts of a batch that the user keeps are equal to torch's and never change; the memory of other parts is
reused."""

from __future__ import annotations

import json
import queue
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.dlpack
from torch.utils.data import DataLoader as TorchLoader

import shardio
from shardio import DataLoader, ShardDataset, ShardMapDataset
from shardio.transforms import RandomResizedCrop
from tests.buffers import (
    NUM_BUFFERS,
    assert_same,
    buffer_of,
    buffers_of,
    find_buffers,
    make_loader,
    make_oracle,
    save_npy,
)
from tests.sources import encode, write_images
from tests.tars import write_tar

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
    if isinstance(kept, torch.UntypedStorage):  # A short batch has the storage of a full one.
        kept = torch.empty(0, dtype=torch.uint8).set_(kept)[:num_bytes]
    return np.asarray(kept)


def test_each_kept_batch_takes_one_more_buffer_and_labels_none(pictures: Path) -> None:
    loader, oracle = make_loader(pictures, persistent_workers=True), make_oracle(pictures)
    before, buffers = find_buffers(), set[int | None]()
    window: deque[Any] = deque()
    expected: deque[Any] = deque()
    kept = list[Any]()
    for _ in range(4):
        for batch, same in zip(loader, oracle, strict=True):
            buffers.add(buffer_of(batch[0]))
            kept.append((batch[1:], same[1:]))
            window.append(batch)
            expected.append(same)
            if len(window) > 5:
                assert_same(window.popleft(), expected.popleft())
            assert len(find_buffers() - before) <= NUM_BUFFERS + 6
    assert len(buffers) <= NUM_BUFFERS + 6, "the buffers are reused"
    assert_same([labels_and_keys for labels_and_keys, _ in kept], [same for _, same in kept])


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
    buffers, number = set(), 0
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
    # Extra batches are in the queue (2), in the threads (4), and in the thread that fills the queue (1).
    assert len(buffers) <= NUM_BUFFERS + 2 + 4 + 1


def test_batches_may_be_freed_by_many_threads_at_once(pictures: Path) -> None:
    loader, oracle = make_loader(pictures, persistent_workers=True), make_oracle(pictures)
    before, batches = find_buffers(), [batch for _ in range(3) for batch in loader]
    barrier = threading.Barrier(9)

    def free(share: list[Any]) -> None:
        barrier.wait()
        share.clear()

    threads = [threading.Thread(target=free, args=(batches[number::8],)) for number in range(8)]
    batches.clear()
    for thread in threads:
        thread.start()
    barrier.wait()
    oracle.set_epoch(3)
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
    images, *_ = next(iter(loader))  # The error has already changed the first tensor's shape.
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
            del batch, images
    assert len(buffers) <= NUM_BUFFERS, "the buffers are reused"


def test_interleaved_and_nested_loaders_and_iterators_do_not_mix(pictures: Path) -> None:
    one = make_loader(pictures, persistent_workers=True)
    other = DataLoader(one.dataset, one.batch_size, num_workers=1)
    expected = list(oracle := make_oracle(pictures)), list(oracle)
    other.set_epoch(1)
    kept = list(zip(one, other, strict=True))
    assert_same([list(epoch) for epoch in zip(*kept, strict=True)], list(expected))
    del kept
    one.set_epoch(0)
    outer = []
    for number, batch in enumerate(one):
        outer.append(batch)
        if number % 5 == 0:
            other.set_epoch(1)
            assert_same(list(other), expected[1])
    assert_same(outer, expected[0])
    other.set_epoch(0)
    kept = list(zip(iter(other), iter(other), strict=True))
    assert_same([list(epoch) for epoch in zip(*kept, strict=True)], list(expected))


def test_a_batch_sampler_may_yield_batches_of_any_size(pictures: Path) -> None:
    sizes = [3, 8, 1, 13, 1, 2, 30, 1]
    cuts = np.split(np.random.default_rng(0).permutation(100), np.cumsum(sizes))
    lists = [cut.tolist() for cut in cuts]
    dataset = ShardMapDataset(pictures, fields=("image", "label", "key"), transform=RandomResizedCrop(48))
    generators = [torch.Generator().manual_seed(7) for _ in range(2)]
    loader, oracle = (
        DataLoader(dataset, batch_sampler=lists, num_workers=1 - number, generator=generators[number])
        for number in range(2)
    )
    kept = [list(loader) for _ in range(2)]
    assert [len(images) for images, *_ in kept[0]] == [*sizes, 41]
    assert_same(kept, [list(oracle) for _ in range(2)])


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
    for _ in range(2):
        with pytest.raises(ValueError, match=r"differ in size.*RandomResizedCrop"):
            list(loader)


NUM_SAMPLES, BATCH_SIZE = 30, 8

Make = Callable[[np.random.Generator], Any]


def _reals(shape: tuple[int, ...], dtype: str) -> Make:
    return lambda random: random.normal(0, 100, shape).astype(dtype)


def _integers(shape: tuple[int, ...], dtype: str) -> Make:
    return lambda random: random.integers(0, 2 if dtype == "bool" else 100, shape).astype(dtype)


LARGE: dict[str, Make] = {
    "float32": _reals((3, 20, 30), "float32"),
    "float64": _reals((512,), "float64"),
    "float16": _reals((64, 33), "float16"),
    "complex64": lambda random: (random.normal(size=(30, 40)) + 1j).astype("complex64"),
    "int64": _integers((7, 11, 13), "int64"),
    "uint8": _integers((4096,), "uint8"),
    "uint16": _integers((50, 50), "uint16"),
    "bool": _integers((70, 70), "bool"),
    "fortran": lambda random: np.asfortranarray(random.normal(size=(30, 50))),
    "swapped": _reals((40, 40), ">f4"),  # These arrays arrive in native byte order.
}
"""Arrays of at least 4096 bytes, which have the same shape in all samples."""

OTHER: dict[str, Make] = {
    "small": _integers((4095,), "uint8"),
    "scalar": _reals((), "float64"),
    "empty": _reals((0, 5), "float32"),
}

REFUSED: dict[str, Make] = {
    "another shape": lambda random: np.zeros((40, 40 + random.integers(0, 2))),
    "long double": _reals((40, 40), "longdouble"),
    "strings": lambda _: np.full(2000, "words"),
}


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    members = []
    for number in range(NUM_SAMPLES):
        words = {"number": number, "words": [f"{number}", "größe"], "half": 0.5}
        fields = {"jpg": encode(number, width=64, height=64), "cls": b"%d" % (number % 7)}
        fields |= {
            "json": json.dumps(words).encode(),
            "txt": f"größe {number}".encode(),
            "bin": bytes([number]) * number,
        }
        for name, make in {**LARGE, **OTHER, **REFUSED}.items():
            fields[f"{name.replace(' ', '-')}.npy"] = save_npy(make(np.random.default_rng(number)))
        members += [(f"{number}.{field}", content) for field, content in fields.items()]
    path = tmp_path_factory.mktemp("arrays") / "samples.tar"
    write_tar(path, members)
    return path


def npys(names: Any) -> tuple[str, ...]:
    return tuple(f"{name.replace(' ', '-')}.npy" for name in names)


def make_loaders(tar: Path, fields: Any) -> tuple[DataLoader, TorchLoader[Any]]:
    transform = RandomResizedCrop(48) if "image" in fields else None
    dataset = ShardDataset(tar, fields=fields, shuffle=True, seed=2, batch_size=BATCH_SIZE, transform=transform)
    ours = DataLoader(dataset, batch_size=BATCH_SIZE, num_workers=1, persistent_workers=True)
    return ours, TorchLoader(dataset, batch_size=BATCH_SIZE)


def test_all_fields_of_a_batch_are_those_of_torchs_loader_and_large_ones_are_in_its_buffer(arrays: Path) -> None:
    others = ("label", "key", "json", "txt", "bin", "jpg", "cls")
    loader, torchs = make_loaders(arrays, ("image", *npys(LARGE), "image", *npys(OTHER), *others))
    kept = list(loader)
    list(loader)  # This epoch must not reuse the memory of batches that are kept.
    assert_same(kept, list(torchs))
    assert len({buffer_of(images) for images, *_ in kept}) == len(kept)
    for images, *values in kept:
        large, small = values[: len(LARGE) + 1], values[len(LARGE) + 1 :][: len(OTHER)]
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert {buffer_of(images)} == {buffer_of(each) for each in large} != {None}
        assert len({each.data_ptr() for each in (images, *large)}) == len(LARGE) + 2
        assert {buffer_of(each) for each in small} == {None}


@pytest.mark.parametrize("name", REFUSED)
def test_arrays_that_torch_refuses_are_refused(arrays: Path, name: str) -> None:
    loader, torchs = make_loaders(arrays, npys([name])[0])
    with pytest.raises((RuntimeError, TypeError, ValueError)) as expected:
        list(torchs)
    with pytest.raises(expected.type) as got:
        list(loader)
    assert str(got.value).startswith(str(expected.value))


@pytest.mark.parametrize("field", ["image", "label", "key", "json", "float64.npy"])
def test_a_bare_field_equals_that_of_torchs_loader(arrays: Path, field: str) -> None:
    loader, torchs = make_loaders(arrays, field)
    assert_same(list(loader), list(torchs))


def test_a_field_that_is_kept_keeps_its_memory(arrays: Path) -> None:
    loader, torchs = make_loaders(arrays, ("image", "int64.npy"))
    images = [images for images, _ in loader]
    loader.set_epoch(0)
    values = [values for _, values in loader]
    assert None not in map(buffer_of, [*images, *values])
    for _ in range(3):
        list(loader)
    assert_same([images, values], [[images for images, _ in torchs], [values for _, values in torchs]])
