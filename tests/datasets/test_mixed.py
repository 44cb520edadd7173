"""MixedDataset keeps each source's order and share on any number of ranks and workers, even in resumed runs."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import count, islice, zip_longest
from math import ceil, floor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader, Dataset, Subset

from shardio import (
    DataLoader,
    EpochSampler,
    ImageFolder,
    MixedDataset,
    SampleError,
    ShardDataset,
    ShardMapDataset,
    ShardWriter,
    StateError,
)
from shardio.transforms import RandomResizedCrop
from tests.raising import assert_raises
from tests.servers.web_folder import serve_folder
from tests.sources import encode

SIZES = {"web": 21, "code": 13, "books": 8}
SHARES = {"web": 0.5, "code": 0.3, "books": 0.2}
DAMAGED = "web-05"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three datasets of different sizes, and a damaged copy of the first one. Keys begin with the dataset's name."""
    root = tmp_path_factory.mktemp("sources")
    for name, size in {**SIZES, "damaged": SIZES["web"]}.items():
        with ShardWriter(root / name, max_shard_samples=4) as writer:
            for number in range(size):
                key = f"{'web' if name == 'damaged' else name}-{number:02d}"
                content = encode(1000 * len(name) + number, width=64 if name == "code" else 48)
                content = content[:-100] if (name, key) == ("damaged", DAMAGED) else content
                writer.write({"__key__": key, "jpg": content, "cls": number, "txt": f"text of {key}"})
    return root


class Own(Dataset[str]):
    """A user's map-style dataset of keys."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> str:
        return f"{self.name}-{index:02d}"


def open_shards(folder: Path, fields: Any = "key", **options: Any) -> dict[str, Any]:
    """Return sources that shardio's own code reads."""
    books = ShardMapDataset(folder / "books", fields=fields, **options)
    return {
        "web": ShardDataset(folder / "web", fields=fields, shuffle=True, seed=3, window=8, strata=2, **options),
        "code": ShardMapDataset(folder / "code", fields=fields, **options),
        "books": EpochSampler(books, shuffle=False),
    }


def open_any(folder: Path) -> dict[str, Any]:
    """Return sources, some of which are not shardio's, so the sources' own methods are called."""
    code = Subset(ShardMapDataset(folder / "code", fields="key"), [12, 0, 5, 3, 7])
    books = EpochSampler(Own("books", SIZES["books"]), seed=5)
    return {**open_shards(folder), "code": code, "books": books}


KINDS = {"shards": open_shards, "any": open_any}


def mix(sources: dict[str, Any], shares: dict[str, float] = SHARES, **options: Any) -> MixedDataset:
    return MixedDataset({name: (source, shares[name]) for name, source in sources.items()}, **options)


def source_of(key: str) -> str:
    return key.partition("-")[0]


def read_alone(source: Any, *, shuffle: bool = True) -> Iterator[Any]:
    """Yield the samples that a source delivers without a mixture, epoch after epoch."""
    if isinstance(source, ShardDataset):
        order: Any = copy.copy(source)
    else:
        order = source if isinstance(source, EpochSampler) else EpochSampler(source, shuffle=shuffle)
    for epoch in count():
        order.set_epoch(epoch)
        yield from order if isinstance(source, ShardDataset) else (order.dataset[index] for index in order)


def check_sources(keys: Sequence[str], sources: dict[str, Any]) -> None:
    """Assert that each source's part of a run is what the source delivers on its own."""
    for name, source in sources.items():
        own = [key for key in keys if source_of(key) == name]
        assert own == list(islice(read_alone(source), len(own))), name


def check_shares(names: Sequence[str], shares: dict[str, Fraction]) -> None:
    """Assert that each source was picked floor(n * w) or ceil(n * w) times in the first n picks, for each n."""
    counts = Counter[str]()
    for number, name in enumerate(names, 1):
        counts[name] += 1
        for each, share in shares.items():
            assert floor(number * share) <= counts[each] <= ceil(number * share), (number, each)


def exact(shares: dict[str, float]) -> dict[str, Fraction]:
    whole = {name: Fraction(str(share)) for name, share in shares.items()}
    return {name: share / sum(whole.values()) for name, share in whole.items()}


def run(loader: Any, num_epochs: int = 1) -> list[list[Any]]:
    """Return the batches of each epoch. torch's loaders need set_epoch."""
    epochs = []
    for epoch in range(num_epochs):
        if not isinstance(loader, DataLoader):
            loader.dataset.set_epoch(epoch)
        epochs.append([list(batch) for batch in loader])
    return epochs


def flatten(epochs: Iterable[Sequence[Sequence[Any]]]) -> list[Any]:
    return [sample for epoch in epochs for batch in epoch for sample in batch]


def run_steps(loaders: Sequence[Any]) -> list[list[str]]:
    """Return the sorted keys that all ranks receive together in each step of an epoch."""
    return [sorted(key for batch in step for key in batch) for step in zip_longest(*loaders, fillvalue=[])]


@pytest.mark.parametrize("kind", KINDS)
def test_each_source_has_its_share_and_its_own_order_through_all_epochs(folder: Path, kind: str) -> None:
    sources = KINDS[kind](folder)
    expected = run(DataLoader(mix(sources), batch_size=4), 5)
    check_sources(keys := flatten(expected), sources)
    check_shares(list(map(source_of, keys)), exact(SHARES))
    loader = DataLoader(mix(sources), batch_size=4, num_workers=2, persistent_workers=True)
    assert loader.calls_dataset == (kind == "any")
    assert run(loader, 5) == expected
    assert [len(epoch) for epoch in expected] == [len(loader)] * 5
    for num_workers in (0, 2):
        mixed = mix(sources, batch_size=4)
        assert (
            run(TorchLoader(mixed, 4, num_workers=num_workers, persistent_workers=num_workers > 0), 3) == expected[:3]
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batches", ["mixed", "pure"])
def test_ranks_share_the_same_steps(folder: Path, kind: str, batches: Any) -> None:
    options: dict[str, Any] = {"batches": batches, "global_batch_size": 6, "remainder": "drop", "stop": 60}
    found = list[list[list[str]]]()
    for size in (1, 2, 3):
        mixed = [mix(KINDS[kind](folder), rank=rank, world_size=size, **options) for rank in range(size)]
        ranks = [DataLoader(each, 6 // size) for each in mixed]
        assert {len(rank) for rank in ranks} == {10}
        found.append([step for _ in range(2) for step in run_steps(ranks)])
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 20


def make_changing(folder: Path, *, until: int = 2, **options: Any) -> MixedDataset:
    """Return a mixture of two sources whose weights change at two steps; a third source is added at the second."""
    sources = open_shards(folder)
    books = sources.pop("books")
    mixed = mix(sources, global_batch_size=6, **options)
    if until > 0:
        mixed.at(3, {"web": 1, "code": 2})
    return mixed.at(6, {"web": 0, "code": 1, "books": (books, 1)}) if until > 1 else mixed


def test_weights_that_change_begin_a_new_count_and_continue_the_sources(folder: Path) -> None:
    mixed = make_changing(folder, stop=100)
    keys = flatten(run(DataLoader(mixed, 6), 2))
    check_sources(keys, open_shards(folder))
    names = list(map(source_of, keys))
    check_shares(names[:18], exact({"web": 0.5, "code": 0.3}))
    check_shares(names[18:36], exact({"web": 1, "code": 2}))
    check_shares(names[36:], exact({"web": 0, "code": 1, "books": 1}))
    assert mixed.names == ("web", "code", "books")


@pytest.mark.parametrize("stop", ["first", "longest", "all-once", 50, "changing"])
def test_a_resumed_run_equals_the_uninterrupted_one(folder: Path, stop: Any) -> None:
    """The run begins on two ranks, continues on three, and is resumed once more on one rank in its second epoch."""

    def make(until: int = 2, **options: Any) -> MixedDataset:
        if stop == "changing":
            return make_changing(folder, until=until, stop=50, remainder="keep", **options)
        return mix(open_shards(folder), stop=stop, repeat={"books": 2}, remainder="keep", **options)

    whole = [DataLoader(make(rank=0, world_size=1), 6)]
    expected = [run_steps(whole) for _ in range(2)]
    # This run learns of the later change of weights only after the interruption.
    ranks = [DataLoader(make(until=1, rank=rank, world_size=2), 3, num_workers=1 - rank) for rank in range(2)]
    found = run_steps([islice(rank, 4) for rank in ranks])
    state = json.loads(json.dumps(ranks[0].state_dict()))
    assert ranks[1].state_dict() == state
    workers: list[dict[str, Any]] = [{}, {"num_workers": 2, "persistent_workers": True}, {}]
    ranks = [DataLoader(make(rank=rank, world_size=3), 2, **options) for rank, options in enumerate(workers)]
    for rank in ranks:
        rank.load_state_dict(state)
    assert found + run_steps(ranks) == expected[0]
    found = run_steps([islice(rank, 2) for rank in ranks])
    resumed = DataLoader(make(rank=0, world_size=1), 6)
    resumed.load_state_dict(json.loads(json.dumps(ranks[2].state_dict())))
    assert found + run_steps([resumed]) == expected[1]


def test_a_state_of_another_past_is_refused(folder: Path) -> None:
    loader = DataLoader(make_changing(folder, until=1, stop=50), 6)
    assert len(list(islice(loader, 5))) == 5
    state = loader.state_dict()
    DataLoader(make_changing(folder, stop=70), 6).load_state_dict(state)
    others = [
        make_changing(folder, until=0, stop=50),
        make_changing(folder, until=0, stop=50).at(2, {"web": 1, "code": 2}),
        make_changing(folder, stop=50, seed=1),
        mix({name: Own(name, SIZES[name]) for name in ("web", "code")}, stop=50),
    ]
    for other in others:
        assert_raises(StateError, "belongs to another mixture", DataLoader(other, 6).load_state_dict, state)


def test_a_step_of_pure_batches_has_one_source_of_any_fields_and_shapes(folder: Path) -> None:
    def make(**options: Any) -> MixedDataset:
        sources = {
            "web": ShardDataset(folder / "web", fields=("image", "label"), shuffle=True),
            "code": ShardMapDataset(folder / "code", fields=("key", "txt", "image")),
            "books": Own("books", SIZES["books"]),
        }
        return mix(sources, batches="pure", global_batch_size=6, stop=60, source_field=True, **options)

    steps = list(
        zip(*(DataLoader(make(rank=rank, world_size=2), 3, num_workers=2 * rank) for rank in range(2)), strict=True)
    )
    names, keys = list[str](), dict[str, list[str]](web=[], code=[], books=[])
    expected = {"web": [(3, 3, 32, 48), (3,)], "code": [(3, 3, 32, 64)], "books": []}
    for ranks in steps:
        (number,) = {int(number) for batch in ranks for number in batch[-1]}
        names.append(list(SIZES)[number])
        for batch in ranks:
            shapes = [tuple(value.shape) for value in batch[:-1] if isinstance(value, torch.Tensor)]
            assert shapes == expected[names[-1]]
            keys[names[-1]] += batch[0]
    check_shares(names, exact(SHARES))
    for name, alone in (
        ("code", ShardMapDataset(folder / "code", fields="key")),
        ("books", Own("books", SIZES["books"])),
    ):
        assert keys[name] == list(islice(read_alone(alone), len(keys[name])))


def as_dict(sample: dict[str, Any]) -> dict[str, Any]:
    return sample


SAMPLES: dict[str, dict[str, Any]] = {
    "tuple": {"fields": ("key", "txt")},
    "bare value": {"fields": "key"},
    "dict": {"fields": ("key", "txt"), "transform_sample": as_dict},
}


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("is_called", [False, True])
def test_the_number_of_the_source_comes_last_but_for_the_mark(folder: Path, sample: str, is_called: bool) -> None:
    sources = open_shards(folder, **SAMPLES[sample])
    key, source = ("key", "source") if sample == "dict" else (0, 1 if sample == "bare value" else 2)
    if is_called:
        sources["code"] = Subset(Listed(sources["code"]), range(13))
    for remainder in ("pad", "mask"):
        mixed = mix(sources, source_field=True, remainder=remainder, stop=15)
        loader = DataLoader(mixed, 4, num_workers=2 * (remainder == "mask"))
        assert loader.calls_dataset == (is_called or sample == "dict")
        for batch in loader:
            assert [list(SIZES)[number] for number in batch[source].tolist()] == list(map(source_of, batch[key]))
            assert len(batch) == 2 + (sample != "bare value") + (remainder == "mask")
    check_shares([list(SIZES)[mixed[row][source]] for row in range(15)], exact(SHARES))


class Listed(Dataset[Any]):
    """A user's dataset that wraps another dataset."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


CROP = RandomResizedCrop(16)


def open_images(folder: Path, images: Path, **options: Any) -> dict[str, Any]:
    return {
        "web": ShardDataset(folder / "web", shuffle=True, **options),
        "code": ImageFolder(images, **options),
        "books": EpochSampler(ShardMapDataset(folder / "books", **options), shuffle=False),
    }


def pixels(samples: Sequence[Any]) -> list[tuple[bytes, int, int]]:
    """Return what identifies each sample: its pixels, its label and its source."""
    return [(image.numpy().tobytes(), int(label), int(number)) for image, label, number in samples]


def unbatch(batches: Any) -> list[Any]:
    return [sample for images, labels, numbers in batches for sample in zip(images, labels, numbers, strict=True)]


def test_crops_depend_on_the_sample_and_its_repetition_alone(folder: Path, images: Path) -> None:
    def make(**options: Any) -> MixedDataset:
        return mix(open_images(folder, images, transform=CROP), stop=60, source_field=True, **options)

    loader = DataLoader(make(), 6)
    epochs = [pixels(unbatch(loader)) for _ in range(2)]
    assert len({image for epoch in epochs for image, *_ in epoch}) == 120, "a repeated sample has a different crop"
    again = DataLoader(make(), 6, num_workers=2)
    assert not again.calls_dataset
    first = list(islice(again, 3))
    resumed = DataLoader(make(), 4, num_workers=1)
    resumed.load_state_dict(again.state_dict())
    assert pixels(unbatch([*first, *resumed])) == epochs[0]
    assert pixels(unbatch(resumed)) == epochs[1]
    assert pixels(unbatch(TorchLoader(make(batch_size=6), 6))) == epochs[0]
    mapped = make()
    assert pixels([mapped[number] for number in (0, 7, 59, 60, 119)]) == [
        (epochs[0] + epochs[1])[number] for number in (0, 7, 59, 60, 119)
    ]
    for torch_or_ours in (TorchLoader, DataLoader):
        batches = list(torch_or_ours(Subset(mapped, range(90)), 30, num_workers=1))
        assert pixels(unbatch(batches)) == epochs[0] + epochs[1][:30]


def test_a_transform_that_is_set_afterwards_applies_to_its_source(folder: Path, images: Path) -> None:
    """Without transforms, the pixels are those that each source delivers on its own."""
    sources = open_images(folder, images)
    mixed = mix(sources, batches="pure", global_batch_size=4, stop=40, source_field=True)
    loaders = [DataLoader(mixed, 4), DataLoader(mixed, 4, num_workers=1)]

    def check() -> None:
        alone = [read_alone(source) for source in sources.values()]
        for batches in zip(*loaders, strict=True):
            for sample in unbatch(batches[:1]):
                image, label = next(alone[int(sample[2])])
                assert torch.equal(sample[0], image)
                assert int(sample[1]) == label
            assert pixels(unbatch(batches[:1])) == pixels(unbatch(batches[1:]))
        for loader in loaders:
            loader.set_epoch(0)

    check()
    for name in ("web", "code"):  # The sources differ in their transforms, so the sources' own methods are called.
        sources[name].transform = flip
        check()
        assert all(loader.calls_dataset for loader in loaders)
    sources["books"].dataset.transform = flip
    check()
    assert not any(loader.calls_dataset for loader in loaders)


def flip(image: Any) -> Any:
    return np.ascontiguousarray(image[:, ::-1])


DAMAGES: dict[str, dict[str, Any]] = {"read": {}, "called": {"transform_sample": as_dict}}


def open_damaged(folder: Path, **options: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"fields": ("image", "key"), "transform": CROP, **options}
    return {
        "web": ShardDataset(folder / "damaged", shuffle=True, **fields),
        "books": ShardMapDataset(folder / "books", **fields),
    }


@pytest.mark.parametrize("how", DAMAGES)
def test_the_error_of_a_damaged_sample_names_it_and_the_other_batches_follow(folder: Path, how: str) -> None:
    mixed = mix(open_damaged(folder, **DAMAGES[how]), source_field=True, stop=60)
    message = rf"image of sample {DAMAGED} in {folder}/damaged/shard-\d+\.tar at byte \d+ cannot be decoded"
    assert_raises(SampleError, message, list, mixed)
    (first, second, *_) = (row for row, key in enumerate(keys_at(folder, 60)) if key == DAMAGED)
    assert_raises(SampleError, message, lambda: mixed[first])
    raised = assert_raises(SampleError, message, mixed.__getitems__, [second - 1, second, second + 1])
    assert (raised.row, raised.key) == (1, DAMAGED)
    for num_workers in (0, 2):
        batches, found = iter(DataLoader(mixed, 4, num_workers=num_workers)), 0
        for number in range(15):
            if number in (first // 4, second // 4):
                assert_raises(SampleError, message, next, batches)
            else:
                found += len(batch["key"] if isinstance(batch := next(batches), dict) else batch[1])
        assert (found, next(batches, None)) == (4 * (15 - len({first // 4, second // 4})), None)


def keys_at(folder: Path, stop: int) -> list[str]:
    """Return the keys of an epoch of the damaged sources."""
    sources = {"web": ShardDataset(folder / "web", fields="key", shuffle=True), "books": open_shards(folder)["books"]}
    return list(mix({**sources, "books": sources["books"].dataset}, stop=stop))


@pytest.mark.filterwarnings("ignore:unreadable samples:RuntimeWarning")
@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_sample_is_left_out_or_replaced(folder: Path, tmp_path: Path, how: str) -> None:
    expected = keys_at(folder, 60)
    mixed = mix(open_damaged(folder, **DAMAGES[how]), source_field=True, stop=60)

    def read(on_error: Any, num_workers: int) -> list[tuple[str, int]]:
        quarantine = tmp_path / f"{on_error}-{num_workers}"
        batches = list(DataLoader(mixed, 6, num_workers=num_workers, on_error=on_error, quarantine=quarantine))
        entries = [json.loads(line) for line in quarantine.read_text().splitlines()]
        assert [entry["key"] for entry in entries] == [DAMAGED] * expected.count(DAMAGED)
        found = [(b["key"], b["source"]) if isinstance(b, dict) else b[1:] for b in batches]
        return [(key, int(number)) for keys, numbers in found for key, number in zip(keys, numbers, strict=True)]

    skipped = read("skip", 0)
    assert [key for key, _ in skipped] == [key for key in expected if key != DAMAGED]
    assert read("skip", 2) == skipped
    replaced = read("replace", 0)
    assert read("replace", 2) == replaced
    assert [key == before for (key, _), before in zip(replaced, expected, strict=True)] == [
        key != DAMAGED for key in expected
    ]
    assert list(map(source_of, expected)) == [source_of(key) for key, _ in replaced]
    assert all(["web", "books"][number] == source_of(key) for key, number in [*skipped, *replaced])


@pytest.mark.parametrize("kind", KINDS)
def test_repeats_that_fill_the_last_step_are_marked(folder: Path, kind: str) -> None:
    mixed = [mix(KINDS[kind](folder), stop=44, remainder="mask", rank=rank, world_size=3) for rank in range(3)]
    ranks = [list(DataLoader(each, 4, num_workers=rank)) for rank, each in enumerate(mixed)]
    pairs = [pair for rank in ranks for keys, valid in rank for pair in zip(keys, valid.tolist(), strict=True)]
    assert sorted(key for key, is_valid in pairs if is_valid) == sorted(mix(KINDS[kind](folder), stop=44))
    assert (sum(not is_valid for _, is_valid in pairs), {len(rank) for rank in ranks}) == (1, {4})


@pytest.mark.parametrize("temperature", [1, 0.5, 0])
def test_proportional_weights_follow_sizes_and_repetitions(folder: Path, temperature: float) -> None:
    repeat, sizes = {"books": 3}, {**SIZES, "books": 3 * SIZES["books"]}
    options: dict[str, Any] = {"weights": "proportional", "temperature": temperature, "repeat": repeat}
    names = [source_of(key) for key in MixedDataset(open_shards(folder), **options, stop="all-once")]
    assert Counter(names) == sizes
    total = sum(size**temperature for size in sizes.values())
    for number in range(1, min(len(names) - names[::-1].index(name) for name in sizes)):  # Until a source is used up.
        for name, size in sizes.items():
            assert abs(names[:number].count(name) - number * size**temperature / total) < 1 + 1e-6


def test_remote_and_local_sources_mix(folder: Path, tmp_path: Path) -> None:
    def make(url: str, names: Sequence[str], **options: Any) -> MixedDataset:
        access: dict[str, Any] = {"cache": tmp_path / "cache"} if url.startswith("http") else {}
        sources = {
            "web": ShardDataset(f"{url}/web", fields=("key", "txt"), shuffle=True, **access),
            "code": ShardMapDataset(f"{url}/code", fields=("key", "txt"), **access),
            "books": ShardMapDataset(folder / "books", fields=("key", "txt")),
        }
        return mix({name: sources[name] for name in names}, stop=60, source_field=True, **options)

    with serve_folder(folder) as (url, requests):
        for names in (("web", "code"), tuple(SIZES)):  # If all sources are remote, one reader reads them.
            loader: Any = DataLoader(make(str(folder), names), 5)
            expected = flatten(listed(loader) for _ in range(2))
            for num_workers in (0, 2):
                loader = DataLoader(make(url, names), 5, num_workers=num_workers)
                assert flatten(listed(loader) for _ in range(2)) == expected
            loader = TorchLoader(make(url, names, batch_size=5), 5, num_workers=1)
            assert flatten([listed(loader)]) == expected[:60]
            assert make(url, names)[63] == expected[63]
        assert any("web/shard-" in path for _, path in requests)


def listed(batches: Any) -> list[list[Any]]:
    """Return one list of samples for each batch; a batch holds keys, texts and source numbers."""
    return [list(zip(keys, texts, numbers.tolist(), strict=True)) for keys, texts, numbers in batches]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata triggers torch's warning.
def test_a_stateful_loader_of_torchdata_resumes(folder: Path, num_workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    expected = run(DataLoader(mix(open_shards(folder)), 4), 2)[1]
    loader, resumed = (stateful(mix(open_shards(folder), batch_size=4), 4, num_workers=num_workers) for _ in range(2))
    for each in (loader, resumed):
        each.dataset.set_epoch(1)
    found = list(islice(loader, 3))
    resumed.load_state_dict(loader.state_dict())
    assert found + list(resumed) == expected
