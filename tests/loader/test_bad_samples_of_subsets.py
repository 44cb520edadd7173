"""Bad samples of torch's Subsets: what replaces them is never held out, and is the same whatever makes the batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Subset

from shardio import DataLoader, EpochSampler, ImageFolder, ShardMapDataset
from shardio.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop
from tests.faults.damage import BAD, NUM_SAMPLES, Subject, key_of, warns_of_bad_samples
from tests.faults.worker_processes import batches_of
from tests.loader.torchs_workers import TORCHS, keys_of

CROP = Compose([RandomResizedCrop(48), RandomHorizontalFlip()])

KEPT = [*BAD, *range(20, 29), 39, 38]
"""Samples of the damaged dataset: the bad ones, and a few others. All the rest is held out."""


def damaged_subset(subject: Subject) -> Subset[Any]:
    if subject.kind == "folder":
        return Subset(ImageFolder(subject.folder / "damaged", transform=CROP), KEPT[:-1])
    dataset = ShardMapDataset(subject.tars, fields=("image", "label", "key"), transform=CROP)
    return Subset(Subset(dataset, range(NUM_SAMPLES)), KEPT)


def batches_by_executor(subset: Subset[Any], quarantine: Path, **options: Any) -> Iterator[tuple[Any, list[str]]]:
    """Yield the batches and the quarantine's lines, for each executor and number of workers."""
    for executor in ({}, TORCHS):
        for num_workers in (0, 1):
            loader = DataLoader(
                subset,
                batch_size=4,
                sampler=EpochSampler(subset, remainder="mask", seed=2),
                num_workers=num_workers,
                quarantine=quarantine,
                **executor,
                **options,
            )
            with warns_of_bad_samples():
                batches = batches_of(loader)
            yield batches, sorted(quarantine.read_text().splitlines())
            quarantine.unlink()


@pytest.mark.parametrize(("kind", "policy"), [("map", "replace"), ("folder", "skip")])
def test_both_executors_treat_bad_samples_alike(tmp_path: Path, kind: Any, policy: str) -> None:
    """The samples look the same, too: a replacement is cropped with the rng key of its row."""
    subject = Subject(tmp_path, kind, {number: BAD[number] for number in list(BAD)[:3]} if kind == "folder" else None)
    first, *others = batches_by_executor(damaged_subset(subject), subject.quarantine, on_error=policy)
    assert len(others) == 3
    assert all(other == first for other in others)
    batches, lines = first
    assert sum(len(batch[1]) for batch in batches) == len(damaged_subset(subject)) - (
        len(subject.bad) if policy == "skip" else 0
    )
    assert len(lines) >= len(subject.bad)


@pytest.mark.parametrize(
    ("has_order", "options"), [(True, {}), (True, TORCHS), (False, {"shuffle": True}), (False, {"shuffle": False})]
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


@pytest.mark.parametrize("options", [{}, TORCHS])
def test_what_replaces_a_sample_is_drawn_by_its_number_in_the_subset(tmp_path: Path, options: dict[str, Any]) -> None:
    subject, drawn = Subject(tmp_path, "map"), []
    dataset = ShardMapDataset(subject.tars, fields=("image", "label", "key"), transform=CROP)
    for bad in BAD:
        subset = Subset(dataset, [*range(15, 25), bad])
        loader = DataLoader(
            subset, sampler=EpochSampler(subset), on_error="replace", quarantine=subject.quarantine, **options
        )
        with warns_of_bad_samples():
            keys_of(loader)
        drawn.append([(entry["sample"], entry["replacement"]) for entry in subject.entries()])
        subject.quarantine.unlink()
    assert {sample for sample, _ in drawn[0]} == {10}
    assert drawn == [drawn[0]] * len(BAD)
