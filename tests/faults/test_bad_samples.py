"""Unreadable samples: an error at that batch, another sample, or a smaller batch; nothing else changes."""

from __future__ import annotations

import errno
import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from shardio import DataLoader, EpochSampler, ImageFolder, SampleError
from tests.faults.damage import (
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

kinds_and_workers = pytest.mark.parametrize(
    ("kind", "num_workers"), [("shards", 0), ("map", 0), ("folder", 0), pytest.param("map", 1, marks=pytest.mark.slow)]
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


@pytest.mark.parametrize("kind", KINDS)
def test_replacements_do_not_depend_on_the_workers(subject: Subject) -> None:
    loader = subject.loader(0, clean=True, on_error="skip")
    clean = batches_of(loader)
    stats = loader.stats()
    assert (stats.num_replaced, stats.num_skipped, stats.num_worker_restarts) == (0, 0, 0)
    assert not subject.quarantine.exists()
    found = []
    for num_workers in (0, 1):
        subject.quarantine.unlink(missing_ok=True)
        loader = subject.loader(num_workers, on_error="replace", persistent_workers=num_workers > 0)
        with warns_of_bad_samples():
            found.append((batches_of(loader), subject.entries()))
        assert loader.stats().num_replaced == len(subject.entries())
        assert count_images(loader.stats()) == NUM_SAMPLES
        assert loader.state_dict()["position"] == NUM_SAMPLES
    assert found[0] == found[1]
    batches, entries = found[0]
    for numbers, batch, expected in zip(order_of(subject.kind), batches, clean, strict=True):
        for row, number in enumerate(numbers):
            values, others = [part[row] for part in batch], [part[row] for part in expected]
            if number not in subject.bad:
                assert values == others
            else:
                assert values[0] != others[0]
                if subject.kind != "folder":
                    instead = int(values[2].rpartition("/")[2])
                    assert values[1:] == [instead % 2, key_of(instead)]
                    assert instead not in subject.bad
                    assert values[2] in {entry["replacement_key"] for entry in entries}
    assert {entry["sample"] for entry in entries} == set(subject.bad)
    for entry in entries:
        names = ["key", "where", "error", "sample", "epoch", "action", "replacement", "replacement_key"]
        assert list(entry) == names
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
    assert (loader.stats().num_skipped, loader.stats().num_replaced) == (len(subject.bad), 0)
    assert clean.stats().num_skipped == 0
    assert count_images(loader.stats()) == NUM_SAMPLES - len(subject.bad)
    assert [entry["sample"] for entry in subject.entries()] == sorted(subject.bad)
    assert {entry["action"] for entry in subject.entries()} == {"skipped"}
    with warns_of_bad_samples(len(subject.bad), 1):
        collect(loader, Batches())
    assert [plain(batch) for batch in kept] == batches, "smaller batches that were kept do not change"


@pytest.mark.filterwarnings("ignore:unreadable samples")  # Not each rank has some.
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


@pytest.mark.parametrize(("policy", "num_workers"), [("replace", 0), ("skip", 1)])
def test_a_resumed_epoch_continues_identically(tmp_path: Path, policy: str, num_workers: int) -> None:
    subject = Subject(tmp_path, "shards")
    with warns_of_bad_samples():
        expected = batches_of(subject.loader(0, on_error=policy))
    loader = subject.loader(num_workers, on_error=policy)
    begun = [plain(batch) for batch in islice(loader, 4)]
    resumed = subject.loader(num_workers, on_error=policy)
    resumed.load_state_dict(loader.state_dict())
    with warns_of_bad_samples():
        assert [*begun, *batches_of(resumed)] == expected


@kinds_and_workers
def test_many_bad_samples(tmp_path: Path, kind: Kind, num_workers: int) -> None:
    """More of them than the replacements tried for one row: all but one of an epoch, all of a batch, and all."""
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    subject = Subject(folders[0], kind, dict.fromkeys(range(NUM_SAMPLES - 1), fill_with_noise))
    with warns_of_bad_samples(NUM_SAMPLES - 1):
        (batch,) = subject.loader(num_workers, on_error="skip", batch_size=NUM_SAMPLES)
    assert plain(batch)[1] == [0 if kind == "folder" else 1]
    assert [entry["sample"] for entry in subject.entries()] == sorted(subject.bad)

    subject, batches = Subject(folders[1], kind, dict.fromkeys(order_of(kind)[2], empty)), Batches()
    message = r"all samples of a batch were skipped.* use on_error='replace'"
    with pytest.raises(SampleError, match=message) as error_info:
        collect(subject.loader(num_workers, on_error="skip"), batches)
    assert len(batches) == 2
    assert all(f"{number:03d}" in str(error_info.value) for number in subject.bad)

    subject = Subject(folders[2], kind, dict.fromkeys(range(NUM_SAMPLES), cut_off))
    with pytest.raises(SampleError, match="all 10 attempts to replace the sample failed"):
        next(iter(subject.loader(num_workers, on_error="replace")))


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
    subject.loader(0, quarantine=path)  # Nothing is to be written.
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
def test_files_deleted_during_the_epoch(tmp_path: Path, num_workers: int) -> None:
    subject = Subject(tmp_path, "folder", {})
    gone = order_of("folder")[-1][1:]

    def delete() -> None:
        for number in gone:
            (tmp_path / "damaged" / "class" / f"{number:03d}.jpg").unlink()

    batches = Batches()
    with warns_of_bad_samples(len(gone)):
        collect(subject.loader(num_workers, on_error="skip"), batches, after_first=delete)
    *expected, last = batches_of(subject.loader(0, clean=True))
    assert batches == [*expected, [part[:1] for part in last]]
    assert [entry["sample"] for entry in subject.entries()] == sorted(gone)
    assert all("No such file or directory" in entry["error"] for entry in subject.entries())


@here_or_in_a_worker
def test_a_tar_is_cut_off_during_the_epoch(tmp_path: Path, num_workers: int) -> None:
    """One that is open. A shard that is opened later does not fit its index any more, which is an error in any case."""
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

    tar.write_bytes(whole)
    before = Batches()
    with pytest.raises(SampleError, match=r"cannot be read from .*\.tar at byte \d+.* the file is truncated"):
        collect(subject.loader(num_workers), before, after_first=cut)
    assert before == expected[: len(before)]


def test_a_bad_sample_never_replaces_itself(tmp_path: Path) -> None:
    """Half of all samples are bad, so that many draws are needed."""
    subject = Subject(tmp_path, "folder", dict.fromkeys(range(0, NUM_SAMPLES, 2), cut_off))
    for epoch in range(4):
        loader = subject.loader(0, on_error="replace")
        loader.set_epoch(epoch)
        with warns_of_bad_samples(epoch=epoch):
            batches_of(loader)
    entries = subject.entries()
    assert len(entries) > 4 * NUM_SAMPLES // 2
    assert [entry for entry in entries if entry["sample"] == entry["replacement"]] == []


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
