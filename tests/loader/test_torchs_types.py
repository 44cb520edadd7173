"""Batches of shardio's datasets are what torch's DataLoader makes of them, except for the memory format of images.

Random programs cover types, dtypes and strides, with torch's samplers, one's own functions and several iterators.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data
from hypothesis import given, settings, strategies as st
from torch.utils.data import ConcatDataset, RandomSampler, Subset

from shardio import DataLoader, ImageFolder, ShardDataset, ShardMapDataset
from shardio.loader.collate import collate_channels_last
from shardio.transforms import CenterCrop
from tests.buffers import assert_same
from tests.loader.fetching.programs import Point, as_list, describe, stack_first

_FIELDS: list[Any] = [
    ("image", "label"),
    ("image", "label", "key"),
    ("key", "label"),
    ("image",),
    "image",
    "label",
    "key",
]


def _name(sample: Any) -> Any:
    return Point(x=torch.tensor(sample["image"])[:, ::2], y=[sample["label"], {"label": str(sample["label"])}])


def _describe(sample: Any) -> Any:
    return {"image": torch.tensor(sample["image"]), "pair": (str(sample["label"]), sample["label"])}


@st.composite
def arguments(draw: st.DrawFn) -> tuple[Callable[[Path, Path], Any], dict[str, Any], dict[str, Any]]:
    """Draw a function that makes a dataset, the loader's arguments, and how many workers there are."""
    transform_sample = draw(st.sampled_from([None, None, _name, _describe]))
    kind = draw(st.sampled_from(["shards", "folder", "subset", "concatenated", "iterable"]))
    fields = ("image", "label") if transform_sample or kind == "folder" else draw(st.sampled_from(_FIELDS))
    chosen: dict[str, Any] = (
        {"transform_sample": transform_sample}
        if kind == "folder"
        else {"fields": fields, "transform_sample": transform_sample}
    )
    if "image" in fields:
        chosen["transform"] = CenterCrop(16)

    def make(images: Path, packed: Path) -> Any:
        if kind == "folder":
            return ImageFolder(images, **chosen)
        if kind == "iterable":
            return ShardDataset(packed, shuffle=True, seed=3, **chosen)
        dataset = ShardMapDataset(packed, **chosen)
        if kind == "concatenated":
            return ConcatDataset([dataset, dataset])
        return Subset(dataset, range(1, 20, 2)) if kind == "subset" else dataset

    passed: dict[str, Any] = {"batch_size": draw(st.sampled_from([None, 1, 4, 30]))}
    if passed["batch_size"] is not None:
        passed["drop_last"] = draw(st.booleans())
        passed["collate_fn"] = draw(st.sampled_from([None, as_list, stack_first]))
    if kind != "iterable":
        passed["sampler"] = draw(st.sampled_from([None, range(7), "random"]))
    return make, passed, {"num_workers": draw(st.sampled_from([0, 0, 2]))}


@given(arguments())
@settings(max_examples=10, deadline=None)
def test_batches_are_those_of_torch(
    images: Path,
    packed: Path,
    drawn: tuple[Callable[[Path, Path], Any], dict[str, Any], dict[str, Any]],
) -> None:
    make, passed, workers = drawn

    def run(loader_class: Any, **more: Any) -> list[Any]:
        dataset = make(images, packed)
        options = {**passed, **more}
        if options.get("sampler") == "random":
            options["sampler"] = RandomSampler(dataset, generator=torch.Generator().manual_seed(5))
        loader = loader_class(dataset, **options)
        return [list(loader) for _ in range(1 if isinstance(dataset, ShardDataset) else 2)]  # Its order is shardio's.

    own = {} if passed["batch_size"] is None or passed["collate_fn"] else {"collate_fn": collate_channels_last}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of epochs without batches.
        expected, got = run(torch.utils.data.DataLoader, **own), run(DataLoader, **workers)
    assert describe(got) == describe(expected)


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_iterators_of_one_loader_are_torchs(packed: Path, num_workers: int, persistent: bool) -> None:
    def zipped(loader_class: Any) -> list[Any]:
        dataset = ShardMapDataset(packed, fields="key")
        loader = loader_class(dataset, batch_size=4, num_workers=num_workers, persistent_workers=persistent)
        return [list(zip(loader, loader, strict=True)) for _ in range(2)]

    assert_same(zipped(DataLoader), zipped(torch.utils.data.DataLoader))


def test_iterators_of_shardios_order_are_independent(packed: Path) -> None:
    loader = DataLoader(ShardDataset(packed, fields="key"), batch_size=4, num_workers=2)
    whole = list(loader)
    assert list(zip(loader, loader, strict=True)) == list(zip(whole, whole, strict=True))
