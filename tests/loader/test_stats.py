"""The statistics of the loader, which count each delivered image once, by the decoder that decoded it."""

from __future__ import annotations

import json
import os
import time
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from torch.utils.data import TensorDataset
from torch.utils.data.datapipes.iter import IterableWrapper

import shardio
from shardio import DataLoader, EpochSampler, ImageFolder, ShardDataset, ShardMapDataset
from shardio.images import rendering
from shardio.loader import fork_server
from shardio.loader.statistics import describe_format
from shardio.order import Words
from shardio.transforms import (
    CenterCrop,
    Compose,
    RandomApply,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    Transform,
)
from tests.loader.programs import CALLING, WORKERS
from tests.sources import encode, write_mixed


@pytest.mark.parametrize("num_workers", [0, 3])
def test_times_and_counts_are_those_of_the_last_epoch(packed: Path, num_workers: int) -> None:
    dataset = ShardDataset(packed, transform=RandomResizedCrop(48))
    loader = DataLoader(dataset, batch_size=4, num_workers=num_workers, persistent_workers=num_workers > 0)
    before = loader.stats()
    assert (before.num_batches, before.num_samples, before.first_batch_s) == (0, 0, None)
    for _ in range(2):
        list(loader)
        stats = loader.stats()
        assert (stats.num_batches, stats.num_samples, stats.num_workers) == (6, 21, num_workers)
        assert stats.first_batch_s is not None
        assert 0 < stats.first_batch_s <= stats.elapsed_s
        assert 0 < stats.wait_for_data_s <= stats.elapsed_s
        assert min(stats.read_s, stats.transform_s, stats.decode_s) > 0
        # The time of the stages is part of the threads' time.
        assert stats.read_s + stats.transform_s + stats.decode_s <= max(num_workers, 1) * stats.elapsed_s
        assert (stats.idle_s > 0) == (num_workers > 0)
        assert stats.idle_s <= num_workers * stats.elapsed_s
        assert stats.samples_per_s == pytest.approx(21 / stats.elapsed_s)
        time.sleep(0.3)  # This pause is longer than an epoch, and must not be counted.
    list(islice(loader, 2))
    assert loader.stats().num_samples == 8


@pytest.mark.parametrize("way", ["caller", "threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_where_the_dataset_makes_the_samples_all_time_is_its_own(packed: Path, way: str) -> None:
    workers = WORKERS[way]
    sampled = ShardMapDataset(packed)
    for loader, name, num_batches in (
        (DataLoader(TensorDataset(torch.zeros(21)), batch_size=4, **workers), "TensorDataset", 6),
        (DataLoader(ShardDataset(packed), batch_size=4, **CALLING, **workers), "ShardDataset", 6),
        (DataLoader(sampled, 4, sampler=EpochSampler(sampled), **CALLING, **workers), "Shard", 6),
        (DataLoader(ShardDataset(packed), batch_size=None, **workers), "ShardDataset", 21),
    ):
        for num_epochs in range(2):
            assert loader.stats().num_batches == num_batches * num_epochs
            list(islice(loader, 2))
            assert loader.stats().num_batches == 2
            list(loader)
        stats = loader.stats()
        assert (stats.num_batches, stats.num_samples) == (num_batches, 21)
        assert stats.num_workers == workers.get("num_workers", 0)
        assert 0 < stats.transform_s == stats.python_s <= max(stats.num_workers, 1) * stats.elapsed_s
        assert stats.read_s == stats.decode_s == 0
        assert (stats.idle_s > 0) == (stats.num_workers > 0)
        assert name in stats.in_python[0] or name == "Shard"
    with pytest.raises(TypeError, match="own code does not read these samples: the dataset is a"):
        DataLoader(IterableWrapper(range(5))).stats()


def test_the_time_to_start_worker_processes_counts(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = fork_server._start_process

    def start_slowly(*arguments: Any) -> Any:
        time.sleep(0.5)  # This delay must be counted.
        return start(*arguments)

    monkeypatch.setattr(fork_server, "_start_process", start_slowly)
    loader = DataLoader(ShardDataset(packed, transform=RandomResizedCrop(48)), batch_size=4, num_workers=1)
    list(loader)
    stats = loader.stats()
    assert stats.first_batch_s is not None
    assert 0.5 <= stats.first_batch_s <= stats.elapsed_s


Kind = Literal["shards", "map", "folder"]

CROP = Compose([RandomResizedCrop(48), RandomHorizontalFlip()])


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images for the kernel (7), libjpeg-turbo (2) and Pillow (3), in a directory and in shards."""
    root = tmp_path_factory.mktemp("mixed")
    write_mixed(root / "images")
    shardio.pack(root / "images", root / "shards", max_shard_samples=5)
    return root


class Unchanged(Transform):
    """A user-defined transform that needs the pixels."""

    def draw(self, sizes: NDArray[np.int64], rng_keys: Words) -> NDArray[np.int64]:
        return sizes

    def apply(self, image: Any, parameters: Any) -> Any:
        return image


def unchanged(value: Any) -> Any:
    return value


def make_loader(mixed: Path, kind: Kind = "shards", transform: Any = CROP, **options: Any) -> DataLoader:
    if kind == "shards":
        return DataLoader(ShardDataset(mixed / "shards", shuffle=True, transform=transform), **options)
    dataset: Any = ImageFolder(mixed / "images", transform=transform)
    if kind == "map":
        dataset = ShardMapDataset(mixed / "shards", transform=transform)
    return DataLoader(dataset, sampler=EpochSampler(dataset), **options)


def decoder_names(loader: DataLoader) -> tuple[int, ...]:
    counts = loader.stats().num_images_by_decoder
    assert counts["raw"] == 0
    return counts["kernel"], counts["libjpeg"], counts["pillow"]


@pytest.mark.parametrize(("kind", "num_workers"), [("shards", 0), ("shards", 1), ("map", 0), ("folder", 1)])
def test_each_delivered_image_is_counted_by_its_decoder(mixed: Path, kind: Kind, num_workers: int) -> None:
    loader = make_loader(mixed, kind, batch_size=5, num_workers=num_workers, persistent_workers=num_workers > 0)
    assert decoder_names(loader) == (0, 0, 0)
    for _ in range(2):
        for number, _ in enumerate(loader, 1):
            assert sum(decoder_names(loader)) == loader.stats().num_samples == min(5 * number, 12)
        assert decoder_names(loader) == (7, 2, 3)


def test_rotated_pillow_and_undecoded_images_and_those_without_a_kernel_count_too(
    mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count(dataset: Any, **options: Any) -> tuple[int, ...]:
        list(loader := DataLoader(dataset, batch_size=5, **options))
        return decoder_names(loader)

    exif = Image.Exif()
    exif[274] = 6  # The orientation tag says that the image is rotated by 90°.
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "turned.jpg").write_bytes(encode(0, exif=exif))
    assert count(ImageFolder(tmp_path, transform=CROP, orientation="apply")) == (1, 0, 0)
    samples: list[Any] = [{}, {"transform": unchanged}, {"transform_sample": lambda sample: list(sample.values())}]
    for options in samples:
        assert count(ShardDataset(mixed / "shards", decode="pil", **options), collate_fn=unchanged) == (0, 0, 12)
    for fields in (("label", "key"), ("jpg", "key")):
        assert count(ShardDataset(mixed / "shards", fields=fields, missing=None), collate_fn=list) == (0, 0, 0)
    monkeypatch.setattr(rendering, "find_kernel", lambda: None)
    assert count(ShardDataset(mixed / "shards", transform=CROP)) == (0, 9, 3)


@pytest.mark.parametrize(
    "transform",
    [
        None,
        Resize((24, 36)),
        RandomResizedCrop(48, antialias=True),
        Compose([Resize(60), CenterCrop(40), Resize(30)]),  # The second resize works on pixels.
        Compose([Unchanged(), Resize(24)]),
        Compose([RandomResizedCrop(48), unchanged, CenterCrop(40)]),
        RandomApply([Compose([Unchanged(), CenterCrop(20)])], p=1.0),
    ],
)
def test_the_files_decoder_counts_whatever_the_transform_does(mixed: Path, transform: Any) -> None:
    loader = make_loader(mixed, transform=transform, batch_size=5)
    list(loader)
    assert decoder_names(loader) == (7, 2, 3)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_trace_holds_the_times_of_the_statistics(packed: Path, tmp_path: Path, num_workers: int) -> None:
    dataset = ShardDataset(packed, fields="image", transform=RandomResizedCrop(48), transform_sample=dict)
    loader = DataLoader(dataset, batch_size=4, num_workers=num_workers)
    list(loader)
    stats = loader.stats(trace=tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    by_name = {name: [span for span in spans if span["name"] == name] for name in ("read", "your code", "decode")}
    for name, expected_s in (("read", stats.read_s), ("your code", stats.python_s), ("decode", stats.decode_s)):
        assert sum(span["dur"] for span in by_name[name]) / 1e6 == pytest.approx(expected_s, abs=1e-5)
    waits = [span for span in spans if span["name"] == "wait for a batch"]
    assert sum(span["dur"] for span in waits) / 1e6 == pytest.approx(stats.wait_for_data_s, abs=1e-5)
    assert len(waits) == stats.num_batches == 6
    assert all(span["ts"] >= 0 and span["ts"] + span["dur"] <= 1e6 * stats.elapsed_s + 1 for span in waits)
    assert [event["ts"] for event in spans] == sorted(event["ts"] for event in spans)
    # A thread's spans do not overlap.
    for thread_id in {span["tid"] for span in spans if span not in waits}:
        own = [span for span in spans if span["tid"] == thread_id]
        assert all(one["ts"] + one["dur"] <= other["ts"] + 1 for one, other in pairwise(own))
    makers = {span["pid"] for span in spans if span not in waits}
    assert (os.getpid() in makers) == (num_workers == 0)
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    others = dict.fromkeys(makers - {os.getpid()}, "shardio worker process")
    assert named == {os.getpid(): "shardio training process"} | others


@pytest.mark.parametrize("num_workers", [0, 1])
def test_printed_statistics_are_the_table_of_bench_and_openmetrics_hold_their_figures(
    packed: Path, num_workers: int
) -> None:
    loader = DataLoader(ShardDataset(packed, transform=RandomResizedCrop(48)), batch_size=4, num_workers=num_workers)
    assert str(loader.stats()) == "no batches have been delivered yet"
    list(loader)
    stats = loader.stats()
    families = text_string_to_metric_families(stats.format_openmetrics())  # type: ignore[no-untyped-call]
    found = {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}
    assert found["shardio_samples_total",] == stats.num_samples == 21
    assert found["shardio_wait_seconds_total",] == stats.wait_for_data_s
    assert found["shardio_stage_seconds_total", "decode"] == stats.decode_s
    assert found["shardio_images_total", "kernel"] == stats.num_images_by_decoder["kernel"]
    assert ("shardio_stage_seconds_total", "idle") in found or not num_workers
    assert stats.stored == describe_format(loader.dataset) is not None
    first, *table = str(stats).splitlines()
    assert first.startswith("21 samples in 6 batches, ")
    assert table == stats.describe_stages()
    assert num_workers or table[-1].startswith("no workers on ")
