"""MixedDataset rejects what it does not support, and its copies, sources and iterations do not affect one another."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader, IterableDataset

from shardio import DataLoader, EpochSampler, ImageFolder, MixedDataset, ShardDataset, ShardMapDataset, ShardWriter
from shardio.transforms import RandomResizedCrop
from tests.raising import assert_raises
from tests.sources import encode, write_images


def mix(packed: Path, **options: Any) -> MixedDataset:
    shards, own = ShardDataset(packed, fields="key", shuffle=True), ShardMapDataset(packed, fields="key")
    return MixedDataset({"shards": (shards, 0.6), "own": (own, 0.4)}, stop=30, **options)


SHARD, OTHER = list(range(20)), list(range(10))
PURE: dict[str, Any] = {"batches": "pure", "global_batch_size": 4}


class Overriding(MixedDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


class OverridingShards(ShardDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


class Reversed(EpochSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_all_samples - 1, -1, -1))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


@pytest.mark.parametrize(
    ("sources", "options", "error", "message"),
    [
        ({}, {}, ValueError, "needs at least one source"),
        ({"a": SHARD}, {}, ValueError, r"the source 'a' has no weight: .*weights='proportional'"),
        ({"a": (SHARD, 1)}, {"weights": "proportional"}, ValueError, "the weight of 'a' contradict"),
        ({"a": SHARD}, {"weights": "equal"}, ValueError, "weights must be one of 'proportional'"),
        ({"a": SHARD}, {"weights": {"a": 1}}, TypeError, "pass each weight in sources"),
        ({"a": (SHARD, -1)}, {}, ValueError, "the weight of the source 'a' must be at least 0 and finite, got -1"),
        ({"a": (SHARD, float("nan"))}, {}, ValueError, "at least 0 and finite, got nan"),
        ({"a": (SHARD, 0)}, {}, ValueError, "all weights are 0"),
        ({"a": (SHARD, 1), "b": (OTHER, 1e-9)}, {}, ValueError, "less than a millionth"),
        ({"a": (SHARD, 1), "b": (OTHER, 1e-3)}, {}, None, ""),
        ({"a": (SHARD, 1), "b": (OTHER, 0)}, {"stop": "longest"}, ValueError, "stop='longest' is never reached"),
        ({"a": (SHARD, 1), "b": (OTHER, 0)}, {"stop": "all-once"}, ValueError, "positive weight for each source"),
        ({"a": (Stream(), 1)}, {}, TypeError, "the source 'a' is a Stream, which cannot be mixed"),
        ({"a": (7, 1)}, {}, TypeError, "the source 'a' is a int, which cannot be mixed"),
        ({"a": ([], 1)}, {}, ValueError, "empty"),
        ({"a": (SHARD, "1")}, {}, TypeError, "weight"),
        ({"a": (SHARD, None)}, {}, TypeError, "weight"),
        ({"a": (SHARD,)}, {}, ValueError, "pair"),
        ({"a": (SHARD, 1, 2)}, {}, ValueError, "pair"),
        ({3: (SHARD, 1)}, {}, TypeError, "name"),
        ([(SHARD, 1)], {}, TypeError, "dict"),
        ({"a": (Reversed(SHARD), 1)}, {}, TypeError, "Reversed"),
        ({"a": (SHARD, float("inf"))}, {}, ValueError, "at least 0 and finite, got inf"),
        ({"a": (SHARD, np.float32(0.5)), "b": (OTHER, np.int32(1))}, {}, None, ""),
        ({"a": (SHARD, 1)}, {"repeat": {"b": 1}}, ValueError, "repeat has keys that are not sources: b"),
        ({"a": (SHARD, 1)}, {"repeat": {"a": 0}}, ValueError, r"repeat\['a'\] must be at least 1"),
        ({"a": (SHARD, 1)}, {"stop": "last"}, ValueError, "stop must be one of"),
        ({"a": (SHARD, 1)}, {"stop": 0}, ValueError, "stop must be at least 1"),
        ({"a": (SHARD, 1)}, {"stop": True}, TypeError, "stop must be an integer"),
        ({"a": (SHARD, 1)}, {"batches": "both"}, ValueError, "batches must be one of"),
        ({"a": (SHARD, 1)}, {"batches": "pure"}, ValueError, "batches='pure' needs global_batch_size"),
        ({"a": (SHARD, 1)}, {**PURE, "stop": 7}, ValueError, "stop=7 is not a multiple of the global batch size, 4"),
        ({"a": (SHARD, 1)}, {**PURE, "stop": "all-once"}, ValueError, "stop='all-once' needs batches='mixed'"),
        ({"a": (SHARD, 1)}, {**PURE, "global_batch_size": 21}, ValueError, "no samples: a source is too small"),
        ({"a": (SHARD, 1)}, {"global_batch_size": 0}, ValueError, "global_batch_size must be at least 1"),
        ({"a": (SHARD, 1)}, {"source_field": "yes"}, TypeError, "source_field"),
        ({"a": (SHARD, 1)}, {"shuffle": "yes"}, TypeError, "shuffle"),
        ({"a": (SHARD, 1)}, {"seed": -1}, ValueError, "seed must be at least 0"),
        ({"a": (SHARD, 1)}, {"remainder": "repeat"}, ValueError, "remainder must be one of"),
        ({"a": (SHARD, 1)}, {"rank": 2, "world_size": 2}, ValueError, "rank"),
    ],
)
def test_arguments_out_of_range_are_refused(
    sources: Any, options: dict[str, Any], error: type[Exception] | None, message: str
) -> None:
    if error is None:
        MixedDataset(sources, **options)
    else:
        assert_raises(error, message, MixedDataset, sources, **options)


def test_what_does_not_fit_a_mixture_is_refused(packed: Path) -> None:
    mixed = mix(packed)
    assert_raises(TypeError, "cannot be mixed", MixedDataset, {"a": (mixed, 1)})
    assert_raises(TypeError, "Overriding must not override __iter__", Overriding, {"a": (SHARD, 1)})
    own = OverridingShards(packed)
    assert_raises(TypeError, "the source 'a' is a OverridingShards, which overrides", MixedDataset, {"a": (own, 1)})
    for loader in (DataLoader, TorchLoader):
        assert_raises(ValueError, None, loader, mixed, 4, shuffle=True)
    assert_raises(IndexError, "at least 0, got -1", lambda: mixed[-1])
    assert_raises(ValueError, "a change of weights needs global_batch_size", mixed.at, 3, {"shards": 1})
    sized = mix(packed, global_batch_size=6)
    for size, world_size in ((4, 1), (6, 2)):
        ranks = mix(packed, global_batch_size=6, rank=0, world_size=world_size)
        assert_raises(ValueError, rf"set the batch size to {6 // world_size}", iter, DataLoader(ranks, size))
    for step, weights, message in (
        (0, {"shards": 1}, "step must be at least 1"),
        (3, {"other": 1}, r"has no source 'other', only shards, own: to add one, pass a pair"),
        (3, {"shards": (SHARD, 1)}, "already has a source 'shards'"),
    ):
        assert_raises(ValueError, message, sized.at, step, weights)
    sized.at(3, {"shards": 1})
    assert_raises(ValueError, r"at\(3\) comes after at\(3\)", sized.at, 3, {"shards": 1})
    once = MixedDataset({"shards": (SHARD, 1)}, global_batch_size=6, stop="all-once")
    assert_raises(ValueError, "stop='all-once' determines when the weights change", once.at, 3, {"shards": 1})


def test_a_refused_change_or_that_of_a_copy_leaves_the_mixture_as_it_was(packed: Path) -> None:
    mixed = mix(packed, global_batch_size=5)
    other = copy.copy(mixed).at(3, {"shards": 1, "new": (OTHER, 1)})
    for weights in ({"shards": -1}, {"shards": 1, "other": (OTHER, -1)}, {"shards": 1, "none": 1}):
        assert_raises(ValueError, None, mixed.at, 4, weights)
        assert mixed.names == ("shards", "own")
    mixed.at(4, {"shards": 1, "other": (OTHER, 1)})
    mixed.at(5, {"own": 1})
    assert (mixed.names, other.names) == (("shards", "own", "other"), ("shards", "own", "new"))


def test_a_copy_delivers_the_same_after_the_original_is_gone(packed: Path) -> None:
    mixed = mix(packed)
    expected = [key for batch in DataLoader(mixed, 5) for key in batch]
    copies = copy.copy(mixed), copy.deepcopy(mixed), pickle.loads(pickle.dumps(mixed))
    del mixed
    gc.collect()
    for each in copies:
        assert [key for batch in DataLoader(each, 5) for key in batch] == [each[row] for row in range(30)] == expected


def open_tars() -> list[Path]:
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [target for target in map(Path.readlink, links) if target.suffix == ".tar"]


@pytest.mark.parametrize("kind", [ShardDataset, MixedDataset])
def test_an_iteration_closes_its_files(packed: Path, kind: type) -> None:
    gc.collect()
    before = open_tars()
    dataset: Any = ShardDataset(packed, fields="key")
    if kind is MixedDataset:
        dataset = MixedDataset({"one": (dataset, 1), "two": (ShardMapDataset(packed, fields="key"), 1)})
    assert list(dataset)
    assert open_tars() == before


class Named(ImageFolder):
    """A user's subclass that changes labels, so its own methods make the samples."""

    def __getitem__(self, index: int) -> Any:
        image, _ = super().__getitem__(index)
        return image, index


def test_a_repeated_sample_of_a_subclass_has_another_crop(images: Path) -> None:
    mixed = MixedDataset({"one": (Named(images, transform=RandomResizedCrop(16)), 1)}, stop=42, shuffle=False)
    crops: dict[int, list[torch.Tensor]] = {}
    for row, ((image,), (index,)) in enumerate(DataLoader(mixed, 1)):
        crops.setdefault(int(index), []).append(image)
        assert torch.equal(mixed[row][0], image)
    assert {len(each) for each in crops.values()} == {2}
    assert not any(torch.equal(*each) for each in crops.values())


def write_shards(folder: Path, name: str, width: int, *, num_damaged: int = 0) -> ShardMapDataset:
    with ShardWriter(folder / name) as writer:
        for number in range(20):
            content = encode(number, width=width)
            writer.write({"__key__": f"{name}-{number}", "jpg": content[:-100] if number < num_damaged else content})
    return ShardMapDataset(folder / name, fields=("key", "image"))


@pytest.mark.filterwarnings("ignore:unreadable samples:RuntimeWarning")
@pytest.mark.parametrize(("share", "options"), [(1, PURE), (0, {})])
def test_a_replacement_comes_from_a_source_of_its_batch(tmp_path: Path, share: int, options: dict[str, Any]) -> None:
    one = write_shards(tmp_path, "one", 48, num_damaged=3)
    two = write_shards(tmp_path, "two", 64 if options else 48)
    mixed = MixedDataset({"one": (one, 1), "two": (two, share)}, **options)
    loader = DataLoader(mixed, 4, on_error="replace", quarantine=tmp_path / "list.jsonl")
    found = [{key.partition("-")[0] for key in keys} for keys, _ in loader]
    assert all(len(names) == 1 for names in found)
    assert set().union(*found) == ({"one", "two"} if share else {"one"})


def test_sources_that_number_their_classes_differently_cause_a_warning(images: Path, tmp_path: Path) -> None:
    write_images(tmp_path, classes=1)
    (tmp_path / "class-0").rename(tmp_path / "zebra")
    mixed = MixedDataset({"one": (ImageFolder(images), 1), "two": (ImageFolder(tmp_path), 1)})
    with pytest.warns(UserWarning, match="number their classes differently") as caught:
        DataLoader(mixed, 4)
    assert len(caught) == 1


def test_an_epoch_whose_positions_do_not_fit_in_64_bits_is_refused(packed: Path) -> None:
    loader = DataLoader(mix(packed), 5)
    loader.set_epoch(2**40)
    assert len(list(loader)) == 6
    loader.set_epoch(2**62 - 1)
    assert_raises(ValueError, "epoch 4611686018427387903 of a mixture of 30 samples is out of range", list, loader)


def test_a_source_that_is_added_later_leaves_earlier_crops_unchanged(images: Path, packed: Path) -> None:
    def make() -> MixedDataset:
        sources = [ShardMapDataset(packed, transform=RandomResizedCrop(16)) for _ in range(2)]
        return MixedDataset({"one": (sources[0], 1), "two": (sources[1], 2)}, global_batch_size=4, stop=80)

    begun = DataLoader(make(), 4)
    batches = iter(begun)
    assert len(list(islice(batches, 12))) == 12
    resumed = DataLoader(make().at(18, {"one": 1, "new": (ImageFolder(images), 1)}), 4)
    resumed.load_state_dict(begun.state_dict())
    for _, (expected, labels), (found, others) in zip(range(6), batches, resumed, strict=False):
        assert torch.equal(labels, others)
        assert torch.equal(expected, found)


def test_a_wrong_length_in_torchs_loader_is_warned_of(packed: Path) -> None:
    loader = TorchLoader(mix(packed), 8, num_workers=3)
    with pytest.warns(RuntimeWarning, match="makes 6 batches, but its length is 4"):
        assert (len(loader), len(list(loader))) == (4, 6)
