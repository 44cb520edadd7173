"""Unreadable samples in any dataset and executor cause an error at their batch, a replacement, or a smaller batch."""

from __future__ import annotations

import errno
import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import ConcatDataset, Dataset, Subset

from shardio import DataLoader, EpochSampler, ImageFolder, SampleError, ShardDataset, ShardMapDataset
from shardio.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop
from tests.faults.damage import (
    BAD,
    BATCH_SIZE,
    NUM_SAMPLES,
    SHARD_SIZE,
    Subject,
    cut_off,
    empty,
    fill_with_noise,
    key_of,
    order_of,
    remove,
    warns_of_bad_samples,
)
from tests.faults.worker_processes import KINDS, Batches, Kind, batches_of, collect, count_images, plain
from tests.loader.programs import CALLING, WORKERS, Called, Shares, keys_of

kinds_and_workers = pytest.mark.parametrize(
    ("kind", "num_workers"), [("shards", 0), ("map", 0), ("folder", 0), ("map", 1)]
)
here_or_in_a_worker = pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])


@pytest.fixture
def subject(tmp_path: Path, kind: Kind) -> Subject:
    return Subject(tmp_path, kind)


@kinds_and_workers
def test_raise_stops_at_the_samples_batch_and_names_it(subject: Subject, num_workers: int) -> None:
    numbers = order_of(subject.kind)
    stop = next(place for place, batch in enumerate(numbers) if set(batch) & set(subject.bad))
    loader, batches = subject.loader(num_workers), Batches()
    with pytest.raises(SampleError) as error_info:
        collect(loader, batches)
    assert batches == batches_of(islice(subject.loader(0, clean=True), stop))
    assert loader.state_dict()["position"] == stop * BATCH_SIZE
    message = str(error_info.value)
    (named,) = [number for number in set(numbers[stop]) & set(subject.bad) if subject.name(number) in message]
    missing = "No such file or directory" if subject.kind == "folder" else "has no field 'cls'"
    assert (missing if subject.bad[named] is remove else "cannot be decoded: ") in message
    assert not subject.entries()
    if num_workers:
        cause = str(error_info.value.__cause__)
        assert cause.startswith("in a worker:\nTraceback (most recent call last)")
        assert "\nValueError: it is " in cause, "the cause has its own cause"


ENTRY = "key where error sample epoch action replacement replacement_key"


@pytest.mark.parametrize("kind", KINDS)
def test_replacements_do_not_depend_on_the_workers(subject: Subject) -> None:
    clean = batches_of(subject.loader(0, clean=True, on_error="skip"))
    assert not subject.quarantine.exists()
    found = []
    for num_workers, options in ((0, {}), (1, {}), (0, CALLING)):
        subject.quarantine.unlink(missing_ok=True)
        loader = subject.loader(num_workers, on_error="replace", persistent_workers=num_workers > 0, **options)
        assert loader.calls_dataset == (options is CALLING)
        with warns_of_bad_samples():
            found.append((batches_of(loader), subject.entries()))
        assert loader.stats().num_replaced == len(subject.entries())
        if not loader.calls_dataset:
            assert count_images(loader.stats()) == NUM_SAMPLES
        assert loader.state_dict()["position"] == NUM_SAMPLES
    assert found[0] == found[1] == found[2]
    batches, entries = found[0]
    for numbers, batch, expected in zip(order_of(subject.kind), batches, clean, strict=True):
        for row, number in enumerate(numbers):
            values, others = [part[row] for part in batch], [part[row] for part in expected]
            assert (values[0] == others[0]) == (number not in subject.bad)
            if number not in subject.bad:
                assert values == others
            elif subject.kind != "folder":
                instead = int(values[2].rpartition("/")[2])
                assert values[1:] == [instead % 2, key_of(instead)]
                assert instead not in subject.bad
                assert values[2] in {entry["replacement_key"] for entry in entries}
    assert {entry["sample"] for entry in entries} == set(subject.bad)
    for entry in entries:
        assert list(entry) == ENTRY.split()
        assert (entry["epoch"], entry["action"]) == (0, "replaced")
        assert f"{entry['replacement']:03d}" in entry["replacement_key"]
        assert f"{entry['sample']:03d}" in entry["key"]
        assert str(subject.folder / "damaged") in entry["where"]
        assert subject.name(entry["sample"]) in entry["error"]


@pytest.mark.parametrize(
    ("kind", "num_workers"),
    [("shards", 0), ("folder", 0), ("map", 1), pytest.param("shards", 3, marks=pytest.mark.slow)],
)
def test_skip_leaves_out_those_samples_and_nothing_else(subject: Subject, num_workers: int) -> None:
    clean = subject.loader(0, clean=True)
    loader = subject.loader(num_workers, on_error="skip", persistent_workers=num_workers > 0)
    batches, kept = [], []
    with warns_of_bad_samples(len(subject.bad)):
        for numbers, batch, other in zip(order_of(subject.kind), loader, clean, strict=True):
            assert loader.state_dict()["position"] == clean.state_dict()["position"]
            pairs = [zip(part, numbers, strict=True) for part in plain(other)]
            expected = [[value for value, number in each if number not in subject.bad] for each in pairs]
            assert plain(batch) == expected
            kept.append(batch)
            batches.append(expected)
    stats = loader.stats(), clean.stats()
    counts = [(each.num_skipped, each.num_replaced, each.num_worker_restarts) for each in stats]
    assert counts == [(len(subject.bad), 0, 0), (0, 0, 0)]
    assert count_images(loader.stats()) == NUM_SAMPLES - len(subject.bad)
    assert [entry["sample"] for entry in subject.entries()] == sorted(subject.bad)
    assert {entry["action"] for entry in subject.entries()} == {"skipped"}
    with warns_of_bad_samples(len(subject.bad), 1):
        collect(loader, Batches())
    assert [plain(batch) for batch in kept] == batches, "smaller batches that were kept do not change"
    calling = subject.loader(0, on_error="skip", **CALLING)
    with warns_of_bad_samples(len(subject.bad)):
        assert batches_of(calling) == batches
    assert (calling.stats().num_skipped, calling.stats().num_replaced) == (len(subject.bad), 0)


@pytest.mark.filterwarnings("ignore:unreadable samples")  # Only some ranks have unreadable samples.
@pytest.mark.parametrize("kind", ["shards"])
def test_marks_of_repeats_stay_with_their_samples(subject: Subject) -> None:
    keys = []
    for rank in range(3):
        options: dict[str, Any] = {"on_error": "skip", "remainder": "mask", "rank": rank, "world_size": 3}
        loaders = [subject.loader(0, **options), subject.loader(0, clean=True, **options)]
        for batch, other in zip(*map(batches_of, loaders), strict=True):
            kept = [row for row, name in enumerate(other[2]) if int(name.rpartition("/")[2]) not in subject.bad]
            assert batch == [[part[row] for row in kept] for part in other]
            keys += [name for name, is_valid in zip(batch[2], batch[3], strict=True) if is_valid]
    assert sorted(keys) == sorted(key_of(number) for number in range(NUM_SAMPLES) if number not in subject.bad)


@kinds_and_workers
def test_many_bad_samples(tmp_path: Path, kind: Kind, num_workers: int) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    subject = Subject(folders[0], kind, dict.fromkeys(range(NUM_SAMPLES - 1), fill_with_noise))
    with warns_of_bad_samples(NUM_SAMPLES - 1):
        (batch,) = subject.loader(num_workers, on_error="skip", batch_size=NUM_SAMPLES)
    assert plain(batch)[1] == [0 if kind == "folder" else 1]
    assert [entry["sample"] for entry in subject.entries()] == sorted(subject.bad)

    subject = Subject(folders[1], kind, dict.fromkeys(order_of(kind)[2], empty))
    message = r"all samples of a batch were skipped.* use on_error='replace'"
    for options in ({}, CALLING):
        batches = Batches()
        with pytest.raises(SampleError, match=message) as error_info:
            collect(subject.loader(num_workers, on_error="skip", **options), batches)
        assert len(batches) == 2
        assert all(f"{number:03d}" in str(error_info.value) for number in subject.bad), "their keys are named"

    subject = Subject(folders[2], kind, dict.fromkeys(range(NUM_SAMPLES), cut_off))
    with pytest.raises(SampleError, match="all 10 attempts to replace the sample failed") as error_info:
        next(iter(subject.loader(num_workers, on_error="replace")))
    assert error_info.value.__cause__ is not None


@pytest.mark.parametrize(
    ("quarantine", "error", "words"),
    [
        ("nowhere/quarantine.jsonl", ValueError, "the directory .*nowhere does not exist"),
        ("", ValueError, "it is a directory"),
        (None, TypeError, "must be a file path, got None"),
    ],
)
def test_a_quarantine_that_cannot_be_written_is_refused_at_once(
    tmp_path: Path, quarantine: str | None, error: type[Exception], words: str
) -> None:
    subject = Subject(tmp_path, "map", {})
    path = None if quarantine is None else tmp_path / quarantine
    for policy, collate_fn in (("replace", list), ("skip", None)):
        with pytest.raises(error, match=f"quarantine.*{words}"):
            subject.loader(1, on_error=policy, quarantine=path, collate_fn=collate_fn)
    subject.loader(0, quarantine=path)  # This loader does not write to the file.
    with pytest.raises(ValueError, match="on_error must be one of 'raise', 'replace', 'skip', got 'ignore'"):
        subject.loader(0, on_error="ignore")


def test_the_quarantine_stays_where_it_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loader = Subject(tmp_path, "map").loader(0, on_error="skip", quarantine="here.jsonl")
    monkeypatch.chdir(tmp_path / "damaged")
    with pytest.warns(RuntimeWarning, match=rf"{tmp_path / 'here.jsonl'} lists them with their errors"):
        batches_of(loader)
    assert len((tmp_path / "here.jsonl").read_text().splitlines()) == 4


@here_or_in_a_worker
def test_a_tar_is_cut_off_during_the_epoch(tmp_path: Path, num_workers: int) -> None:
    subject, order = Subject(tmp_path, "shards", {}), order_of("shards")
    open_shards = {number // SHARD_SIZE for number in order[0]}
    number = next(number for number in order[-1] if number // SHARD_SIZE in open_shards)
    tar = subject.tars[number // SHARD_SIZE]
    whole = tar.read_bytes()

    def cut() -> None:
        os.truncate(tar, whole.index(f"{key_of(number)}.jpg".encode()) + 600)

    expected = batches_of(subject.loader(0, clean=True))
    kept = Batches()
    with warns_of_bad_samples():
        collect(subject.loader(num_workers, on_error="skip"), kept, after_first=cut)
    for batch, other in zip(kept, expected, strict=True):
        rows = [other[2].index(key) for key in batch[2]]
        assert batch == [[part[row] for row in rows] for part in other]
    assert set(expected[-1][2]) - set(kept[-1][2]) >= {key_of(number)}
    assert all(f"{tar} at byte" in entry["error"] for entry in subject.entries())


def test_the_only_sample_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "a.jpg").write_bytes(b"no image")
    dataset = ImageFolder(tmp_path)
    for init in (None, print):
        options: dict[str, Any] = {"on_error": "replace", "quarantine": tmp_path / "bad.jsonl", "worker_init_fn": init}
        with pytest.raises(SampleError, match=r"the image of sample .*a\.jpg .* cannot be decoded"):
            next(iter(DataLoader(dataset, sampler=EpochSampler(dataset), **options)))
    assert not (tmp_path / "bad.jsonl").exists()


@here_or_in_a_worker
def test_a_full_disk_names_the_quarantine_file(tmp_path: Path, num_workers: int) -> None:
    loader = Subject(tmp_path, "map").loader(num_workers, on_error="skip", quarantine="/dev/full")
    with pytest.raises(OSError, match=r"the quarantine file cannot be written: No space left .*'/dev/full'") as raised:
        batches_of(loader)
    assert raised.value.errno == errno.ENOSPC


CROP = Compose([RandomResizedCrop(48), RandomHorizontalFlip()])


KEPT = [*BAD, *range(20, 29), 39, 38]
"""The samples of the damaged dataset that are read: the bad ones and a few good ones. All other samples are held
out."""


def damaged_map(subject: Subject) -> Any:
    return ShardMapDataset(subject.tars, fields=("image", "label", "key"), transform=CROP)


def damaged_subset(subject: Subject) -> Any:
    halves = [Subset(damaged_map(subject), range(start, start + NUM_SAMPLES // 2)) for start in (0, NUM_SAMPLES // 2)]
    return Subset(ConcatDataset(halves), KEPT)


@pytest.mark.parametrize(
    ("has_order", "options"), [(True, {}), (True, CALLING), (False, {"shuffle": True}), (False, {"shuffle": False})]
)
def test_what_replaces_a_sample_is_never_held_out(tmp_path: Path, has_order: bool, options: dict[str, Any]) -> None:
    subject = Subject(tmp_path, "map")
    subset = damaged_subset(subject)
    kept = {key_of(number) for number in KEPT}
    for epoch in range(4):
        order: dict[str, Any] = {"sampler": EpochSampler(subset)} if has_order else {}
        loader = DataLoader(subset, batch_size=4, on_error="replace", quarantine=subject.quarantine, **order, **options)
        loader.set_epoch(epoch)
        with pytest.warns(RuntimeWarning, match="unreadable samples replaced"):
            keys = [key for batch in keys_of(loader) for key in batch]
        assert len(keys) == len(KEPT)
        assert set(keys) <= kept - {key_of(number) for number in BAD}
    for entry in subject.entries():
        assert entry["sample"] != entry["replacement"]
        assert entry["key"] == key_of(KEPT[entry["sample"]])
        assert entry["replacement_key"] == key_of(KEPT[entry["replacement"]])


@pytest.mark.parametrize("options", [{}, CALLING])
def test_what_replaces_a_sample_is_drawn_by_its_number_in_the_subset(tmp_path: Path, options: dict[str, Any]) -> None:
    subject, drawn = Subject(tmp_path, "map"), []
    for bad in BAD:
        subset = Subset(damaged_map(subject), [*range(15, 25), bad])
        sampler = EpochSampler(subset)
        loader = DataLoader(subset, sampler=sampler, on_error="replace", quarantine=subject.quarantine, **options)
        with warns_of_bad_samples():
            keys_of(loader)
        drawn.append([(entry["sample"], entry["replacement"]) for entry in subject.entries()])
        subject.quarantine.unlink()
    assert {sample for sample, _ in drawn[0]} == {10}
    assert drawn == [drawn[0]] * len(BAD)


def wrap(dataset: Any) -> Any:
    """Return a user's dataset that reads single samples from a shardio dataset."""
    return Called(dataset.__getitem__, len(dataset))


def wrap_subset(dataset: Any) -> Any:
    """Return a dataset whose ``__getitems__`` reads one sample after another."""
    return Subset(ConcatDataset([wrap(dataset)]), range(len(dataset)))


@pytest.mark.parametrize("wrap", [wrap, wrap_subset])
@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_in_a_users_dataset_only_the_bad_sample_is_left_out(tmp_path: Path, wrap: Any, policy: Any) -> None:
    subject = Subject(tmp_path, "map", {13: BAD[13]})
    dataset = wrap(damaged_map(subject))
    sampler = EpochSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, 40, sampler=sampler, on_error=policy, quarantine=subject.quarantine)
    with warns_of_bad_samples(1):
        assert sum(map(len, keys_of(loader))) == NUM_SAMPLES - (policy == "skip")
    assert [(entry["sample"], entry["key"]) for entry in subject.entries()] == [(13, key_of(13))]


GONE = {3, 4, 11}


def get(index: int) -> int:
    if index in GONE:
        raise OSError(f"number {index} is gone")
    return index


class SeveralCalled(Called):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


@pytest.mark.parametrize(
    ("kind", "way", "is_ordered"),
    [
        *((kind, "caller", is_ordered) for kind in (Called, SeveralCalled) for is_ordered in (False, True)),
        (Called, "processes", True),
        (SeveralCalled, "processes", False),
        (SeveralCalled, "threads", True),
        (Called, "threads", False),
    ],
)
def test_of_any_dataset_bad_samples_are_left_out_or_replaced(
    kind: Any, way: str, is_ordered: bool, tmp_path: Path
) -> None:
    dataset, log = kind(get, 20), tmp_path / "log"

    def run(policy: Any, words: str, **options: Any) -> list[list[int]]:
        sampler = EpochSampler(dataset, shuffle=False) if is_ordered else None
        options["persistent_workers"] = way == "processes" and options != {}
        loader = DataLoader(dataset, 4, sampler=sampler, on_error=policy, quarantine=log, **options)
        epochs = []
        for _ in range(2):
            with pytest.warns(RuntimeWarning, match=words):
                epochs.append([batch.tolist() for batch in loader])
        return epochs[0] if policy == "replace" or epochs[0] == epochs[1] else []

    skipped = run("skip", r"unreadable samples skipped.*: 3\.", **WORKERS[way])
    assert skipped == [[0, 1, 2], [5, 6, 7], [8, 9, 10], [12, 13, 14, 15], [16, 17, 18, 19]]
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert sorted(entry["sample"] for entry in entries) == sorted([*GONE, *GONE])
    said = {f"sample {number} in {kind.__name__}: OSError: number {number} is gone" for number in GONE}
    assert {entry["error"] for entry in entries} == said
    replaced = run("replace", r"unreadable samples replaced.*: [3-9]\.", **WORKERS[way])
    assert [len(batch) for batch in replaced] == [4] * 5
    numbers = [number for batch in replaced for number in batch]
    assert {index for index, number in enumerate(numbers) if number != index} == GONE
    assert not GONE & set(numbers)
    assert replaced == run("replace", "replaced")


@pytest.mark.parametrize("kind", [Called, SeveralCalled])
def test_single_samples_empty_batches_and_other_stages(kind: Any, tmp_path: Path) -> None:
    dataset = kind(get, 20)
    options: dict[str, Any] = {"quarantine": tmp_path / "log"}
    with pytest.warns(RuntimeWarning, match="replaced"):
        singles = list(DataLoader(dataset, None, on_error="replace", **options))
    assert {index for index, number in enumerate(singles) if number != index} == GONE
    batches = iter(DataLoader(dataset, batch_sampler=[[3, 4], [5, 6]], on_error="skip", **options))
    with pytest.raises(SampleError, match=r"all samples of a batch were skipped \(3, 4\)"):
        next(batches)
    assert next(batches).tolist() == [5, 6]
    with pytest.raises(OSError, match="number 3 is gone"):
        list(DataLoader(dataset, 4, on_error="skip", on_error_in=["decode"], **options))


def test_what_cannot_be_skipped_or_replaced_is_refused(packed: Path) -> None:
    with pytest.raises(ValueError, match="does not work with Shares, because an iterable dataset cannot contin"):
        DataLoader(Shares(lambda *_: range(3)), 4, on_error="skip")
    with pytest.raises(ValueError, match="requires a dataset with a length; Dataset has no __len__"):
        DataLoader(Dataset(), 4, sampler=range(3), on_error="replace")
    with pytest.raises(TypeError, match=r"on_error='skip' requires integers as indices; got \['a'\]"):
        list(DataLoader(Called(get), sampler=["a"], on_error="skip"))
    with pytest.raises(ValueError, match="batch_size=None disables batching"):
        DataLoader(ShardDataset(packed), batch_size=None, on_error="skip")
    mapped = ShardMapDataset(packed)
    DataLoader(mapped, on_error="replace", batch_size=None)
    DataLoader(mapped, on_error="skip", batch_sampler=[[1, 2], [3]])
