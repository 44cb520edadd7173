"""``on_error`` works with any map-style dataset and every executor: the batches, the log, the count and the limits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

from shardio import DataLoader, EpochSampler, ImageFolder, SampleError, ShardDataset, ShardMapDataset
from shardio.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop
from tests.faults.damage import BAD, NUM_SAMPLES, Subject, key_of, warns_of_bad_samples
from tests.faults.worker_processes import batches_of
from tests.loader.calling import CALLING, keys_of
from tests.loader.programs import WORKERS

CROP = Compose([RandomResizedCrop(48), RandomHorizontalFlip()])
OPTIONS: dict[str, Any] = {"fields": ("image", "label", "key"), "transform": CROP}

KEPT = [*BAD, *range(20, 29), 39, 38]
"""Samples of the damaged dataset: the bad ones, and a few others. All the rest is held out."""


def damaged_map(subject: Subject) -> Any:
    return ShardMapDataset(subject.tars, **OPTIONS)


def damaged_subset(subject: Subject) -> Any:
    return Subset(Subset(damaged_map(subject), range(NUM_SAMPLES)), KEPT)


DATASETS: dict[str, Callable[[Subject, Path], Any]] = {
    "shards": lambda subject, _: ShardDataset(subject.tars, shuffle=True, remainder="mask", **OPTIONS),
    "map": lambda subject, _: damaged_map(subject),
    "subset": lambda subject, _: damaged_subset(subject),
    "concatenated": lambda subject, packed: ConcatDataset([ShardMapDataset(packed, **OPTIONS), damaged_map(subject)]),
    "folder": lambda subject, _: Subset(ImageFolder(subject.folder / "damaged", transform=CROP), KEPT[:-1]),
}


@pytest.mark.parametrize(
    ("kind", "policy", "num_workers"),
    [*((kind, policy, 0) for kind in DATASETS for policy in ("replace", "skip")), ("shards", "replace", 1)],
)
def test_both_executors_treat_bad_samples_alike(
    tmp_path: Path, packed: Path, kind: str, policy: Any, num_workers: int
) -> None:
    """The samples look the same, too: a replacement is cropped with the rng key of its row."""
    bad = {number: BAD[number] for number in list(BAD)[:3]} if kind == "folder" else BAD
    subject = Subject(tmp_path, "folder" if kind == "folder" else "map", bad)
    found = []
    for options in ({}, CALLING):
        dataset = DATASETS[kind](subject, packed)
        order = {} if kind == "shards" else {"sampler": EpochSampler(dataset, remainder="mask", seed=2)}
        options = {"num_workers": num_workers, "quarantine": subject.quarantine, **order, **options}
        loader = DataLoader(dataset, batch_size=4, on_error=policy, **options)
        assert loader.calls_dataset == ("worker_init_fn" in options)
        with warns_of_bad_samples(len(bad) if policy == "skip" else None):
            found.append((batches_of(loader), sorted(subject.quarantine.read_text().splitlines())))
        entries = subject.entries()
        subject.quarantine.unlink()
    assert found[0] == found[1]
    assert sum(len(batch[1]) for batch in found[0][0]) == len(dataset) - len(bad) * (policy == "skip")
    assert {entry["action"] for entry in entries} == {"replaced" if policy == "replace" else "skipped"}
    if kind != "folder":
        assert {entry["key"] for entry in entries} == set(map(key_of, bad))
        assert all(f"{subject.tars[0].parent}/shard-" in entry["where"] for entry in entries)
        assert not {key for batch in found[0][0] for key in batch[2]} & set(map(key_of, bad))


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


@pytest.mark.parametrize(("kind", "num_workers"), [("shards", 0), ("map", 0), ("shards", 2)])
def test_each_epochs_bad_samples_are_counted(tmp_path: Path, packed: Path, kind: str, num_workers: int) -> None:
    subject = Subject(tmp_path, "map")
    options: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": num_workers > 0, **CALLING}
    dataset = DATASETS[kind](subject, packed)
    options |= {"on_error": "skip", "quarantine": subject.quarantine}
    loader = DataLoader(dataset, 10, sampler=EpochSampler(dataset) if kind == "map" else None, **options)
    for epoch in range(3):
        with warns_of_bad_samples(len(BAD), epoch):
            assert sum(len(labels) for _, labels, *_ in loader) == NUM_SAMPLES - len(BAD)
    epochs = [json.loads(line)["epoch"] for line in subject.quarantine.read_text().splitlines()]
    assert sorted(epochs) == [epoch for epoch in range(3) for _ in BAD]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_errors_of_torchs_workers_name_the_samples(tmp_path: Path, num_workers: int) -> None:
    subject = Subject(tmp_path, "map")
    dataset = ShardDataset(subject.tars, **OPTIONS)
    options = {"num_workers": num_workers, "quarantine": subject.quarantine, **CALLING}
    with pytest.raises(SampleError, match=r"sample class-1/005 in .*shard-000000\.tar at byte \d+ cannot be decoded"):
        list(DataLoader(dataset, batch_size=4, **options))
    with pytest.raises(
        SampleError, match=r"all samples of a batch were skipped \(class-1/005\), so the batch is empty"
    ):
        list(DataLoader(dataset, batch_size=1, on_error="skip", **options))


class Wrapper(Dataset[Any]):
    """A user's dataset that reads single samples from one of shardio's."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def wrap_subset(dataset: Any) -> Any:
    """Return a dataset whose ``__getitems__`` reads one sample after another."""
    return Subset(ConcatDataset([Wrapper(dataset)]), range(len(dataset)))


@pytest.mark.parametrize("wrap", [Wrapper, wrap_subset])
@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_in_a_users_dataset_only_the_bad_sample_is_left_out(tmp_path: Path, wrap: Any, policy: Any) -> None:
    subject = Subject(tmp_path, "map", {13: BAD[13]})
    dataset = wrap(damaged_map(subject))
    sampler = EpochSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, 40, sampler=sampler, on_error=policy, quarantine=subject.quarantine)
    with warns_of_bad_samples(1):
        assert sum(map(len, keys_of(loader))) == NUM_SAMPLES - (policy == "skip")
    (entry,) = subject.entries()
    assert (entry["sample"], entry["key"]) == (13, key_of(13))


GONE = {3, 4, 11}


class Numbers(Dataset[int]):
    """Numbers, some of which cannot be had."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        if index in GONE:
            raise OSError(f"number {index} is gone")
        return index


class SeveralNumbers(Numbers):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


class NumberStream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Unsized(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("kind", "way", "is_ordered"),
    [
        *((kind, "caller", is_ordered) for kind in (Numbers, SeveralNumbers) for is_ordered in (False, True)),
        (Numbers, "processes", True),
        (SeveralNumbers, "processes", False),
        (SeveralNumbers, "threads", True),
        (Numbers, "threads", False),
    ],
)
def test_of_any_dataset_bad_samples_are_left_out_or_replaced_by_the_same_ones(
    kind: Any, way: str, is_ordered: bool, tmp_path: Path
) -> None:
    dataset, log = kind(), tmp_path / "log"

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


@pytest.mark.parametrize("kind", [Numbers, SeveralNumbers])
def test_single_samples_empty_batches_and_other_stages(kind: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"quarantine": tmp_path / "log"}
    with pytest.warns(RuntimeWarning, match="replaced"):
        singles = list(DataLoader(kind(), None, on_error="replace", **options))
    assert {index for index, number in enumerate(singles) if number != index} == GONE
    batches = iter(DataLoader(kind(), batch_sampler=[[3, 4], [5, 6]], on_error="skip", **options))
    with pytest.raises(SampleError, match=r"all samples of a batch were skipped \(3, 4\)"):
        next(batches)
    assert next(batches).tolist() == [5, 6]
    with pytest.raises(OSError, match="number 3 is gone"):
        list(DataLoader(kind(), 4, on_error="skip", on_error_in=["decode"], **options))


def test_what_cannot_be_skipped_or_replaced_is_refused(packed: Path) -> None:
    with pytest.raises(ValueError, match="does not work with NumberStream, because an iterable dataset cannot contin"):
        DataLoader(NumberStream(), 4, on_error="skip")
    with pytest.raises(ValueError, match="requires a dataset with a length; Unsized has no __len__"):
        DataLoader(Unsized(), 4, sampler=range(3), on_error="replace")
    with pytest.raises(TypeError, match=r"on_error='skip' requires integers as indices; got \['a'\]"):
        list(DataLoader(Numbers(), sampler=["a"], on_error="skip"))
    with pytest.raises(ValueError, match="batch_size=None disables batching"):
        DataLoader(ShardDataset(packed), batch_size=None, on_error="skip")
    mapped = ShardMapDataset(packed)
    DataLoader(mapped, on_error="replace", batch_size=None)
    DataLoader(mapped, on_error="skip", batch_sampler=[[1, 2], [3]])
    with pytest.raises(ValueError, match="on_error must be one of 'raise', 'replace', 'skip'"):
        DataLoader(ShardDataset(packed), on_error="ignore")  # type: ignore[arg-type]  # the test
