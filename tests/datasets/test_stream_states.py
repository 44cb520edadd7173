"""A run over streams that resumes delivers the rest of an uninterrupted one, in shardio's and torchdata's loaders."""

from __future__ import annotations

import json
import shlex
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from shardio import DataLoader, StateError, StreamDataset
from shardio.transforms import RandomResizedCrop
from tests.tars import write_tar

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it in torch.


def make_dataset(packed: Path, log: Path | None = None, **options: Any) -> StreamDataset:
    """Return a dataset of stored tars or, with a log, of commands that note there which tar they read."""
    note = f"echo {{}} >> {shlex.quote(str(log))}; "
    tars = sorted(packed.glob("*.tar"))
    sources = tars if log is None else [f"pipe:{note.format(path.name)}cat {path}" for path in tars]
    crop = RandomResizedCrop(8)
    defaults: dict[str, Any] = {
        "fields": ("key", "image"),
        "shuffle": True,
        "buffer": 4,
        "seed": 1,
        "transform": crop,
    }
    return StreamDataset(sources, **{**defaults, **options})


def describe(batches: Any) -> list[Any]:
    """Return batches as values that can be compared."""
    return [(list(keys), images.tolist()) for keys, images in batches]


def save(state: Any) -> Any:
    return json.loads(json.dumps(state))


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_iterator_resumes_after_any_sample(packed: Path, shuffle: bool) -> None:
    dataset = make_dataset(packed, shuffle=shuffle, fields="key", transform=None)
    dataset.set_epoch(3)
    whole = list(dataset)
    running = iter(dataset)
    for number in range(len(whole) + 1):
        resumed = iter(dataset)
        resumed.load_state_dict(save(running.state_dict()))
        assert list(resumed) == whole[number:]
        assert next(running, None) == (whole[number] if number < len(whole) else None)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("loader", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_resumed_run_is_the_rest_of_an_uninterrupted_one(
    packed: Path, loader: Any, num_workers: int, shuffle: bool
) -> None:
    def make() -> Any:
        dataset = make_dataset(packed, shuffle=shuffle, rank=0, world_size=1)
        return loader(dataset, batch_size=2, num_workers=num_workers)

    def run(loader: Any, epoch: int) -> list[Any]:
        loader.dataset.set_epoch(epoch)
        return describe(loader)

    whole = make()
    epochs = [run(whole, epoch) for epoch in range(2)]
    for stop in (3, len(epochs[0])):
        first = make()
        first.dataset.set_epoch(0)
        batches = iter(first)
        before = describe(islice(batches, stop))
        state = save(first.state_dict())
        del batches
        resumed = make()
        resumed.load_state_dict(state)
        assert before + run(resumed, 0) == epochs[0]
        assert run(resumed, 1) == epochs[1]


def test_a_resumed_worker_opens_no_tar_that_was_consumed(packed: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    running = iter(make_dataset(packed, log, shuffle=False))
    for _ in range(11):  # Two tars of five samples, and one more.
        next(running)
    running.close()
    names = log.read_text().split()
    log.unlink()
    resumed = iter(make_dataset(packed, log, shuffle=False))
    resumed.load_state_dict(running.state_dict())
    assert len(list(resumed)) == 10
    assert log.read_text().split() == sorted(names)[2:] + [f"shard-{i:06d}.tar" for i in range(len(names), 5)]


def test_a_state_of_other_samples_is_refused(tmp_path: Path) -> None:
    def write(names: str) -> None:
        write_tar(tmp_path / "a.tar", [(f"{name}.txt", b"x") for name in names])

    write("abcdef")
    running = iter(StreamDataset(tmp_path / "a.tar", fields="key"))
    assert [next(running) for _ in range(3)] == ["a", "b", "c"]
    state = running.state_dict()
    for names, matches in (("abcXYZ", True), ("abXdef", False), ("ab", False)):
        write(names)
        resumed = iter(StreamDataset(tmp_path / "a.tar", fields="key"))
        resumed.load_state_dict(state)
        if matches:
            assert list(resumed) == ["X", "Y", "Z"]
            continue
        with pytest.raises(StateError, match=r"a\.tar does not begin with the same 3 samples"):
            next(resumed)
        with pytest.raises(RuntimeError, match="ended before its last batch"):  # Not the end of the epoch.
            next(resumed)


@pytest.mark.parametrize("names", ["abcdeXghij", "abcdefg", "XYZUVWabcd"])
def test_other_samples_in_a_window_that_was_begun_are_noticed(tmp_path: Path, names: str) -> None:
    def make(names: str) -> StreamDataset:
        write_tar(tmp_path / "a.tar", [(f"{name}.txt", b"x") for name in names])
        return StreamDataset(tmp_path / "a.tar", fields="key", shuffle=True, buffer=8)

    running = iter(make("abcdefghij"))
    for _ in range(5):
        next(running)
    resumed = iter(make(names))
    resumed.load_state_dict(save(running.state_dict()))
    with pytest.raises(StateError, match=r"a\.tar, or a stream after it, does not have the same samples"):
        next(resumed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 2}, r"order.seed is 1 in the state and 2 here"),
        ({"shuffle": False}, r"order.shuffle is True"),
        ({"buffer": 5}, r"order.buffer is 4"),
        ({"rank": 1, "world_size": 2}, r"share.rank is 0 in the state and 1 here; share.world_size"),
    ],
)
def test_a_state_of_another_order_is_refused(packed: Path, options: dict[str, Any], message: str) -> None:
    state = iter(make_dataset(packed)).state_dict()
    with pytest.raises(StateError, match=message):
        iter(make_dataset(packed, **options)).load_state_dict(state)


def test_what_is_no_state_is_refused(packed: Path) -> None:
    iterator = iter(make_dataset(packed))
    state = iterator.state_dict()
    place = state["place"]
    for damaged in (
        None,
        {},
        {**state, "version": 99},
        {**state, "dataset": {}},
        {**state, "epoch": -1},
        {**state, "place": {**place, "turn": "1"}},
        {**state, "place": {**place, "digest": "xyz"}},
        {**state, "place": {}},
    ):
        with pytest.raises(StateError):
            iterator.load_state_dict(damaged)  # type: ignore[arg-type]
    iterator.load_state_dict(state)
    assert len(list(iterator)) == 21


def test_changed_tokens_do_not_change_the_state(packed: Path) -> None:
    tar = packed / "shard-000000.tar"
    running = iter(StreamDataset(f"pipe:TOKEN=old cat {tar}", fields="key"))
    expected = list(StreamDataset(tar, fields="key"))
    assert next(running) == expected[0]
    resumed = iter(StreamDataset(f"pipe:TOKEN=new cat {tar}", fields="key"))
    resumed.load_state_dict(running.state_dict())
    assert list(resumed) == expected[1:]
    assert torch.is_tensor(next(iter(StreamDataset(tar)))[0])
