"""Worker processes and their fork servers: when they start, are reused and end, and what causes their replacement."""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.utils.data import Subset

from shardio import DataLoader, EpochSampler, ImageFolder, ShardDataset, ShardMapDataset
from shardio.loader import chunk_pool as pool_module, epoch_iterator
from shardio.loader.assembly import Batch, BatchChunk, ChunkQueue, OutcomeHandler
from shardio.loader.batches import BatchPlan
from shardio.loader.choice import OwnArguments, find_settings
from shardio.loader.chunk_pool import Death, WorkerPool, divide_threads
from shardio.loader.fork_server import ForkServer, end_kept
from shardio.loader.statistics import Tally
from shardio.loader.wire import Chunk, Made, StageTimes, WorkerSetup, make_pair, receive, send
from shardio.train import Callback, TrainConfig, train
from shardio.transforms import CenterCrop, Compose, RandomResizedCrop
from tests.buffers import (
    assert_same,
    buffers_of,
    find_fork_servers,
    find_worker_processes,
    has_ended,
    make_loader,
    make_oracle,
    wait_until,
)
from tests.loader.programs import CALLING

pytestmark = pytest.mark.usefixtures("no_process_of_other_tests")


@pytest.mark.parametrize("persistent", [False, True])
def test_worker_processes_that_were_started_make_the_next_epoch(pictures: Path, persistent: bool) -> None:
    loader = make_loader(pictures, num_workers=2, persistent_workers=persistent)
    loader.start_workers()
    loader.start_workers()
    wait_until(lambda: len(find_worker_processes()) == 2)
    started, iterator = find_worker_processes(), iter(loader)
    got = list(islice(iterator, 1))
    assert find_worker_processes() == started
    if not persistent:
        loader.start_workers()  # An epoch in progress keeps its worker processes.
        other = iter(loader)
    got += iterator
    oracle = make_oracle(pictures)
    assert_same(got, list(oracle))
    assert not persistent or find_worker_processes() == started
    assert_same(list(loader if persistent else other), list(oracle))
    assert persistent or find_worker_processes() == set()


def test_unused_workers_end_with_the_loader_or_are_not_started(pictures: Path) -> None:
    loader = make_loader(pictures)
    loader.start_workers()
    del loader
    assert not find_worker_processes() | find_fork_servers()
    for options in ({"num_workers": 0}, {"num_workers": 1, "worker_init_fn": print}):
        make_loader(pictures, **options).start_workers()
        assert not find_fork_servers()


@pytest.mark.parametrize(
    "transform",
    [Compose([RandomResizedCrop(48), np.negative]), pytest.param(RandomResizedCrop(48), marks=pytest.mark.slow)],
)
def test_later_epochs_have_new_worker_processes_of_the_same_fork_server(pictures: Path, transform: Any) -> None:
    dataset = ShardDataset(pictures, fields=("image", "key"), shuffle=True, transform=transform)
    loader, oracle = DataLoader(dataset, 8, num_workers=2), DataLoader(dataset, 8)
    before, seen = find_fork_servers(), list[set[int]]()
    for _ in range(3):
        iterator = iter(loader)
        got = [next(iterator)]
        seen.append(find_worker_processes())
        got += iterator
        assert find_worker_processes().isdisjoint(seen[-1]), "an epoch's worker processes end with it"
        assert_same(got, list(oracle))
        assert len(find_fork_servers() - before) == 1
    assert len(set().union(*seen)) == 3 * 2
    (server,) = find_fork_servers() - before
    assert len(list(Path(f"/proc/{server}/task").iterdir())) == 1
    del loader, iterator
    end_kept()
    assert find_fork_servers() == before


def test_the_training_driver_starts_them_first(packed: Path) -> None:
    seen = list[int]()

    class Look(Callback):
        def wrap_model(self, model: nn.Module) -> nn.Module:
            seen.append(len(find_fork_servers()))
            return model

    dataset = ShardMapDataset(packed, fields=("image", "label"), transform=RandomResizedCrop(16))
    loader = DataLoader(dataset, 7, sampler=EpochSampler(dataset), num_workers=1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 3))
    train(model, loader, TrainConfig(epochs=1, precision="fp32", device="cpu"), callbacks=[Look()])
    assert seen == [1]


def make_user_loader(pictures: Path, transform: Any = np.negative, **options: Any) -> DataLoader:
    dataset = ShardMapDataset(pictures, fields=("image", "key"), transform=Compose([RandomResizedCrop(48), transform]))
    dataset.set_epoch(3)
    return DataLoader(dataset, 8, **{"num_workers": 1, **options})


def test_the_next_loader_has_the_same_fork_server(pictures: Path, images: Path) -> None:
    servers = list[set[int]]()
    for transform in (np.negative, np.flipud, lambda image: image[:9]):
        got, expected = (list(make_user_loader(pictures, transform, num_workers=number)) for number in (1, 0))
        assert_same(got, expected)
        servers.append(find_fork_servers())
    assert len(servers[0]) == 1
    folder = ImageFolder(images, transform=lambda image: image[:9, :9])
    assert len(list(DataLoader(folder, 21, num_workers=1))) == 1
    assert [*servers, find_fork_servers()] == servers[:1] * 4
    loader = DataLoader(ShardMapDataset(pictures, fields="image", transform=RandomResizedCrop(48)), 8, num_workers=1)
    list(loader)
    assert len(find_fork_servers() - servers[0]) == 1, "a loader without user code has a different server"
    del loader
    assert find_fork_servers() == servers[0], "the server ends with the loader"


def test_loaders_at_the_same_time_have_their_own_and_one_is_kept(pictures: Path) -> None:
    loaders = [make_user_loader(pictures) for _ in range(3)]
    batches = list(zip(*loaders, strict=True))
    assert len(find_fork_servers()) == 3
    assert_same([first for first, *_ in batches], [last for *_, last in batches])
    del loaders[0]
    assert len(find_fork_servers()) == 3
    loaders.clear()
    assert len(find_fork_servers()) == 1


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "edited_transforms", raising=False)  # Another test may have imported this module.
    write_module(tmp_path, 1)
    return importlib.import_module("edited_transforms")


def write_module(folder: Path, value: int) -> None:
    file = folder / "edited_transforms.py"
    file.write_text(f"import numpy as np\n\ndef fill(image):\n    return np.full((9, 9), {value})\n")
    os.utime(file, ns=(0, value * 10**9))  # Two changes in quick succession may get the same clock time.


@pytest.mark.parametrize("is_new", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_reloaded_module_is_imported_again(pictures: Path, tmp_path: Path, module: ModuleType, is_new: bool) -> None:
    loader = make_user_loader(pictures, module.fill)
    for value, is_reloaded, expected in ((1, True, 1), (2, False, 1), (2, True, 2), (2, True, 2)):
        write_module(tmp_path, value)
        if is_reloaded:  # Without a reload, all processes use the code that this process has imported.
            importlib.reload(module)
        if is_new:
            loader = make_user_loader(pictures, module.fill)
        else:
            loader.dataset.transform = module.fill
        values, _ = next(iter(loader))
        assert values.unique().tolist() == [expected]


def as_environment_says() -> Callable[[Any], Any]:
    """Return a function that is pickled by value, because importing this module takes seconds in worker processes."""
    return lambda image: np.full((1, 1, 3), int(os.environ.get("BRIGHTNESS", "0")), np.uint8)


def test_changed_surroundings_replace_it(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = ShardMapDataset(pictures, fields="image", transform=as_environment_says())
    loader, seen = DataLoader(dataset, 8, num_workers=1), list[set[int]]()
    for brightness, folder in ((0, Path.cwd()), (7, Path.cwd()), (7, tmp_path), (7, tmp_path)):
        monkeypatch.setenv("BRIGHTNESS", str(brightness))
        monkeypatch.chdir(folder)
        assert next(iter(loader)).unique().tolist() == [brightness]
        seen.append(find_fork_servers())
    assert [len(servers) for servers in seen] == [1] * 4
    assert seen[-1] == seen[-2]
    assert len(set().union(*seen)) == 3


@pytest.mark.parametrize("make", [make_user_loader, pytest.param(make_loader, marks=pytest.mark.slow)])
def test_one_that_was_killed_is_replaced_silently(pictures: Path, make: Callable[..., DataLoader]) -> None:
    loader, oracle = make(pictures), make(pictures, num_workers=0)
    for _ in range(2):
        assert_same(list(loader), list(oracle))
        (server,) = find_fork_servers()
        os.kill(server, signal.SIGKILL)
        wait_until(partial(has_ended, server))


def test_a_forked_child_does_not_keep_it_alive(pictures: Path) -> None:
    list(make_user_loader(pictures))
    (server,) = find_fork_servers()
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.close(writing)
        os.read(reading, 1)  # Wait for the parent's check.
        os._exit(0)
    end_kept()
    assert server not in find_fork_servers()
    os.close(writing)
    assert os.waitpid(child, 0)[1] == 0
    os.close(reading)


class Incomparable:
    """An object that cannot be compared, for use as a dataset or as a collate_fn."""

    def __init__(self, value: float = 0) -> None:
        self.value = value

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index

    def __call__(self, samples: list[Any]) -> float:
        return self.value

    def __eq__(self, other: object) -> bool:
        raise ValueError("cannot be compared")

    __hash__ = None  # type: ignore[assignment]  # as for every class that defines __eq__ alone


@dataclass
class Cropping:
    size: int

    def __call__(self, image: Any) -> Any:
        return np.asarray(image)[: self.size, : self.size]


class Collating:
    """An object whose method, as a collate_fn, is a new object on each access."""

    def collate(self, samples: list[Any]) -> list[torch.Tensor]:
        return [torch.tensor(os.getpid())]


@pytest.mark.parametrize("kind", ["shards", "sampler", "torch"])
def test_what_cannot_be_compared_can_be_replaced(packed: Path, kind: str) -> None:
    dataset: Any = ShardDataset(packed, fields="key") if kind == "shards" else ShardMapDataset(packed, fields="key")
    sampler = EpochSampler(dataset) if kind == "sampler" else None
    if kind == "torch":
        dataset = Incomparable()
    loader = DataLoader(dataset, batch_size=7, sampler=sampler, collate_fn=Incomparable())
    for value in (1, 1, 2):
        loader.collate_fn = Incomparable(value)
        assert list(loader) == [value] * len(loader)
    settings = find_settings(loader, OwnArguments())
    assert settings.is_same(find_settings(loader, OwnArguments()))
    assert not settings.is_same(replace(settings, datasets=(Incomparable(),)))


def test_persistent_workers_stay_while_the_settings_are_the_same(packed: Path) -> None:
    dataset, transform, collating = ShardMapDataset(packed, fields="image"), Cropping(16), Collating()
    dataset.transform = transform
    options: dict[str, Any] = {"sampler": EpochSampler(dataset), "num_workers": 1, "persistent_workers": True}
    loader = DataLoader(dataset, batch_size=7, collate_fn=collating.collate, **options)

    def find_ids() -> set[int]:
        return {int(process_id) for (process_id,) in loader}

    first = find_ids()
    transform.size = 8  # The new size affects only an error message that names the transform.
    loader.collate_fn = collating.collate
    assert find_ids() == first
    loader.collate_fn = Collating().collate
    assert find_ids().isdisjoint(first)
    loader = DataLoader(dataset, batch_size=7, **options)
    for size in (8, 9, 9):  # Each new transform is used, even if it equals the previous one.
        dataset.transform = Cropping(size)
        assert {batch.shape for batch in loader} == {(7, 3, size, size)}


def test_any_setting_that_changes_makes_a_difference(packed: Path) -> None:
    inner = ShardMapDataset(packed, transform=CenterCrop(16))
    subset = Subset(inner, range(9))
    settings = find_settings(DataLoader(Subset(subset, range(5)), batch_size=2, num_workers=1), OwnArguments())
    changed: dict[str, Any] = {"datasets": (*settings.datasets[:1], Subset(inner, range(9)), inner)}
    changed |= {"decoder": replace(inner.decoder), "batch_sampler": [[0]], "generator": torch.Generator()}
    changed |= {"collate_fn": list, "worker_init_fn": print, "pin_memory_device": "cuda", "worker_method": "thread"}
    changed |= {"multiprocessing_context": torch.multiprocessing.get_context("spawn"), "timeout_s": 1.5}
    changed |= {"batch_size": 3, "num_workers": 2, "prefetch_factor": 2, "snapshot_every_n_steps": 9}
    flags = ("is_ours", "persistent_workers", "in_order", "pin_memory", "pins")
    changed |= {name: not getattr(settings, name) for name in flags}
    assert changed.keys() == {field.name for field in fields(settings)}
    for name, value in changed.items():
        assert not replace(settings, **{name: value}).is_same(settings), name
    assert settings.is_same(replace(settings))
    assert settings.prefetch_factor == 2, "a user's setting differs from an equal default"


def test_pythons_shutdown_waits_for_batches_of_other_threads_and_not_for_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(epoch_iterator, "PATIENCE_S", 3600.0)
    gate, events, is_inside = epoch_iterator._Gate(), list[str](), threading.Event()

    def make() -> None:
        gate.__enter__()
        gate.__enter__()  # A batch that is made from another loader's batches enters the gate twice.
        gate.__exit__()
        is_inside.set()
        while not gate._is_closed:  # Nothing else shows that close() has begun to wait.
            time.sleep(0.001)
        events.append("left")
        gate.__exit__()

    thread = threading.Thread(target=make)
    thread.start()
    is_inside.wait()
    gate.__enter__()  # As if Ctrl-C came before __exit__().
    gate.close()
    events.append("closed")
    thread.join()
    assert events == ["left", "closed"]
    with pytest.raises(RuntimeError, match="Python is shutting down"):
        gate.__enter__()


def count_buffers(loader: DataLoader) -> int:
    """Return the lower of two epochs' buffer counts, because forks by other code in this process replace buffers."""
    return min(len(buffers_of(loader)) for _ in range(2))


def test_batches_are_made_ahead_until_each_worker_has_two_chunks_or_as_many_as_the_user_says(
    pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "divide_threads", lambda num_threads, _: [num_threads])  # This is faster.
    for num_workers, batch_size, prefetch, expected in ((8, 2, None, 16), (8, 2, 5, 5), (1, 16, None, 2)):
        loader = make_loader(pictures, num_workers=num_workers, batch_size=batch_size, prefetch_factor=prefetch)
        assert loader.prefetch_factor == (prefetch or 2), "as in torch"
        assert count_buffers(loader) == expected + 1
    of_torch = DataLoader(ShardMapDataset(pictures, fields="key"), batch_size=8, num_workers=1, **CALLING)
    assert of_torch.prefetch_factor == 2
    loader = make_loader(pictures, num_workers=8, batch_size=2, prefetch_factor=None)
    again = make_loader(pictures, num_workers=8, batch_size=2, prefetch_factor=loader.prefetch_factor)
    for each in (again, pickle.loads(pickle.dumps(loader))):
        assert count_buffers(each) == 16 + 1
    loader = make_loader(pictures, num_workers=8, batch_size=2, prefetch_factor=None, persistent_workers=True)
    for prefetch, expected in ((None, 16), (1, 1), (None, 16)):
        loader.prefetch_factor = prefetch
        assert count_buffers(loader) == expected + 1


NUM_BATCHES = 400
"""More packets than a socket's buffer holds (fewer than 300)."""


def make_long_loader(packed: Path, **options: Any) -> DataLoader:
    dataset = ShardMapDataset(packed, fields=("image", "key"), transform=RandomResizedCrop(48))
    dataset.set_epoch(0)  # Without an epoch, the crops would depend on torch's seed.
    return DataLoader(dataset, sampler=[number % 100 for number in range(NUM_BATCHES)], **options)


def test_more_messages_than_a_socket_holds_may_precede_the_start(pictures: Path) -> None:
    loader = make_long_loader(pictures, num_workers=1, prefetch_factor=1000)
    iterator = iter(loader)
    got = list(islice(iterator, 1))
    before = find_worker_processes()
    got += islice(iterator, NUM_BATCHES - 2)
    assert find_worker_processes() == before
    got += iterator
    assert_same(got, list(make_long_loader(pictures)))


def test_worker_processes_survive_when_many_batches_are_freed_at_once(
    pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget, forgotten = WorkerPool.forget, list[int]()

    def count(self: WorkerPool, buffer_ids: tuple[int, ...]) -> None:
        forgotten.append(len(buffer_ids))
        forget(self, buffer_ids)

    monkeypatch.setattr(WorkerPool, "forget", count)
    loader = make_long_loader(pictures, num_workers=1, persistent_workers=True)
    kept = list(loader)
    before = find_worker_processes()
    del kept
    assert len(list(loader)) == NUM_BATCHES
    assert find_worker_processes() == before
    assert max(forgotten) > NUM_BATCHES / 2, "one message is enough for many buffers"


def test_a_worker_process_that_reads_nothing_is_killed(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = ShardMapDataset(pictures, fields=("image", "key"), transform=RandomResizedCrop(48))
    pool = WorkerPool(ForkServer(), WorkerSetup(reader=dataset.reader, decoder=dataset.decoder), num_threads=1)
    try:
        assert pool.receive(None) == [], "it has started and sent a Pong"
        monkeypatch.setattr(pool_module, "PATIENCE_S", 0.1)
        (process_id,) = find_worker_processes()
        os.kill(process_id, signal.SIGSTOP)
        for buffer_id in range(NUM_BATCHES):
            pool.forget((buffer_id,))
        (death,) = pool.receive(None)
        assert isinstance(death, Death)
        assert death.cause.startswith("no message was read for ")
        assert find_worker_processes().isdisjoint({process_id})
    finally:
        pool.close()


@given(st.integers(1, 300), st.integers(1, 300))
def test_threads_are_divided_evenly_over_worker_processes(num_threads: int, num_processors: int) -> None:
    threads = divide_threads(num_threads, num_processors)
    assert sum(threads) == num_threads
    assert max(threads) - min(threads) <= 1 <= min(threads)
    assert len(threads) == min(num_threads, num_processors)


def test_messages_that_an_end_sent_before_it_closed_are_received() -> None:
    ours, theirs = make_pair()
    with ours:
        with theirs:
            send(ours, "not read")
            send(theirs, "last words")
        assert receive(ours) == ("last words", [])
        assert receive(ours) is None


def test_a_part_that_arrives_with_a_death_is_redone_with_its_batch() -> None:
    def make_chunk(row: int) -> BatchChunk:
        words = np.zeros(2, np.uint64)
        plan = BatchPlan(indices=np.arange(row, row + 2), rng_keys=words, replacement_rng_keys=words)
        return BatchChunk(plan=plan, row=row)

    def receive(*answers: Made | Death) -> None:
        workers.receive = lambda timeout_s: list(answers)
        for outcome in queue.receive(None):
            handler.apply(*outcome)

    def made(chunk: Chunk) -> Made:
        return Made(chunk_id=chunk.chunk_id, columns=[None], times=StageTimes(), num_images_by_decoder=Counter())

    chunks, calls, buffer_ids = list[Chunk](), list[tuple[str, list[int]]](), count()
    workers: Any = SimpleNamespace(next_chunk_id=partial(next, count()), submit=chunks.extend)
    buffers: Any = SimpleNamespace(
        take=lambda: SimpleNamespace(buffer_id=next(buffer_ids)),
        drop=lambda dropped: calls.append(("drop", [buffer.buffer_id for buffer in dropped])),
        retire=lambda: calls.append(("retire", [])),
    )
    tally = Tally(num_workers=2)
    source: Any = SimpleNamespace(dataset=SimpleNamespace(locate=lambda indices: indices), epoch=0, takes_tiles=False)
    queue = ChunkQueue(workers, buffers, source, tally)
    handler = OutcomeHandler(source=source, bad_samples=None, tally=tally)
    batch = Batch(buffer=buffers.take(), chunks=[make_chunk(0), make_chunk(2)])
    queue.add(batch, batch.chunks)
    first, second = chunks
    with pytest.warns(RuntimeWarning, match="killed; it was restarted"):
        receive(made(first), Death(cause="killed", in_flight=(second.chunk_id,), was_ready=True))
    assert calls == [("retire", []), ("drop", [first.buffer_id])], "the restarted process has no buffers"
    assert batch.buffer is not None
    assert batch.buffer.buffer_id != first.buffer_id
    assert [chunk.columns for chunk in batch.chunks] == [None, None]
    while not batch.is_made:
        receive(*map(made, chunks[2:]))
    assert {chunk.row for chunk in chunks[2:]} == {0, 2}
    assert {chunk.buffer_id for chunk in chunks[2:]} == {batch.buffer.buffer_id}
