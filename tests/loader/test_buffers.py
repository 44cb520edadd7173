"""Parts of a batch that the user keeps never change, even after forks. Other memory is reused and eventually freed."""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import resource
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.dlpack
from torch.utils.data import DataLoader as TorchLoader

import shardio
from shardio import DataLoader, ShardDataset, ShardMapDataset
from shardio.loader.buffers import make_memory
from shardio.transforms import RandomResizedCrop
from tests.buffers import (
    NUM_BUFFERS,
    assert_same,
    buffer_of,
    buffers_of,
    digest,
    find_buffers,
    find_worker_processes,
    fork,
    make_loader,
    make_oracle,
    save_npy,
    wait_until,
    without_collector,
)
from tests.files import find_open_files
from tests.processes import assert_passes_in_fresh_process, forkserver_context
from tests.sources import encode, write_images
from tests.tars import write_tar

VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "image": lambda images: images[0],
    "permuted": lambda images: images.permute(0, 2, 3, 1),
    "storage": lambda images: images.untyped_storage(),
    "array": lambda images: images.numpy(),
    "array of one": lambda images: images[3].numpy()[1:, ::2],
    "buffer": lambda images: images[1].permute(1, 2, 0).numpy().data,
    "dlpack": lambda images: torch.utils.dlpack.from_dlpack(images)[1],
}


def test_a_view_keeps_its_memory(pictures: Path) -> None:
    def show(kept: Any, num_bytes: int) -> Any:
        if isinstance(kept, torch.UntypedStorage):  # A short batch's storage is as large as a full batch's.
            kept = torch.empty(0, dtype=torch.uint8).set_(kept)[:num_bytes]
        return np.asarray(kept)

    loader, oracle = make_loader(pictures, persistent_workers=True), make_oracle(pictures)
    kept = {name: [view(images) for images, *_ in loader] for name, view in VIEWS.items()}
    buffers_of(loader)
    for name, view in VIEWS.items():
        for got, (images, *_) in zip(kept[name], oracle, strict=True):
            assert np.array_equal(show(got, images.nbytes), show(view(images), images.nbytes)), name


def test_each_kept_batch_takes_one_more_buffer_and_labels_none(pictures: Path) -> None:
    loader, oracle = make_loader(pictures, persistent_workers=True), make_oracle(pictures)
    before, buffers = find_buffers(), set[int | None]()
    window, kept = deque[Any](), list[Any]()
    for _ in range(4):
        for batch, same in zip(loader, oracle, strict=True):
            buffers.add(buffer_of(batch[0]))
            kept.append((batch[1:], same[1:]))
            window.append((batch, same))
            if len(window) > 5:
                assert_same(*window.popleft())
            assert len(find_buffers() - before) <= NUM_BUFFERS + 6
    assert len(buffers) <= NUM_BUFFERS + 6, "the buffers are reused"
    assert_same([labels_and_keys for labels_and_keys, _ in kept], [same for _, same in kept])


def test_batches_may_be_freed_by_other_threads_while_the_loader_is_iterated(pictures: Path) -> None:
    loader, oracle = make_loader(pictures, persistent_workers=True), make_oracle(pictures)
    passed, checked, buffers = queue.Queue[Any](maxsize=2), list[bool](), set[int | None]()

    def consume() -> None:
        while (item := passed.get()) is not None:
            checked.append(torch.equal(*item))
            del item

    threads = [threading.Thread(target=consume, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        for (images, *_), (expected, *_) in zip(loader, oracle, strict=True):
            buffers.add(buffer_of(images))
            passed.put((images, expected))
            del images
    for _ in threads:
        passed.put(None)
    for thread in threads:
        thread.join()
    assert checked == [True] * 65
    # Extra batches are in the queue (2), in the threads (4), and in the thread that fills the queue (1).
    assert len(buffers) <= NUM_BUFFERS + 2 + 4 + 1


def test_images_cannot_grow_in_place_and_what_a_user_writes_into_them_does_not_reappear(pictures: Path) -> None:
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

    loader, oracle = make_loader(pictures, persistent_workers=True), make_oracle(pictures)
    buffers = set()
    for _ in range(3):
        for batch, expected in zip(loader, oracle, strict=True):
            assert_same(batch, expected)
            buffers.add(buffer_of(batch[0]))
            batch[0].zero_()
            batch[1].fill_(-1)
            del batch
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
    lists = [cut.tolist() for cut in np.split(np.random.default_rng(0).permutation(100), np.cumsum(sizes))]
    dataset = ShardMapDataset(pictures, fields=("image", "label", "key"), transform=RandomResizedCrop(48))
    kept, expected = (
        list(DataLoader(dataset, batch_sampler=lists, num_workers=num, generator=torch.Generator().manual_seed(7)))
        for num in (1, 0)
    )
    assert [len(images) for images, *_ in kept] == [*sizes, 41]
    assert_same(kept, expected)


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


def npy_of(name: str) -> str:
    return f"{name.replace(' ', '-')}.npy"


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    members = []
    for number in range(NUM_SAMPLES):
        words = json.dumps({"number": number, "words": [f"{number}", "größe"], "half": 0.5})
        fields = {"jpg": encode(number, width=64, height=64), "cls": b"%d" % (number % 7), "json": words.encode()}
        fields |= {"txt": f"größe {number}".encode(), "bin": bytes([number]) * number}
        for name, make in {**LARGE, **OTHER, **REFUSED}.items():
            fields[npy_of(name)] = save_npy(make(np.random.default_rng(number)))
        members += [(f"{number}.{field}", content) for field, content in fields.items()]
    path = tmp_path_factory.mktemp("arrays") / "samples.tar"
    write_tar(path, members)
    return path


def make_loaders(tar: Path, fields: Any) -> tuple[DataLoader, TorchLoader[Any]]:
    transform = RandomResizedCrop(48) if "image" in fields else None
    dataset = ShardDataset(tar, fields=fields, shuffle=True, seed=2, batch_size=BATCH_SIZE, transform=transform)
    ours = DataLoader(dataset, batch_size=BATCH_SIZE, num_workers=1, persistent_workers=True)
    return ours, TorchLoader(dataset, batch_size=BATCH_SIZE)


def test_all_fields_of_a_batch_are_those_of_torchs_loader_and_large_ones_are_in_its_buffer(arrays: Path) -> None:
    others = ("label", "key", "json", "txt", "bin", "jpg", "cls")
    loader, torchs = make_loaders(arrays, ("image", *map(npy_of, LARGE), "image", *map(npy_of, OTHER), *others))
    kept, expected = list(loader), list(torchs)
    loader.set_epoch(0)
    values = [value for _, value, *_ in loader]  # Each of these values alone keeps its batch's memory in use.
    list(loader)
    assert_same([kept, values], [expected, [value for _, value, *_ in expected]])
    assert len({buffer_of(images) for images, *_ in kept}) == len(kept)
    for images, *values in kept:
        large, small = values[: len(LARGE) + 1], values[len(LARGE) + 1 :][: len(OTHER)]
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert {buffer_of(images)} == {buffer_of(each) for each in large} != {None}
        assert len({each.data_ptr() for each in (images, *large)}) == len(LARGE) + 2
        assert {buffer_of(each) for each in small} == {None}


@pytest.mark.parametrize("name", [*REFUSED, "image", "label", "key", "json", "float64"])
def test_a_bare_field_equals_that_of_torchs_loader_or_is_refused_by_both(arrays: Path, name: str) -> None:
    loader, torchs = make_loaders(arrays, npy_of(name) if name in REFUSED | LARGE else name)
    if name in REFUSED:
        with pytest.raises((RuntimeError, TypeError, ValueError)) as expected:
            list(torchs)
        with pytest.raises(expected.type) as got:
            list(loader)
        assert str(got.value).startswith(str(expected.value))
    else:
        assert_same(list(loader), list(torchs))


@pytest.fixture
def all_is_open(pictures: Path, no_process_of_other_tests: None) -> None:
    """Open all descriptors that stay open for later loaders."""
    list(make_loader(pictures))


@pytest.mark.usefixtures("all_is_open")
@pytest.mark.parametrize("persistent", [False, True])
def test_memory_descriptors_and_worker_processes_end_with_the_loader(pictures: Path, persistent: bool) -> None:
    with without_collector():
        buffers, process_ids, files = find_buffers(), find_worker_processes(), find_open_files()
        loader, oracle = make_loader(pictures, persistent_workers=persistent), make_oracle(pictures)
        kept, expected = list(loader), list(oracle)
        for number in (0, 3):
            iterator = iter(loader)
            kept += islice(iterator, number)
            expected += islice(oracle, number)
            assert find_worker_processes() - process_ids
            assert len(find_buffers() - buffers) >= len(kept)
            if not persistent:
                del iterator
                assert find_worker_processes() <= process_ids
                assert find_buffers() - buffers == {buffer_of(images) for images, *_ in kept}
        iterator = None
        del loader, iterator
        assert find_worker_processes() <= process_ids
        assert find_open_files() <= files
        assert find_buffers() - buffers == {buffer_of(images) for images, *_ in kept}
        assert_same(kept, expected)
        kept.clear()
        assert find_buffers() <= buffers


@pytest.mark.usefixtures("all_is_open")
def test_buffers_of_kept_batches_and_abandoned_iterators_are_released(pictures: Path) -> None:
    def await_few_buffers() -> None:
        assert len(find_buffers() - buffers) <= NUM_BUFFERS + 1
        wait_until(lambda: all(len(find_buffers(process_id)) <= NUM_BUFFERS + 1 for process_id in mine))

    with without_collector():
        buffers, process_ids = find_buffers(), find_worker_processes()
        loader, oracle = make_loader(pictures, persistent_workers=True), make_oracle(pictures)
        for _ in range(2):
            kept = list(loader)
            assert len(find_buffers() - buffers) >= len(kept)
            del kept
            buffers_of(loader)
            assert len(find_buffers() - buffers) <= NUM_BUFFERS + 1
        mine, files = find_worker_processes() - process_ids, find_open_files()
        await_few_buffers()
        for number in range(40):
            loader.set_epoch(number)
            iterator = iter(loader)
            for _ in range(number % 4):
                next(iterator)
            if number % 2:  # Even an iterator that is not deleted ends when the next one is created.
                del iterator
        with pytest.raises(OSError, match="Invalid argument"):
            make_memory(-1)
        assert find_open_files() <= files
        for each in (loader, oracle):
            each.set_epoch(3)
        assert_same(list(loader), list(oracle))
        buffers_of(loader)
        assert find_worker_processes() - process_ids == mine
        await_few_buffers()


def kept_batches_hold_no_descriptors(packed: Path) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
    dataset = ShardMapDataset(packed, fields=("image", "key"), transform=RandomResizedCrop(48))
    order = [number % 100 for number in range(160)]  # More batches than the number of files that a process may open.
    loader = DataLoader(dataset, sampler=order, num_workers=1, persistent_workers=True)
    kept = list(loader)
    (process_id,) = find_worker_processes()
    assert len({buffer_of(images) for images, _ in kept}) == len(kept) == 160
    num_files = len(find_open_files())
    assert num_files < 64
    kept += list(loader)
    assert len(find_open_files()) == num_files
    assert find_worker_processes() == {process_id}
    assert len(find_buffers(process_id)) >= len(kept)
    assert len(list(Path(f"/proc/{process_id}/fd").iterdir())) < 64
    oracle = ShardMapDataset(packed, fields="key")
    assert [key for _, (key,) in kept] == [oracle[number] for number in [*order, *order]]


def batches_in_child_and_parent_do_not_change_while_the_parent_continues(packed: Path) -> None:
    loader, oracle, before = make_loader(packed, persistent_workers=True), make_oracle(packed), find_buffers()
    buffers_of(loader)
    expected = list(islice(oracle, 3)) and list(islice(oracle, 3))
    iterator = iter(loader)
    held = list(islice(iterator, 3))
    ask_one = fork(lambda: digest(held))
    for _ in range(2):
        buffers_of(loader)
    assert_same(held, expected)
    ask_other = fork(lambda: digest(held))
    buffers = {buffer_of(images) for images, *_ in held}
    iterator = iter(loader)
    buffers_of(islice(iterator, 3))
    held.clear()  # From now on, only the children hold these batches. In the middle of an epoch, few buffers are free.
    used = set.union(*(buffers_of(batches) for batches in (iterator, loader, loader)))
    assert not buffers & used, "the children share their pages"
    assert ask_one() == ask_other() == digest(expected)
    for _ in range(2):
        buffers_of(loader)
    assert len(find_buffers() - before) <= NUM_BUFFERS + 2, "buffers that children held are released"


def a_thread_may_fork_while_another_one_iterates(packed: Path) -> None:
    loader, oracle = make_loader(packed, persistent_workers=True), make_oracle(packed)
    expected = [digest([batch]) for _ in range(2) for batch in oracle]
    held, seen, asked, num_with_batch = list[Any](), list[str](), list[Any](), 0

    def iterate() -> None:
        for _ in range(2):
            for batch in loader:
                held[:] = [batch]
                seen.append(digest([batch]))

    thread = threading.Thread(target=iterate)
    thread.start()
    while thread.is_alive():
        batches = list(held)
        num_with_batch += bool(batches)
        asked.append((digest(batches), fork(lambda batches=batches: digest(batches))))  # type: ignore[misc]  # of an argument
        del batches
        if len(asked) > 3:
            want, ask = asked.pop(0)
            assert ask() == want
    thread.join()
    assert all(ask() == want for want, ask in asked)
    assert num_with_batch > 0, "otherwise, the test shows nothing"
    assert seen == expected


def a_batch_that_another_thread_receives_during_a_fork_does_not_change(packed: Path) -> None:
    taken = list[Any]()
    # The loader's callback is registered later, so it runs first. Then this callback gets a batch, as a thread might.
    os.register_at_fork(before=lambda: taken.append(next(iterator)))
    loader = make_loader(packed, persistent_workers=True)
    next(iterator := iter(loader))
    ask = fork(lambda: digest(taken))
    want, buffer = digest(taken), buffer_of(taken[0][0])
    taken.clear()
    used = set.union(*(buffers_of(batches) for batches in (iterator, loader, loader)))
    assert buffer not in used, "the child has its pages"
    assert ask() == want


def count_sockets() -> int:
    return sum(path.is_socket() for path in Path("/proc/self/fd").iterdir())


def what_a_child_holds_and_frees_does_not_affect_its_parent(packed: Path) -> None:
    num_sockets, process_ids = count_sockets(), set[int]()
    loader, oracle = make_loader(packed, persistent_workers=True), make_oracle(packed)
    for _ in range(2):
        iterator = iter(loader)
        kept = list(islice(iterator, 4))
        process_ids = process_ids or find_worker_processes()
        assert count_sockets() > num_sockets

        def free(kept: list[Any] = kept) -> int:
            nonlocal loader, iterator
            kept.clear()
            del loader, iterator
            return count_sockets()

        ask = fork(free)
        kept += islice(iterator, 2)
        assert ask() == str(num_sockets), "otherwise, worker processes would outlive their parent"
        if (child := os.fork()) == 0:
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        kept += iterator
        assert_same(kept, list(oracle))
        assert_same(list(loader), list(oracle))
        assert find_worker_processes() == process_ids


def answer(batches: Any, may_look: Any, digests: Any) -> None:
    held = [batches.get() for _ in range(3)]
    digests.put("held")
    may_look.wait()
    digests.put(digest(held))


def batches_that_another_process_received_do_not_change(packed: Path, method: str = "fork") -> None:
    context: Any = multiprocessing.get_context("fork") if method == "fork" else forkserver_context()
    loader, oracle = make_loader(packed, persistent_workers=True), make_oracle(packed)
    buffers_of(loader)
    expected = list(oracle) and list(oracle)
    batches, may_look, digests = context.Queue(), context.Event(), context.Queue()
    child = context.Process(target=answer, args=(batches, may_look, digests), daemon=True)
    iterator = iter(loader)
    first = next(iterator)  # The child is forked while this batch exists.
    child.start()
    for batch in (first, *islice(iterator, 2)):
        batches.put(batch)
    del batch
    rest = list(iterator)
    for _ in range(2):
        buffers_of(loader)
    assert digests.get() == "held"
    assert_same([first, *rest], [expected[0], *expected[3:]])
    del first
    for _ in range(2):
        buffers_of(loader)
    may_look.set()
    assert digests.get() == digest(expected[:3])
    child.join()
    assert child.exitcode == 0
    for each in (oracle, loader):
        each.set_epoch(9)
    assert_same(list(loader), list(oracle))


def a_child_iterates_with_its_own_worker_processes(packed: Path) -> None:
    loader, oracle = make_loader(packed, persistent_workers=True), make_oracle(packed)
    expected = [list(oracle) for _ in range(3)]
    iterator = iter(loader)
    kept = list(islice(iterator, 3))
    process_ids = find_worker_processes()
    assert process_ids

    def iterate() -> str:
        assert not find_worker_processes()
        for epoch in (2, 1, 2):
            loader.set_epoch(epoch)
            assert digest(loader) == digest(expected[epoch])
        own = find_worker_processes()
        assert len(own) == len(process_ids)
        assert not own & process_ids
        assert digest(kept) == digest(expected[0][:3])
        return " ".join(map(str, own))

    ask = fork(iterate)
    kept += islice(iterator, 3)
    own = ask().split()
    assert_same([*kept, *iterator], expected[0])
    assert_same(list(loader), expected[1])
    assert find_worker_processes() == process_ids
    wait_until(lambda: not any(Path("/proc", process_id, "exe").exists() for process_id in own))


def a_child_does_not_use_worker_processes_that_the_parent_started_ahead(packed: Path) -> None:
    loader, expected = make_loader(packed), list(make_oracle(packed))
    loader.start_workers()
    assert fork(lambda: digest(loader))() == digest(expected)
    assert_same(list(loader), expected)


def an_iterator_works_only_in_the_process_that_created_it(packed: Path) -> None:
    dataset = ShardMapDataset(packed, fields=("image", "label", "key"), transform=RandomResizedCrop(48))
    persistent: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
    others: list[dict[str, Any]] = [{"num_workers": 1}, persistent, {**persistent, "worker_method": "thread"}]
    any_order = [DataLoader(each, 8, **options) for each in (dataset, range(100)) for options in others]
    for loader in (make_loader(packed, persistent_workers=True), *any_order):
        iterator = iter(loader)
        kept = list(islice(iterator, 3))

        def use(loader: DataLoader = loader, iterator: Any = iterator) -> int:
            with pytest.raises(RuntimeError, match="belongs to the parent of this forked process: call iter"):
                next(iterator)
            return len(list(loader))

        assert fork(use)() == "13", "the child has its own workers"
        assert len([*kept, *iterator]) == 13
    iterator = iter(make_oracle(packed))
    kept = list(islice(iterator, 3))
    ask = fork(lambda: digest([*kept, *iterator]))
    assert digest([*kept, *iterator]) == ask(), "without worker processes, parent and child continue independently"


def workers_that_call_the_dataset_are_forked_without_a_warning_beside_a_loader(packed: Path) -> None:
    # Since Python 3.12, forking a process that has threads causes a warning: the child may wait forever for locks.
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    dataset = ShardMapDataset(packed, transform=RandomResizedCrop(32))
    loader = DataLoader(dataset, batch_size=4, num_workers=2, persistent_workers=True)
    for _ in loader:
        dataset[0]  # The kernel decodes this sample in this process.
        assert threading.enumerate() == [threading.main_thread()]
    next(iterator := iter(loader))
    theirs = torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context="fork")
    assert len(list(theirs)) == len(list(iterator)) + 1


LAWS: list[Any] = [
    batches_in_child_and_parent_do_not_change_while_the_parent_continues,
    an_iterator_works_only_in_the_process_that_created_it,
]
SLOW_LAWS: list[Any] = [
    kept_batches_hold_no_descriptors,
    a_thread_may_fork_while_another_one_iterates,
    a_batch_that_another_thread_receives_during_a_fork_does_not_change,
    what_a_child_holds_and_frees_does_not_affect_its_parent,
    batches_that_another_process_received_do_not_change,
    partial(batches_that_another_process_received_do_not_change, method="forkserver"),
    a_child_iterates_with_its_own_worker_processes,
    a_child_does_not_use_worker_processes_that_the_parent_started_ahead,
    workers_that_call_the_dataset_are_forked_without_a_warning_beside_a_loader,
]


@pytest.mark.usefixtures("no_process_of_other_tests")
@pytest.mark.parametrize("law", [*LAWS, *(pytest.param(law, marks=pytest.mark.slow) for law in SLOW_LAWS)])
def test_in_a_fresh_process(law: Callable[[Path], None], pictures: Path) -> None:
    assert_passes_in_fresh_process(law, pictures)
