"""A program that catches an error or interruption receives the remaining batches, or the epoch ends with an error."""

from __future__ import annotations

import gc
import itertools
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
from torch.utils.data import Sampler

import shardio
from shardio import DataLoader, DevicePrefetcher, EpochSampler, ImageFolder, SampleError, ShardDataset, ShardMapDataset
from shardio.epochs import find_held
from shardio.images.formats import find_format
from shardio.loader.chunk_pool import WorkerPool
from shardio.transforms import RandomHorizontalFlip, RandomResizedCrop
from tests.device.late_stream import prefetch_late
from tests.faults.damage import BAD, BATCH_SIZE, NUM_SAMPLES, Subject, fill_with_noise, order_of
from tests.faults.worker_processes import (
    CROP,
    DEADLINE_S,
    Batches,
    batches_of,
    find_worker_processes,
    plain,
    send_signal,
)
from tests.sources import encode
from tests.tars import write_tar

EXECUTORS: dict[str, dict[str, Any]] = {
    "this process": {"num_workers": 0},
    "workers that stay": {"num_workers": 2, "persistent_workers": True},
    "called here": {"num_workers": 0, "worker_init_fn": print},
    "called in workers that stay": {"num_workers": 1, "worker_init_fn": id, "persistent_workers": True},
}


def catching(batches: Iterator[Any], errors: list[Exception]) -> Iterator[Any]:
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Exception as error:
            errors.append(error)
            continue
        yield batch


def good_batches(subject: Subject) -> Batches:
    twins = zip(batches_of(subject.loader(0, clean=True)), order_of(subject.kind), strict=True)
    return [batch for batch, numbers in twins if not set(numbers) & set(subject.bad)]


WRAPS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda loader: loader,
    "prefetcher": lambda loader: DevicePrefetcher(loader, "cpu"),
    "prefetcher of 1 late batch": lambda loader: prefetch_late(loader, depth=1)[0],
    "prefetcher of 3 late batches": lambda loader: prefetch_late(loader, depth=3)[0],
}


@pytest.mark.parametrize(
    ("executor", "wrap"),
    [*((executor, "itself") for executor in EXECUTORS)]
    + [(executor, wrap) for executor in ("this process", "called here") for wrap in WRAPS if wrap != "itself"],
)
def test_a_failed_batch_is_one_batch_and_counts_when_the_next_one_is_requested(
    tmp_path: Path, executor: str, wrap: str
) -> None:
    subject = Subject(tmp_path, "shards")
    loader, expected = subject.loader(**EXECUTORS[executor]), good_batches(subject)
    fails = [bool(set(numbers) & set(subject.bad)) for numbers in order_of("shards")]
    assert 1 < sum(fails) <= len(BAD)
    for _ in range(2 if "stay" in executor else 1):
        loader.set_epoch(0)
        batches, received = iter(WRAPS[wrap](loader)), []
        for place, does_fail in enumerate(fails):
            if does_fail:
                with pytest.raises(SampleError) as caught:
                    next(batches)
                assert caught.value.key
                assert caught.value.where
            else:
                received.append(plain(next(batches)))
            assert loader.state_dict()["position"] == (place + (not does_fail)) * BATCH_SIZE, (
                "a resumed run repeats the failed batch"
            )
        assert received == expected
        assert list(batches) == []
        assert loader.state_dict()["position"] == NUM_SAMPLES


@pytest.mark.parametrize(("num_workers", "place"), [(0, 0), (0, 40), (0, -1), (3, 40)])
def test_the_batch_after_an_unreadable_one_is_whole(tmp_path: Path, num_workers: int, place: int) -> None:
    subject = Subject(tmp_path, "map", {1: fill_with_noise})
    dataset = ShardMapDataset(subject.tars, fields=("image", "key"), transform=RandomResizedCrop(48))
    good = [number % NUM_SAMPLES for number in range(80) if number % NUM_SAMPLES != 1]
    whole = list(good)
    whole[place] = 1
    iterator = iter(DataLoader(dataset, batch_sampler=[whole, good] * 2, num_workers=num_workers))
    for _ in range(2):
        with pytest.raises(SampleError, match="cannot be decoded"):
            next(iterator)
        _, keys = next(iterator)
        assert keys == tuple(dataset[number][1] for number in good)
    assert list(iterator) == []


@pytest.mark.parametrize(("num_workers", "number"), [(0, 0), (0, 1), (0, 5), (1, 0), (1, 5)])
def test_an_error_that_blames_no_sample_does_not_end_the_epoch(tmp_path: Path, num_workers: int, number: int) -> None:
    Subject(tmp_path, "folder", {})
    folder = ImageFolder(tmp_path / "clean", transform=RandomResizedCrop(48))
    good = [labels.tolist() for _, labels in DataLoader(folder, batch_size=4)]
    assert len(good) == NUM_SAMPLES // 4
    folder.samples[number] = (folder.samples[number][0], 0.5)  # type: ignore[assignment]  # the test
    loader = DataLoader(folder, batch_size=4, sampler=EpochSampler(folder, shuffle=False), num_workers=num_workers)
    errors: list[Exception] = []
    assert [labels.tolist() for _, labels in catching(iter(loader), errors)] == [
        expected for at, expected in enumerate(good) if at != number // 4
    ]
    assert [type(error) for error in errors] == [TypeError]
    assert "got 0.5 for" in str(errors[0])
    assert loader.state_dict()["position"] == NUM_SAMPLES


class Failing(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(5)
        raise OSError("the list of samples is gone")


@pytest.mark.parametrize(("num_workers", "init"), [(0, None), (1, None), (0, id), (1, id)])
def test_a_samplers_error_ends_the_epoch_but_never_silently(tmp_path: Path, num_workers: int, init: Any) -> None:
    dataset = ShardMapDataset(Subject(tmp_path, "map", {}).tars, fields="key")
    iterator = iter(DataLoader(dataset, sampler=Failing(), num_workers=num_workers, worker_init_fn=init))
    assert [next(iterator) for _ in range(5)] == [[dataset[index]] for index in range(5)]
    for _ in range(3):
        with pytest.raises(OSError, match="is gone"):
            next(iterator)


class PickyError(Exception):
    def __init__(self, word: str, number: int) -> None:
        super().__init__(word, number)
        self.number = number


class Picky:
    def __init__(self, refused: list[Any]) -> None:
        self.refused = refused

    def __call__(self, value: Any) -> Any:
        keys = [key for _, key in value] if isinstance(value, list) else [int(value.astype(int).sum())]
        if set(self.refused) & set(keys):
            raise PickyError("refused", 7)
        return keys if isinstance(value, list) else value


@pytest.mark.parametrize("num_workers", [0, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("where", ["transform", "collate_fn"])
def test_errors_of_users_own_functions_lose_one_batch_each(packed: Path, num_workers: int, where: str) -> None:
    samples = list(ShardDataset(packed, fields=("image", "key"), shuffle=True))
    chosen = [samples[number] for number in (2, 3, 17)]
    transform = Picky([int(image.int().sum()) for image, _ in chosen]) if where == "transform" else None
    dataset = ShardDataset(packed, fields=("image", "key"), shuffle=True, transform=transform)
    collate = Picky([key for _, key in chosen] if where == "collate_fn" else [])
    loader = DataLoader(dataset, batch_size=4, num_workers=num_workers, collate_fn=collate)
    errors: list[Exception] = []
    batches = list(catching(iter(loader), errors))
    keys = [key for _, key in samples]
    assert batches == [keys[start : start + 4] for start in range(0, len(keys), 4) if start not in (0, 16)]
    assert [(type(error), getattr(error, "number", None)) for error in errors] == [(PickyError, 7)] * 2


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_torchs_own_loader_delivers_the_rest_too(tmp_path: Path, num_workers: int) -> None:
    subject = Subject(tmp_path, "shards")
    options: dict[str, Any] = {"shuffle": True, "batch_size": BATCH_SIZE}
    dataset = ShardDataset(
        subject.tars, fields=("key", "image", "label"), transform=lambda image: torch.zeros(1), **options
    )
    keys = list(ShardDataset(subject.tars, fields="key", **options))
    timeout = DEADLINE_S if num_workers else 0
    loader: Any = torch.utils.data.DataLoader(dataset, BATCH_SIZE, num_workers=num_workers, timeout=timeout)
    errors: list[Exception] = []
    found = [list(batch[0]) for batch in catching(iter(loader), errors)]
    bad = {subject.name(number).split(" ")[0] for number in subject.bad}
    several = [keys[at : at + BATCH_SIZE] for at in range(0, NUM_SAMPLES, BATCH_SIZE)]
    assert found == [batch for batch in several if not bad & set(batch)]
    assert len(errors) == len(several) - len(found)


PACKAGE = f"{Path(shardio.__file__).parent}/"
"""The full path of shardio's folder, because a clone's path may also contain the folder's name."""

ENDED = "this epoch ended before its last batch"


def results_of(batches: Iterator[Any]) -> Iterator[Any]:
    with suppress(StopIteration):
        while True:
            yield result_of(batches)


def result_of(batches: Iterator[Any]) -> Any:
    try:
        return plain(next(batches))
    except SampleError as error:
        return str(error)


def rest_of(batches: Iterator[Any], received: list[Any]) -> str | None:
    """Collect the rest of an epoch. If an error ends the epoch, return its message; the next request must also raise an
    error."""
    try:
        received += results_of(batches)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=ENDED):
            next(batches)
        return str(error)
    return None


class Interruption:
    def __init__(self, number: int) -> None:
        self.num_left = number

    def __call__(self, frame: Any, event: str, argument: object) -> None:
        code = frame.f_code
        is_ours = code.co_filename.startswith(PACKAGE) and event in ("call", "c_call", "c_return")
        if is_ours and code.co_name not in ("__del__", "<genexpr>"):  # Errors in these functions are lost.
            self.num_left -= 1
            if self.num_left == 0:
                raise KeyboardInterrupt


def receive_interrupted(batches: Iterator[Any], number: int) -> tuple[list[Any], int, str | None]:
    """Receive an epoch, and interrupt it at a given call in shardio during the request for its second batch.

    Returns:
        The results, the number of calls, and the message of the error that ended the epoch, or None.
    """
    interruption, end = Interruption(number), None
    received = [result_of(batches)]
    gc.disable()  # The interruption would be lost if it hit the finalizer of another epoch's generator.
    sys.setprofile(interruption)
    try:
        received.append(result_of(batches))
    except KeyboardInterrupt:
        end = rest_of(batches, received)
    else:
        sys.setprofile(None)
        received += results_of(batches)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert find_held() is None, "a batch that is still held would stop the count"
    return received, number - interruption.num_left, end


def dense_at_both_ends(num_calls: int) -> list[int]:
    """Return numbers from 1 to a little more than ``num_calls``, in steps that grow toward the middle."""
    numbers, step = set[int](), 0
    while step < num_calls:
        numbers |= {1 + step, num_calls + 2 - step}
        step += 1 + step // 2
    return sorted(numbers)


@pytest.mark.parametrize(
    ("through", "fails"),
    [
        ("loader", False),
        ("loader", True),
        *(
            pytest.param(through, fails, marks=pytest.mark.slow)
            for through in ("sampler", "called", "prefetcher")
            for fails in (False, True)
        ),
    ],
)
def test_whenever_it_is_interrupted_no_batch_is_lost_or_repeated(tmp_path: Path, through: str, fails: bool) -> None:
    folder = tmp_path / "good"
    folder.mkdir()
    dataset = ShardMapDataset(Subject(folder, "map", {}).tars, fields=("image", "label", "key"), transform=CROP)

    def start() -> Iterator[Any]:
        torch.manual_seed(0)
        sampler = None if through == "sampler" else EpochSampler(dataset)
        loader = DataLoader(dataset, 8, sampler=sampler, worker_init_fn=print if through == "called" else None)
        return iter(DevicePrefetcher(loader, "cpu") if through == "prefetcher" else loader)

    expected = list(results_of(start()))
    if fails:
        damaged = Subject(tmp_path, "map", {int(expected[1][2][0][-3:]): fill_with_noise})
        dataset = ShardMapDataset(damaged.tars, fields=("image", "label", "key"), transform=CROP)
        expected = list(results_of(start()))
    assert [isinstance(result, str) for result in expected] == [False, fails, False, False, False]
    num_calls = receive_interrupted(start(), 10**9)[1]
    assert num_calls > 500
    ends = set[str]()
    for number in dense_at_both_ends(num_calls):
        received, _, end = receive_interrupted(start(), number)
        assert received == (expected if end is None else expected[: len(received)]), number
        ends |= set() if end is None else {end}
    assert [end for end in ends if ENDED not in end] == []
    assert any("KeyboardInterrupt" in end for end in ends)


@pytest.fixture
def webps(tmp_path: Path) -> Path:
    contents = [encode(number, width=64, height=64, suffix="webp") for number in range(12)]
    tar = tmp_path / "webps.tar"
    write_tar(tar, [each for at, webp in enumerate(contents) for each in ((f"{at}.webp", webp), (f"{at}.cls", b"0"))])
    return tar


@contextmanager
def at_conversion(number: int, act: Callable[[], None]) -> Iterator[None]:
    convert, num_left = PIL.Image.Image.convert, number

    def convert_or_act(image: PIL.Image.Image, *arguments: Any) -> PIL.Image.Image:
        nonlocal num_left
        num_left -= 1
        if num_left == 0:
            act()
        return convert(image, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PIL.Image.Image, "convert", convert_or_act)
        yield


@contextmanager
def handler_raises(error: BaseException) -> Iterator[None]:
    def handle(number: int, frame: object) -> None:
        raise error

    former = signal.signal(signal.SIGUSR1, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, former)


def signal_us() -> None:
    signal.raise_signal(signal.SIGUSR1)


@pytest.mark.parametrize("error", [TimeoutError("too long"), Exception("stop now")], ids=repr)
@pytest.mark.parametrize("init", [None, print], ids=["here", "called here"])
def test_nothing_is_blamed_for_what_a_signal_handler_raises(
    webps: Path, tmp_path: Path, error: Exception, init: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    quarantine = tmp_path / "quarantine.jsonl"
    dataset = ShardMapDataset(webps, transform=CROP)
    sampler = EpochSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, 4, sampler=sampler, on_error="replace", quarantine=quarantine, worker_init_fn=init)
    batches = iter(loader)
    next(batches)
    with handler_raises(error), at_conversion(1, signal_us), pytest.raises(type(error)) as raised:
        next(batches)
    assert raised.value is error
    with pytest.raises(RuntimeError, match=ENDED):
        next(batches)
    assert loader.state_dict()["position"] == 4
    assert not quarantine.exists()
    monkeypatch.setattr(PIL.Image, "open", lambda file: signal_us())
    error = SyntaxError("stop")  # Pillow's readers raise this type for files in other formats.
    with handler_raises(error), pytest.raises(SyntaxError) as of_file:
        find_format(b"neither PNG nor JPEG")
    assert of_file.value is error


def test_running_out_of_memory_is_not_a_bad_sample(webps: Path, tmp_path: Path) -> None:
    def run_out() -> None:
        raise MemoryError("none left")

    quarantine = tmp_path / "quarantine.jsonl"
    loader = DataLoader(ShardDataset(webps, transform=CROP), 4, on_error="skip", quarantine=quarantine)
    with at_conversion(2, run_out), pytest.raises(MemoryError, match="none left") as raised:
        next(iter(loader))
    assert raised.value.__cause__ is None
    assert not quarantine.exists()
    assert len(batches_of(loader)) == 3


def test_after_a_timeout_an_epoch_does_not_end_as_if_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = Subject(tmp_path, "shards", {}).loader(1, prefetch_factor=1)
    expected = batches_of(loader)
    loader.set_epoch(0)
    batches = iter(loader)
    received = [plain(next(batches))]
    with monkeypatch.context() as patch:
        batches._batches._timeout_s = 0.01
        patch.setattr(WorkerPool, "receive", lambda self, timeout_s: [])
        with pytest.raises(RuntimeError, match="no batch arrived within timeout"):
            received += map(plain, batches)  # Other batches may have arrived with the first one.
    end = rest_of(batches, received)
    assert end is not None
    assert "no batch arrived within timeout" in end
    loader.load_state_dict(loader.state_dict())
    assert received + batches_of(loader) == expected


def test_workers_that_were_interrupted_are_not_used_again(tmp_path: Path) -> None:
    loader = Subject(tmp_path, "map", {}).loader(1, persistent_workers=True, prefetch_factor=1)
    expected = batches_of(loader)
    loader.set_epoch(0)
    batches = iter(loader)
    received = [plain(next(batches))]
    send_signal(find_worker_processes()[-1], signal.SIGKILL)
    with pytest.raises(RuntimeWarning, match="is killed by signal: Killed"):  # Warnings are errors in these tests.
        received += map(plain, batches)
    end = rest_of(batches, received)
    assert end is not None
    assert "SIGKILL" in end
    assert received == expected[: len(received)] != expected
    loader.set_epoch(0)
    assert batches_of(loader) == expected


def end_third() -> Callable[[Any], int]:
    numbers = itertools.count()

    def collate(samples: Any) -> int:
        if next(numbers) == 2:
            raise StopIteration
        return 0

    return collate


class EndingTransform(RandomHorizontalFlip):
    def draw(self, sizes: Any, keys: Any) -> Any:
        raise StopIteration


@pytest.mark.parametrize(
    ("kind", "num_workers"),
    [
        *(("shards", 0), ("map", 0), ("plain map", 0)),
        *(pytest.param(kind, 1, marks=pytest.mark.slow) for kind in ("shards", "plain map")),
    ],
)
def test_stop_iteration_in_user_code_does_not_end_the_epoch(tmp_path: Path, kind: str, num_workers: int) -> None:
    tars = Subject(tmp_path, "map", {}).tars
    for what in ("collate_fn", "transform")[: 1 if num_workers else 2]:
        is_collate = what == "collate_fn"
        options: dict[str, Any] = {"fields": ("key",) if is_collate else ("image",)}
        options["transform"] = None if is_collate else EndingTransform()
        dataset: Any = (ShardDataset if kind == "shards" else ShardMapDataset)(tars, **options)
        sampler, collate_fn = EpochSampler(dataset) if kind == "map" else None, end_third() if is_collate else None
        loader = DataLoader(dataset, 8, num_workers=num_workers, sampler=sampler, collate_fn=collate_fn)
        errors: list[Exception] = []
        num_received = len(list(catching(iter(loader), errors)))
        assert (num_received, len(errors)) == ((4, 1) if is_collate else (0, 5))
        assert all(type(error) is RuntimeError and "raised StopIteration" in str(error) for error in errors)
