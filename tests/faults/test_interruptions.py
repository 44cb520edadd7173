"""An interrupted epoch never ends as if it were complete, and no sample is blamed for it."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch

import shardio
from shardio import DataLoader, DevicePrefetcher, EpochSampler, SampleError, ShardDataset, ShardMapDataset
from shardio.epochs import find_held
from shardio.images.formats import find_format
from shardio.loader.pool import WorkerPool
from shardio.transforms import RandomHorizontalFlip
from tests.faults.damage import Subject, fill_with_noise
from tests.faults.test_caught_errors import catching
from tests.faults.worker_processes import CROP, batches_of, find_worker_processes, plain, send_signal
from tests.sources import encode
from tests.tars import write_tar

PACKAGE = f"{Path(shardio.__file__).parent}/"
"""shardio's folder. The path of a clone may contain its name, too."""

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
    """Collect the rest of an epoch; return the message of the error that ended it, which must repeat from then on."""
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
        if is_ours and code.co_name not in ("__del__", "<genexpr>"):  # Errors there go nowhere.
            self.num_left -= 1
            if self.num_left == 0:
                raise KeyboardInterrupt


def receive_interrupted(batches: Iterator[Any], number: int) -> tuple[list[Any], int, str | None]:
    """Receive an epoch that is interrupted at a call for its second batch.

    Returns:
        The results, how many calls there were, and the words of the error that ended the epoch, if one did.
    """
    interruption, end = Interruption(number), None
    received = [result_of(batches)]
    gc.disable()  # It may finalize another pass's generators, whose errors go nowhere.
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
    assert find_held() is None, "or no later batch would count"
    return received, number - interruption.num_left, end


def dense_at_both_ends(num_calls: int) -> list[int]:
    """Return numbers from 1 to a little more than ``num_calls``, ever fewer towards the middle."""
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
    """Nor is the error of a batch that fails: it comes in its place, or the epoch ends with an error."""
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
    error = SyntaxError("stop")  # Pillow's own, for files.
    with handler_raises(error), pytest.raises(SyntaxError) as of_file:
        find_format(b"neither PNG nor JPEG")
    assert of_file.value is error


def test_running_out_of_memory_is_not_a_bad_sample(webps: Path, tmp_path: Path) -> None:
    def run_out() -> None:
        raise MemoryError("none left")

    quarantine = tmp_path / "quarantine.jsonl"
    loader = DataLoader(ShardDataset(webps, transform=CROP), 4, on_error="skip", quarantine=quarantine)
    with at_conversion(2, run_out), pytest.raises(MemoryError, match="none left"):
        next(iter(loader))
    assert not quarantine.exists()


def test_after_a_timeout_the_epoch_does_not_end_as_if_it_were_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = Subject(tmp_path, "shards", {}).loader(1, prefetch_factor=1)
    expected = batches_of(loader)
    loader.set_epoch(0)
    batches = iter(loader)
    received = [plain(next(batches))]
    with monkeypatch.context() as patch:
        batches._batches._timeout_s = 0.01
        patch.setattr(WorkerPool, "receive", lambda self, timeout_s: [])
        with pytest.raises(RuntimeError, match="no batch arrived within timeout"):
            received += map(plain, batches)  # Some may have arrived with the first one.
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


class Ending:
    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, samples: Any) -> int:
        self.num_calls += 1
        if self.num_calls == 3:
            raise StopIteration
        return 0


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
        sampler, collate_fn = EpochSampler(dataset) if kind == "map" else None, Ending() if is_collate else None
        loader = DataLoader(dataset, 8, num_workers=num_workers, sampler=sampler, collate_fn=collate_fn)
        errors: list[Exception] = []
        assert len(list(catching(iter(loader), errors))) == (4 if is_collate else 0)
        assert len(errors) == (1 if is_collate else 5)
        assert {type(error) for error in errors} == {RuntimeError}
        assert all("raised StopIteration" in str(error) for error in errors)
